"""Settings of a tune, their limits, their results, and the memory and samples/s predicted from these.  Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from vesuvius.config import Config
from vesuvius.config.describe import to_yaml
from vesuvius.errors import one_line
from vesuvius.experiments import Ended
from vesuvius.runlog.units import format_size

Knob = str
"""Name of a field of `Setting`."""
READER_KNOBS = ("workers", "prefetch_factor", "requests")
"""The knobs that can change in a running trainer."""
_SIZES = {*READER_KNOBS, "train_batch_size", "accumulate_steps"}

# The planner may be off by half: planned growth counts more, planned savings count less.
_GROWTH, _SAVING = 1.5, 0.5
_SPREAD = 0.01  # relative spread of the peaks of one setting
_LOW_BELOW, _MEDIUM_BELOW = 0.70, 0.90  # shares of the limits


@dataclass(frozen=True)
class Setting:
    """Values of the knobs of `training.*` and of `data.store.requests`; none changes which samples a step contains."""

    workers: int
    requests: int
    prefetch_factor: int
    train_batch_size: int
    accumulate_steps: int
    amp: str
    compile: bool | Literal["auto"]
    channels_last: bool | Literal["auto"]

    @classmethod
    def of(cls, config: Config) -> Self:
        values = {knob: getattr(config.training, knob) for knob in KNOBS if knob != "requests"}
        values["train_batch_size"] = config.training.micro_batch
        return cls(requests=config.data.store.requests, **values)

    @property
    def global_batch(self) -> int:
        return self.train_batch_size * self.accumulate_steps

    @property
    def of_trainer(self) -> tuple[object, ...]:
        """The values that affect the step time, and that only a new process can change."""
        return tuple(value for knob, value in vars(self).items() if knob not in READER_KNOBS)

    def changes(self, source: Self) -> dict[Knob, Any]:
        """The values that differ from another setting, by knob, in the order of the knobs."""
        return {knob: value for knob, value in vars(self).items() if value != getattr(source, knob)}

    def overrides(self, source: Self) -> list[str]:
        """The command-line overrides that turn a config with setting `source` into this one."""
        return [f"{key_of(knob)}={to_yaml(value)}" for knob, value in self.changes(source).items()]

    def applied_to(self, config: Config) -> Config:
        training = {knob: getattr(self, knob) for knob in KNOBS if knob != "requests"}
        data = config.data.with_store(requests=self.requests)
        return config.with_training(**training).model_copy(update={"data": data})


KNOBS: tuple[Knob, ...] = tuple(field.name for field in fields(Setting))


def key_of(knob: Knob) -> str:
    return "data.store.requests" if knob == "requests" else f"training.{knob}"


def in_words(setting: Setting, before: Setting) -> str:
    """The changes as `workers 2 -> 4, prefetch_factor 1 -> 2`; 'nothing' if there are none."""
    changes = setting.changes(before)
    parts = [f"{knob} {to_yaml(getattr(before, knob))} -> {to_yaml(value)}" for knob, value in changes.items()]
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class SearchSpace:
    """Limits of the knobs and of the machine; with the results, the entire input of the policy."""

    source: Setting  # the setting of the config
    budget_s: float  # seconds for all trials together
    trial_s: float  # seconds to measure in a trial
    most_workers: int
    most_prefetch: int
    most_requests: int  # the source's number if no volume is on a remote store
    most_batch: int  # of the micro-batch
    ram_limit_bytes: int  # first threshold of the memory guard; trials predicted above it are not started
    vram_limit_bytes: int | None  # the same for the GPU; None on a CPU
    kept: tuple[Knob, ...] = ()  # knobs that keep the source's value
    others: str = ""  # what other programs use of the machine, in words

    @property
    def on_gpu(self) -> bool:
        return self.vram_limit_bytes is not None

    def compiles(self, setting: Setting) -> bool:
        """Whether the first step compiles; `auto` compiles on a GPU."""
        return setting.compile is True or (setting.compile == "auto" and self.on_gpu)


@dataclass(frozen=True)
class Planned:
    ram_bytes: int  # peak host memory of a short run
    later_bytes: int  # additional memory of a long run: readers of two Ray executions exist during a handover
    vram_bytes: int | None  # peak GPU memory, with the reserve; None on a CPU


Planner = Callable[[Setting], Planned]
"""Predicts the memory of a setting.  Pure."""

TrialKind = Literal["run", "reading", "step"]
"""Kind of a measurement: `run` = the training loop; `reading` = batches taken as soon as they arrive, without a step;
`step` = optimizer steps on one batch while the readers are idle."""

Risk = Literal["low", "medium", "high"]
OOM_OUTCOMES: tuple[Ended, ...] = ("guard", "gpu_memory", "killed")
"""Outcomes caused by a lack of memory: such a setting is never recommended."""
_ENDED_BY = {
    "guard": "the memory guard",
    "gpu_memory": "a lack of GPU memory",
    "killed": "a kill",
    "failed": "an error",
    "timeout": "its time limit",
}


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

    @property
    def end(self) -> str:
        """`ended by the memory guard: CAUSE`."""
        return f"ended by {_ENDED_BY[self.ended]}: {one_line(self.cause) or 'cause unknown'}"

    @property
    def failure(self) -> str:
        """`a run with workers 8, ... was ended by the memory guard: ...`."""
        s = self.setting
        knobs = f"workers {s.workers}, prefetch_factor {s.prefetch_factor}, train_batch_size {s.train_batch_size}"
        return f"a {self.kind} trial with {knobs} was {self.end}"


class PredictedMemory:
    """Predicts memory from the planner, corrected by the trials so far, which may grow after construction."""

    def __init__(self, space: SearchSpace, planner: Planner, results: Sequence[Result]) -> None:
        self._space, self._planner, self._results = space, planner, results

    def obstacle(self, setting: Setting) -> str | None:
        """Why a setting may not be tried; None if it may."""
        if kept := [knob for knob in self._space.kept if knob in setting.changes(self._space.source)]:
            return f"--keep {','.join(kept)}"
        if (failed := next((result for result in self._results if self._bars(result, setting)), None)) is not None:
            return failed.failure
        limits = (
            (self.vram_bytes(setting), "GPU memory", self._space.vram_limit_bytes),
            (self.run_ram_bytes(setting), "RAM", self._space.ram_limit_bytes),
        )
        for size_bytes, where, limit_bytes in limits:
            if size_bytes is not None and limit_bytes is not None and size_bytes > limit_bytes:
                return f"up to {format_size(size_bytes)} of {where} predicted, limit {format_size(limit_bytes)}"
        return None

    def run_ram_bytes(self, setting: Setting) -> int:
        """The maximum host memory of a full run, which exceeds that of a short one."""
        return self._most(setting, "ram_bytes") + self._planner(setting).later_bytes

    def vram_bytes(self, setting: Setting) -> int | None:
        """The maximum GPU memory; None on a CPU."""
        return None if self._planner(setting).vram_bytes is None else self._most(setting, "vram_bytes")

    def risk(self, setting: Setting) -> Risk:
        """How close a full run comes to the limits: low below 70 %, medium below 90 %."""
        share = self.run_ram_bytes(setting) / self._space.ram_limit_bytes
        if (vram_bytes := self.vram_bytes(setting)) is not None and self._space.vram_limit_bytes:
            share = max(share, vram_bytes / self._space.vram_limit_bytes)
        return "low" if share < _LOW_BELOW else "medium" if share < _MEDIUM_BELOW else "high"

    def _most(self, setting: Setting, name: Literal["ram_bytes", "vram_bytes"]) -> int:
        """An upper estimate in bytes: the nearest measured peak plus the planned difference.

        Until a full run is measured, at least the plan: readers alone compute nothing, steps alone read little.
        """

        def planned(other: Setting) -> int:
            return getattr(self._planner(other), name) or 0

        peaks: dict[bool, dict[Setting, int]] = {True: {}, False: {}}  # of full runs, and of parts
        for result in self._results:
            if result.ended == "ok" and (size_bytes := getattr(result, name)) is not None:
                of_kind = peaks[result.kind == "run"]
                of_kind[result.setting] = max(of_kind.get(result.setting, 0), size_bytes)
        if setting in peaks[True]:
            return peaks[True][setting]
        wanted, known = planned(setting), peaks[True] or peaks[False]
        if not known:
            return wanted
        near = min(known, key=lambda s: (len(_switches_apart(s, setting)), abs(planned(s) - wanted)))
        growth = wanted - planned(near)
        most = known[near] + (_GROWTH if growth > 0 else _SAVING) * growth
        return max(int((1 + _SPREAD) * most), peaks[False].get(setting, 0), 0 if peaks[True] else wanted)

    def _bars(self, result: Result, setting: Setting) -> bool:
        """Whether a failed trial rules out a setting; a lack of memory also rules out all that are planned as large."""
        if result.ended == "ok" or result.setting == setting:
            return result.ended != "ok"
        if result.ended not in OOM_OUTCOMES or _switches_apart(result.setting, setting):
            return False  # errors and timeouts do not rule out larger settings
        if any(other.setting == setting and other.ended == "ok" for other in self._results):
            return False
        wanted, died = self._planner(setting), self._planner(result.setting)
        if result.ended == "gpu_memory":
            return (wanted.vram_bytes or 0) >= (died.vram_bytes or 0)
        return wanted.ram_bytes >= died.ram_bytes


class PredictedRates:
    """Predicts samples/s from the trials so far: the smaller of the readers' and the trainer's limit."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def of(self, kind: TrialKind, setting: Setting) -> list[Result]:
        """The trials of a kind that apply to a setting: steps do not depend on readers, and readers not on steps."""

        def shared(s: Setting) -> object:
            return s if kind == "run" else s.of_trainer if kind == "step" else (s.workers, s.requests)

        return [r for r in self._measured(kind) if shared(r.setting) == shared(setting)]

    def measured(self, kind: TrialKind, setting: Setting) -> float | None:
        """Samples/s: the geometric mean of the trials; None if there are none."""
        rates = [result.rate for result in self.of(kind, setting)]
        return math.exp(math.fsum(map(math.log, rates)) / len(rates)) if rates else None

    def expected(self, kind: TrialKind, setting: Setting) -> float | None:
        """Samples/s: measured, or predicted; None if no measurement allows a prediction."""
        if (measured := self.measured(kind, setting)) is not None or kind == "step":
            return measured
        return self._scaled(setting) if kind == "reading" else self._predicted(setting)

    def limit(self, setting: Setting) -> float | None:
        """The smaller limit of readers and trainer; None without a trial of each."""
        readers, trainer = self.expected("reading", setting), self.measured("step", setting)
        if readers is None or trainer is None:
            return None
        return min(readers, trainer) if setting.workers else 1 / (1 / readers + 1 / trainer)  # one after the other

    def waiting_share(self, setting: Setting) -> float:
        """Share of a reader's time spent waiting for the store, which more requests may hide; 0 if unknown."""
        times = [(r.decode_s, r.reader_s) for r in self.of("reading", setting)]
        decode_s, reader_s = times[-1] if times else (None, None)
        return 0.0 if decode_s is None or not reader_s else 1 - min(decode_s / reader_s, 1.0)

    def runs(self) -> list[Setting]:
        """The settings with a measured full run, the fastest first."""
        settings = dict.fromkeys(r.setting for r in self._measured("run"))
        return sorted(settings, key=lambda s: -(self.measured("run", s) or 0.0))

    def _measured(self, kind: TrialKind) -> list[Result]:
        return [r for r in self._results if r.kind == kind and r.ended == "ok"]

    def _predicted(self, setting: Setting) -> float | None:
        """The smaller limit, reduced by the shortfall of the nearest measured run."""
        limit, runs = self.limit(setting), self.runs()
        if limit is None or not runs:
            return limit
        near = next((other for other in runs if other.of_trainer == setting.of_trainer), runs[0])
        reached, its_limit = self.measured("run", near), self.limit(near)
        return limit * min(reached / its_limit, 1.0) if reached and its_limit else limit

    def _scaled(self, setting: Setting) -> float | None:
        """The rate of the nearest trial, scaled by the number of readers."""
        counts = {r.setting: max(r.setting.workers, 1) for r in self._measured("reading")}
        if not counts:
            return None
        count = max(setting.workers, 1)
        near = min(counts, key=lambda s: (s.requests != setting.requests, abs(math.log(counts[s] / count))))
        return (self.measured("reading", near) or 0.0) * count / counts[near]


def _switches_apart(one: Setting, other: Setting) -> set[str]:
    return set[str](one.changes(other)) - _SIZES
