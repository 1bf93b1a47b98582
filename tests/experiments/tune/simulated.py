"""Machines that do not exist, with a truth that the policy cannot see: rates, memory, and a planner that is wrong.

What disturbs a measurement is in no result: the machine drifts, steps are correlated, and now and then one stalls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from vesuvius.experiments import Ended
from vesuvius.experiments.tune.measurement import Planned, Result, SearchSpace, Setting, TrialKind
from vesuvius.experiments.tune.policy import Recommendation, conclude, policy
from vesuvius.experiments.tune.search import Search

GIB = 2**30
GUARD_SHARE = 0.84  # of the limit: the threshold of the guard
TRIAL_S = 10.0
START_S, CHANGE_S = 20.0, 5.0
LEAST_STEPS = 3
SOURCE = Setting(
    workers=2,
    requests=8,
    prefetch_factor=2,
    train_batch_size=1,
    accumulate_steps=8,
    amp="auto",
    compile=False,
    channels_last=False,
)


@dataclass(frozen=True)
class Disturbance:
    """Disturbances of the speed of a machine, as shares."""

    drift: float = 0.0  # standard deviation of the speed, which wanders
    drift_s: float = 300.0  # with this time constant
    noise: float = 0.02  # standard deviation of a step's time
    correlated_steps: float = 50.0
    stalls_s: float = math.inf  # mean time between stalls of 3 s
    neighbor_s: float = math.inf  # the same of visits of a program, of 20 s each, that slow it down by 30 %


QUIET = Disturbance()
STALLS = Disturbance(stalls_s=120.0)
NEIGHBOR = Disturbance(neighbor_s=200.0)


@dataclass(frozen=True)
class Machine:
    """A machine with its run; seconds are those of a sample."""

    name: str
    source: Setting = SOURCE
    on_gpu: bool = True
    remote: bool = False
    cores: float = 16.0
    most_workers: int = 16
    read_s: float = 0.0  # a reader waits, with `source.requests`; less with more, down to a quarter
    decode_s: float = 0.05  # CPU of a reader
    sample_s: float = 0.05  # of the trainer, whatever the batch
    launch_s: float = 0.0  # of each micro-batch besides
    trainer_cores_s: float = 0.005  # CPU of the trainer
    crowding: float = 0.0  # share of the readers' rate lost for each reader beyond the cores
    contention: float = 0.0  # share of the trainer's time lost to readers on its cores
    burst: float = 0.0  # batches; the rate lost is burst / (burst + batches ahead)
    faster: dict[str, float] = field(default_factory=dict)  # by switch
    # GiB of what always is there, a reader, a sample ahead, a sample of the micro-batch
    ram: tuple[float, float, float, float] = (4.0, 0.6, 0.01, 0.02)
    vram: tuple[float, float] = (6.0, 3.0)  # always, and a sample
    ram_limit_gib: float = 120.0
    vram_limit_gib: float = 80.0
    bias: tuple[float, float, float, float] = (1.0, 0.8, 0.75, 0.8)  # planned bytes of each part for a true one
    dies_at_workers: int | None = None  # a kill that nobody could foresee
    disturbance: Disturbance = QUIET

    def __hash__(self) -> int:
        return hash(self.name)

    def space(self, budget_s: float = 6 * 3600.0) -> SearchSpace:
        """The search space of this machine."""
        return SearchSpace(
            source=self.source,
            budget_s=budget_s,
            trial_s=TRIAL_S,
            most_workers=self.most_workers,
            most_prefetch=16,
            most_requests=64 if self.remote else self.source.requests,
            most_batch=64,
            ram_limit_bytes=int(GUARD_SHARE * self.ram_limit_gib * GIB),
            vram_limit_bytes=int(GUARD_SHARE * self.vram_limit_gib * GIB) if self.on_gpu else None,
        )

    def ram_bytes(self, setting: Setting, bias: tuple[float, ...] = (1.0,) * 4) -> int:
        """At its peak: the truth, or with a bias."""
        counts = (1.0, setting.workers, self.ahead(setting) * setting.train_batch_size, setting.train_batch_size)
        return int(GIB * sum(size * count * off for size, count, off in zip(self.ram, counts, bias, strict=True)))

    def vram_bytes(self, setting: Setting, bias: float = 1.0) -> int | None:
        """The same of a GPU: autocast halves a sample."""
        if not self.on_gpu:
            return None
        sample = self.vram[1] * (2.0 if setting.amp == "off" else 1.0)
        return int(GIB * (self.vram[0] + 1.08 * bias * sample * setting.train_batch_size))

    def trainer_s(self, setting: Setting) -> float:
        """Seconds of a sample when data are there."""
        on = {knob: getattr(setting, knob) for knob in ("compile", "channels_last")}
        on["amp"] = setting.amp != "off"
        gains = [self.faster.get(knob, 1.0) for knob in on if on[knob]]
        return self.sample_s / math.prod(gains) + self.launch_s / setting.train_batch_size

    def reader_s(self, setting: Setting) -> tuple[float, float]:
        """Seconds of a sample in a reader, and those of them that need a core; as long as cores last."""
        read_s = self.read_s * max(self.source.requests / setting.requests, 0.25)
        return read_s + self.decode_s, self.decode_s

    def rate(self, setting: Setting) -> float:
        """Samples a second: the truth."""
        readers, trainer = self._readers_rate(setting), 1 / self.trainer_s(setting)
        if setting.workers == 0:  # one after the other
            return 1 / (1 / readers + 1 / trainer)
        cores = self.cores / (self.decode_s + self.trainer_cores_s)
        smooth = sum(limit**-12 for limit in (readers, trainer, cores)) ** (-1 / 12)
        bursts = self.burst / (self.burst + self.ahead(setting))
        return (1 - bursts) / (1 / smooth + self.contention * self.trainer_s(setting))

    def ahead(self, setting: Setting) -> int:
        """Batches put together ahead."""
        return max(setting.workers, 1) * setting.prefetch_factor

    def _readers_rate(self, setting: Setting) -> float:
        crowd = max(setting.workers - self.cores, 0.0)
        return max(setting.workers, 1) / self.reader_s(setting)[0] * max(1 - self.crowding * crowd, 0.1)

    def death(self, setting: Setting) -> tuple[Ended, str] | None:
        """How a trial dies; None if it does not."""
        if self.dies_at_workers is not None and setting.workers >= self.dies_at_workers:
            return "killed", "a reader was killed by signal 9"
        if self.ram_bytes(setting) > GUARD_SHARE * self.ram_limit_gib * GIB:
            return "guard", "the memory guard ended it at 84 %"
        vram = self.vram_bytes(setting)
        if vram is not None and vram > GUARD_SHARE * self.vram_limit_gib * GIB:
            return "gpu_memory", "CUDA out of memory"
        return None

    def rate_of(self, setting: Setting, kind: TrialKind) -> float:
        """Samples a second of the readers alone, the steps alone, or the whole."""
        if kind == "reading":
            return min(self._readers_rate(setting), self.cores / self.decode_s)
        return 1 / self.trainer_s(setting) if kind == "step" else self.rate(setting)

    def settings(self) -> Iterator[Setting]:
        """All that are allowed and do not die."""
        total = self.source.global_batch
        batches = [(b, total // b) for b in range(1, total + 1) if total % b == 0]
        grid = itertools.product(
            range(1, self.most_workers + 1),
            sorted({self.source.requests, *((16, 32, 64) if self.remote else ())}),
            (1, 2, 4, 8, 16),
            batches,
            sorted({self.source.amp, "auto"} if self.on_gpu else {self.source.amp}),
            sorted({self.source.compile, True}),
            sorted({self.source.channels_last, True} if self.on_gpu else {self.source.channels_last}),
        )
        for workers, requests, prefetch, (batch, pieces), amp, compiled, channels_last in grid:
            setting = replace(
                self.source,
                workers=workers,
                requests=requests,
                prefetch_factor=prefetch,
                train_batch_size=batch,
                accumulate_steps=pieces,
                amp=amp,
                compile=compiled,
                channels_last=channels_last,
            )
            if self.death(setting) is None:
                yield setting


@cache
def best_rate(machine: Machine) -> float:
    """Of all allowed settings, by trying each without noise."""
    return max(machine.rate(setting) for setting in machine.settings())


@dataclass(frozen=True)
class BiasedPlanner:
    """Knows the parts, and each of them wrongly."""

    machine: Machine

    def __call__(self, setting: Setting) -> Planned:
        machine, unplanned_bytes = self.machine, GIB // 2
        vram_bytes = machine.vram_bytes(setting, machine.bias[3])
        ram_bytes = machine.ram_bytes(setting, machine.bias) - unplanned_bytes
        return Planned(ram_bytes, 0, None if vram_bytes is None else vram_bytes - unplanned_bytes)


class SimulatedRunner:
    """Measures settings of a machine, in simulated seconds."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.now_s = 0.0  # since the start
        self._machine = machine
        self._rng = np.random.default_rng((seed, 7))
        self._living: Setting | None = None
        self._drift, self._drift_at_s = self._rng.standard_normal(), 0.0
        self._noise = 0.0
        self._visited_until_s = -math.inf

    def measure(self, setting: Setting, kind: TrialKind, seconds: float, limit_s: float) -> Result:
        machine, before = self._machine, self._living
        restart = before is None or before.of_trainer != setting.of_trainer
        other_s = START_S if restart else CHANGE_S if before != setting else 0.0
        self._living = None
        if (death := machine.death(setting)) is not None:
            self.now_s += other_s + 5.0
            return Result(setting, kind, *death, other_s + 5.0)
        truth = machine.rate_of(setting, kind)
        step_s = setting.global_batch / truth
        steps = max(round(seconds / step_s), LEAST_STEPS)
        if other_s + (steps + 1) * step_s > limit_s:
            steps = math.floor((limit_s - other_s) / step_s) - 1
        if steps < LEAST_STEPS:
            self.now_s += limit_s
            return Result(setting, kind, "timeout", f"got {max(steps, 0)} steps in {limit_s:g} s", limit_s)
        self._living = setting
        self.now_s += other_s + step_s
        measured_s = self._measured_s(steps, step_s)
        self.now_s += measured_s
        return self._result(setting, kind, steps, measured_s, other_s + step_s + measured_s)

    def _measured_s(self, steps: int, step_s: float) -> float:
        """Seconds of consecutive steps, piece by piece."""
        d, total_s = self._machine.disturbance, 0.0
        pieces = min(steps, 12)
        for n in (steps // pieces + (i < steps % pieces) for i in range(pieces)):
            old = math.exp(-n / d.correlated_steps)
            self._noise = old * self._noise + math.sqrt(1 - old**2) * self._rng.standard_normal()
            still = math.exp(-(self.now_s + total_s - self._drift_at_s) / d.drift_s)
            self._drift = still * self._drift + math.sqrt(1 - still**2) * self._rng.standard_normal()
            self._drift_at_s = self.now_s + total_s
            piece_s = n * step_s * math.exp(d.drift * self._drift + d.noise * self._noise)
            now_s = self.now_s + total_s
            if now_s >= self._visited_until_s and self._rng.random() < piece_s / d.neighbor_s:
                self._visited_until_s = now_s + self._rng.exponential(20.0)
            piece_s *= 1.3 if now_s < self._visited_until_s else 1.0
            total_s += piece_s + 3.0 * self._rng.poisson(piece_s / d.stalls_s)
        return total_s

    def _result(self, setting: Setting, kind: TrialKind, steps: int, measured_s: float, seconds: float) -> Result:
        machine, samples = self._machine, steps * setting.global_batch
        reader_s, decode_s = machine.reader_s(setting)
        peak = machine.ram_bytes(setting) * (1 + 0.005 * self._rng.standard_normal())
        return Result(
            setting,
            kind,
            "ok",
            "",
            seconds,
            samples=samples,
            measured_s=measured_s,
            data_share=1 - machine.rate(setting) * machine.trainer_s(setting) if kind == "run" else None,
            reader_s=reader_s,
            decode_s=decode_s,
            ram_bytes=int(peak),
            vram_bytes=machine.vram_bytes(setting),
        )


def tune(
    machine: Machine, seed: int = 0, space: SearchSpace | None = None, lab: SimulatedRunner | None = None
) -> Search:
    """A whole tune, to its end."""
    return run_to_end(
        Search(space or machine.space(), BiasedPlanner(machine), policy), lab or SimulatedRunner(machine, seed)
    )


def run_to_end(search: Search, lab: SimulatedRunner) -> Search:
    while (trial := search.trial) is not None:
        search.tell(lab.measure(trial.setting, trial.kind, search.space.trial_s, trial.limit_s))
    return search


MACHINES = [
    # 5 cores: readers stop scaling there
    Machine("data-bound on cores", cores=5, decode_s=0.1, sample_s=0.01, disturbance=NEIGHBOR),
    # store latency: requests in flight, then readers
    Machine(
        "data-bound on latency",
        remote=True,
        read_s=0.8,
        decode_s=0.02,
        sample_s=0.02,
        source=replace(SOURCE, workers=1, prefetch_factor=1),
        disturbance=STALLS,
    ),
    Machine("compute-bound", sample_s=0.4, launch_s=0.008, source=replace(SOURCE, workers=8), disturbance=STALLS),
    # micro-batches pay until the GPU is full
    Machine("VRAM-capped", sample_s=0.05, launch_s=0.1, vram=(8.0, 7.0), source=replace(SOURCE, accumulate_steps=16)),
    # readers pay until memory is full
    Machine("RAM-capped", sample_s=0.01, decode_s=0.2, ram=(6.0, 3.0, 0.01, 0.02), ram_limit_gib=41.0),
    Machine("noisy", sample_s=0.025, decode_s=0.07, disturbance=Disturbance(noise=0.2)),
    Machine("dies above a threshold", sample_s=0.01, decode_s=0.1, dies_at_workers=7),
    # more readers than cores are in each other's way
    Machine("knee", cores=6, sample_s=0.01, decode_s=0.06, read_s=0.06, crowding=0.12),
    # what a step takes is what matters, and then the readers are too slow again
    Machine(
        "switches matter",
        sample_s=0.5,
        decode_s=0.3,
        faster={"amp": 2.2, "compile": 1.3, "channels_last": 1.1},
        source=replace(SOURCE, amp="off"),
    ),
    Machine("bursts", burst=1.5, sample_s=0.1, decode_s=0.05, source=replace(SOURCE, prefetch_factor=1)),
    # more readers alone gain little, larger pieces alone nothing, both together double
    Machine(
        "coupled",
        on_gpu=False,
        cores=16,
        most_workers=8,
        read_s=0.3,
        decode_s=0.01,
        sample_s=0.042,
        launch_s=0.034,
        source=replace(SOURCE, workers=1, accumulate_steps=4),
        disturbance=NEIGHBOR,
    ),
    Machine(
        "CPU",
        on_gpu=False,
        cores=4,
        sample_s=0.3,
        launch_s=0.2,
        decode_s=0.05,
        ram=(2.0, 0.3, 0.01, 1.5),
        ram_limit_gib=16.0,
        faster={"compile": 1.4},
        bias=(1.0, 0.9, 0.75, 0.67),
    ),
]
SLOW = Machine(
    "18 s a step",
    source=replace(SOURCE, workers=1, accumulate_steps=1),
    cores=12,
    most_workers=12,
    decode_s=18.0,
    sample_s=1.5,
    trainer_cores_s=0.0,
    vram=(8.0, 50.0),
)
"""Each step waits for one reader.  A trial is cut after a few steps, and half an hour holds a handful of them."""
CROWDED = Disturbance(drift=0.3, drift_s=60.0, noise=0.4, correlated_steps=30, neighbor_s=60.0)
BUSY = Machine(
    "busy, 150 ms",
    on_gpu=False,
    remote=True,
    cores=2,
    most_workers=8,
    read_s=0.65,
    decode_s=0.015,
    sample_s=0.01,
    launch_s=0.05,
    contention=0.5,
    faster={"compile": 0.95},
    source=replace(SOURCE, workers=1, requests=2, accumulate_steps=4),
    disturbance=CROWDED,
)
BY_NAME = {machine.name: machine for machine in MACHINES}


def drifting(machine: Machine, drift: float) -> Machine:
    return replace(machine, disturbance=replace(machine.disturbance, drift=drift))


@cache
def tuned(name: str, seed: int = 0, drift: float = 0.0) -> tuple[Search, Recommendation]:
    """The result of a tune of half an hour on a machine."""
    machine = drifting({**BY_NAME, SLOW.name: SLOW}[name], drift)
    search = tune(machine, seed, machine.space(budget_s=1800.0))
    return search, conclude(search)
