"""What a tune may try: caps of the knobs and limits of the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, Self

from vesuvius.tuning.setting import Knob, Setting

Goal = Literal["samples_s", "cost"]

WITHIN: dict[Goal, float] = {"samples_s": 0.03, "cost": 0.10}
"""A cheaper setting within this share of the most samples per second is taken."""


@dataclass(frozen=True)
class Space:
    """Caps of the knobs and limits of the machine; with the blocks, the whole input of the policy.

    Attributes:
        source: the setting of the config.
        goal: `samples_s` takes the cheapest setting within 3 % of the fastest, `cost` within 10 %.
        scale_batch: whether the effective batch may grow.
        budget_s: seconds for all blocks together.
        block_s: seconds to measure in a block.
        on_gpu: whether steps run on a GPU.
        cores: CPU cores that the run may use.
        most_workers, most_prefetch, most_requests: caps.
        remote: whether any volume is on a remote store, where requests in flight matter.
        most_batch: cap on the micro-batch, from tensors of 2^31 elements or from `scale_batch`.
        levels: network levels that `checkpoint_levels` may name, highest resolution first.
        deterministic: whether the config asks for determinism, which keeps cuDNN's benchmark off.
        ram_limit_bytes: no block starts with a predicted memory above this, the first threshold of the guard.
        vram_limit_bytes: the same for the GPU; None on a CPU.
        kept: knobs that keep the value of the source.
    """

    source: Setting
    goal: Goal
    scale_batch: bool
    budget_s: float
    block_s: float
    on_gpu: bool
    cores: float
    most_workers: int
    most_prefetch: int
    remote: bool
    most_requests: int
    most_batch: int
    levels: tuple[int, ...]
    deterministic: bool
    ram_limit_bytes: int
    vram_limit_bytes: int | None
    kept: tuple[Knob, ...] = ()

    def kept_by(self, setting: Setting) -> str | None:
        """Return `--keep ...` with the kept knobs that a setting changes; None where it changes none."""
        changed = [knob for knob in self.kept if knob in setting.changes(self.source)]
        return f"--keep {','.join(changed)}" if changed else None

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From `record()`, by way of JSON."""
        tuples = {key: tuple(record[key]) for key in ("levels", "kept")}
        return cls(**record | tuples | {"source": Setting.from_record(record["source"])})


class Planner(Protocol):
    """Predicts the memory of a setting before anything runs.  Pure."""

    def ram_bytes(self, setting: Setting) -> int:
        """Peak host memory of a short run."""
        ...

    def vram_bytes(self, setting: Setting) -> int | None:
        """Peak GPU memory, with the reserve; None on a CPU."""
        ...

    def later_bytes(self, setting: Setting) -> int:
        """Additional host memory of a long run: readers of two Ray executions exist during a handover."""
        ...
