"""The data of a tune: settings (`Setting`), their limits (`SearchSpace`) and measurements (`Result`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from vesuvius.config import Config
from vesuvius.config.describe import to_yaml
from vesuvius.experiments import Ended

Knob = str
"""Name of a field of `Setting`."""
READER_KNOBS = ("workers", "prefetch_factor", "requests")
"""The knobs that can change in a running trainer."""


@dataclass(frozen=True)
class Setting:
    """Values of the knobs, named as in `training.*`; `requests` is `data.store.requests`.

    None of them changes which samples a step contains.
    """

    workers: int
    requests: int
    prefetch_factor: int
    train_batch_size: int
    accumulate_steps: int
    amp: str
    compile: bool | Literal["auto"]
    channels_last: bool | Literal["auto"]
    cudnn_benchmark: bool

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the setting of a config."""
        values = {knob: getattr(config.training, knob) for knob in KNOBS if knob != "requests"}
        values["train_batch_size"] = config.training.micro_batch
        return cls(requests=config.data.store.requests, **values)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return self.train_batch_size * self.accumulate_steps

    def changes(self, source: Setting) -> dict[Knob, Any]:
        """Return the values that differ from another setting, by knob, in the order of the knobs."""
        return {knob: value for knob, value in vars(self).items() if value != getattr(source, knob)}

    def overrides(self, source: Setting) -> list[str]:
        """Return the command-line overrides that turn a config with setting `source` into this one."""
        return [f"{key_of(knob)}={to_yaml(value)}" for knob, value in self.changes(source).items()]

    def applied_to(self, config: Config) -> Config:
        """Return the config with these values."""
        training = {knob: getattr(self, knob) for knob in KNOBS if knob != "requests"}
        data = config.data.with_store(requests=self.requests)
        return config.with_training(**training).model_copy(update={"data": data})


KNOBS: tuple[Knob, ...] = tuple(field.name for field in fields(Setting))


def key_of(knob: Knob) -> str:
    """Return the config key of a knob."""
    return "data.store.requests" if knob == "requests" else f"training.{knob}"


def trainer_knobs(setting: Setting) -> tuple[object, ...]:
    """The values that affect the step time, and that only a new process can change."""
    return tuple(value for knob, value in vars(setting).items() if knob not in READER_KNOBS)


def in_words(setting: Setting, before: Setting) -> str:
    """Return the changes as `workers 2 -> 4, prefetch_factor 1 -> 2`; 'nothing' if there are none."""
    changes = setting.changes(before)
    parts = [f"{knob} {to_yaml(getattr(before, knob))} -> {to_yaml(value)}" for knob, value in changes.items()]
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class SearchSpace:
    """Limits of the knobs and of the machine; with the results, the entire input of the policy."""

    source: Setting  # the setting of the config
    budget_s: float  # seconds for all trials together
    trial_s: float  # seconds to measure in a trial
    # most_workers, most_prefetch, most_requests, most_batch (of the micro-batch): caps
    most_workers: int
    most_prefetch: int
    most_requests: int  # the source's number if no volume is on a remote store
    most_batch: int
    ram_limit_bytes: int  # first threshold of the memory guard; trials predicted above it are not started
    vram_limit_bytes: int | None  # the same for the GPU; None on a CPU
    kept: tuple[Knob, ...] = ()  # knobs that keep the source's value
    others: str = ""  # what other programs use of the machine, in words

    @property
    def on_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return self.vram_limit_bytes is not None

    def compiles(self, setting: Setting) -> bool:
        """Whether the first step compiles; `auto` compiles on a GPU."""
        return setting.compile is True or (setting.compile == "auto" and self.on_gpu)


@dataclass(frozen=True)
class Planned:
    """The planned memory of a setting."""

    ram_bytes: int  # peak host memory of a short run
    later_bytes: int  # additional memory of a long run: readers of two Ray executions exist during a handover
    vram_bytes: int | None  # peak GPU memory, with the reserve; None on a CPU


Planner = Callable[[Setting], Planned]
"""Predicts the memory of a setting.  Pure."""

TrialKind = Literal["run", "readers", "step"]
"""Kind of a measurement: `run` = the training loop; `readers` = batches taken as soon as they arrive, without a step;
`step` = optimizer steps on one batch while the readers are idle."""

OOM_OUTCOMES: tuple[Ended, ...] = ("guard", "gpu_memory", "killed")
"""Outcomes caused by a lack of memory: such a setting is never recommended."""


@dataclass(frozen=True)
class Result:
    """A measurement of a setting, and how it ended."""

    setting: Setting
    kind: TrialKind
    ended: Ended
    cause: str  # one line; '' if it ended ok
    seconds: float  # in total: restart, reconfiguration, warm-up and measurement
    samples: int = 0  # measured; 0 unless ok
    measured_s: float = 0.0  # seconds that these took, or that readers need for them if they had been read ahead
    data_share: float | None = None  # share of the step time spent waiting for data; for `run` only
    # seconds that one reader takes per sample, including waits for the store; None = nothing was read
    reader_s: float | None = None
    decode_s: float | None = None  # the decoding part of `reader_s`
    # peak of trainer, readers and object store with this setting; None = not known
    ram_bytes: int | None = None
    vram_bytes: int | None = None  # peak GPU memory of the trainer, including the CUDA context; None on a CPU
    text: str = ""  # the verdict of a `run` in words

    @property
    def rate(self) -> float:
        """Samples per second; 0 unless ok."""
        return self.samples / self.measured_s if self.measured_s else 0.0
