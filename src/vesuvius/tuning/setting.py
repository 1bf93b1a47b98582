"""The knobs of a tune, as one value.  None of them changes which samples a step contains."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from vesuvius.config import Config
from vesuvius.config.describe import to_yaml

Knob = Literal[
    "workers",
    "requests",
    "prefetch_factor",
    "train_batch_size",
    "accumulate_steps",
    "amp",
    "compile",
    "channels_last",
    "checkpoint_levels",
    "cudnn_benchmark",
    "cuda_allocator",
]


@dataclass(frozen=True)
class Setting:
    """Values of the knobs, named as in `training.*`; `requests` is `data.store.requests`."""

    workers: int
    requests: int
    prefetch_factor: int
    train_batch_size: int
    accumulate_steps: int
    amp: str
    compile: bool
    channels_last: bool
    checkpoint_levels: tuple[int, ...]
    cudnn_benchmark: bool
    cuda_allocator: str

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the setting of a config."""
        values = {knob: getattr(config.training, knob) for knob in get_args(Knob) if knob != "requests"}
        return cls(requests=config.data.store.requests, **values)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From `record()`, by way of JSON."""
        return cls(**record | {"checkpoint_levels": tuple(record["checkpoint_levels"])})

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return self.train_batch_size * self.accumulate_steps

    def changes(self, source: Setting) -> dict[Knob, Any]:
        """Return the values that differ from another setting, by knob, in the order of the knobs."""
        return {
            f.name: getattr(self, f.name)  # type: ignore[misc]
            for f in fields(self)
            if getattr(self, f.name) != getattr(source, f.name)
        }

    def overrides(self, source: Setting) -> list[str]:
        """Return the command-line overrides that turn a config with setting `source` into this one."""
        return [f"{key_of(knob)}={to_yaml(value)}" for knob, value in self.changes(source).items()]

    def applied_to(self, config: Config) -> Config:
        """Return the config with these values."""
        training = {knob: getattr(self, knob) for knob in get_args(Knob) if knob != "requests"}
        store = config.data.store.model_copy(update={"requests": self.requests})
        return config.model_copy(
            update={
                "training": config.training.model_copy(update=training),
                "data": config.data.model_copy(update={"store": store}),
            }
        )


def key_of(knob: Knob) -> str:
    """Return the config key of a knob."""
    return "data.store.requests" if knob == "requests" else f"training.{knob}"


def in_words(setting: Setting, before: Setting) -> str:
    """Return the changes as `workers 2 -> 4, prefetch_factor 1 -> 2`; 'nothing' if there are none."""
    changes = setting.changes(before)
    parts = [f"{knob} {to_yaml(getattr(before, knob))} -> {to_yaml(value)}" for knob, value in changes.items()]
    return ", ".join(parts) or "nothing"
