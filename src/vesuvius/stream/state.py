"""The state of a stream, as plain data: what a checkpoint holds of it."""

from __future__ import annotations

from typing import Any, TypedDict

from vesuvius.errors import ConfigError, one_line


class StreamState(TypedDict):
    """Enough to continue a stream with any workers, prefetch or cache."""

    seed: int
    sample_index: int
    plan_hash: str
    quarantined: list[dict[str, Any]]


def check_state(state: Any) -> None:
    """Raises ConfigError for anything but what `state_dict` returns."""
    wanted = {"seed": int, "sample_index": int, "plan_hash": str, "quarantined": list}
    for key, kind in wanted.items():
        got = state.get(key) if isinstance(state, dict) else None
        if not isinstance(got, kind) or isinstance(got, bool) or (isinstance(got, int) and got < 0):
            raise ConfigError(
                f"a stream's state must be what state_dict() returned; got {one_line(repr(state))}, where {key} is no "
                f"{kind.__name__}; pass it on unchanged"
            )


def check_place(first: int, stop: int | None, world: int) -> None:
    """Raises ConfigError where a stream cannot begin at sample `first`."""
    if first < 0 or first % world or (stop is not None and stop < first):
        raise ConfigError(
            f"a stream begins at a multiple of the number of ranks ({world}) and does not stop before it; got first "
            f"{first} and stop {stop}; change one of them"
        )
