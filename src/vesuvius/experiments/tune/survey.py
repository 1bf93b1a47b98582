"""The input of a tune: the machine, its limits, and the planned memory of each setting."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import psutil

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.experiments.machine import planned_bytes, ram_left, vram_left
from vesuvius.experiments.tune.measurement import Knob, Planned, Planner, SearchSpace, Setting
from vesuvius.monitor.probes.cores import bound_cores, others_text, usable_cores
from vesuvius.stream.options import StreamOptions, check_store
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.forecast.memory_plan import max_indexable_batch
from vesuvius.training.forecast.preflight import READERS_PER_CORE
from vesuvius.training.forecast.run_plan import num_local_ranks, plan_run
from vesuvius.training.step.setup import choose_device

_MOST_PREFETCH = 16
_MOST_REQUESTS = 256
_TRIALS = 180  # trials that fit the budget; a third of it goes to starts and changes
_SHORTEST_TRIAL_S, _LONGEST_TRIAL_S = 2.0, 30.0
_OTHERS_OVER_S = 1.0


def survey(config: Config, data: PreparedData, *, budget_s: float, keep: Sequence[Knob] = ()) -> SearchSpace:
    """Return the search space of one rank, with its share of this machine.  Does I/O; uses no GPU."""
    source, on_gpu, ranks = Setting.of(config), choose_device().type == "cuda", num_local_ranks(config)
    cores = usable_cores(os.getpid()) / ranks
    busy = psutil.cpu_percent(_OTHERS_OVER_S, percpu=True)  # before the tune starts anything
    used = math.fsum(busy[core] for core in bound_cores() if core < len(busy)) / 100
    remote = any(volume.source.remote for volume in (*data.volumes, *data.conditions))
    return SearchSpace(
        source=source,
        budget_s=budget_s,
        trial_s=min(max(budget_s / _TRIALS, _SHORTEST_TRIAL_S), _LONGEST_TRIAL_S),
        most_workers=_most_workers(config, data, cores, remote, ranks),
        most_prefetch=max(_MOST_PREFETCH, source.prefetch_factor),
        most_requests=max(_MOST_REQUESTS, source.requests) if remote else source.requests,
        most_batch=min(source.global_batch, max(max_indexable_batch(config), source.train_batch_size)),
        ram_limit_bytes=ram_left(config) // ranks,
        vram_limit_bytes=vram_left() if on_gpu else None,
        kept=(*keep, "cudnn_benchmark") if config.training.deterministic else tuple(keep),
        others=others_text(min(used, cores * ranks), cores * ranks),
    )


def _most_workers(config: Config, data: PreparedData, cores: float, remote: bool, ranks: int) -> int:
    """Return the maximum number of readers: one per core (several on a remote store), limited by /dev/shm."""
    source = config.training.workers
    most = max(source, int(cores * (READERS_PER_CORE if remote else 1)), 1)
    while most > source:
        options = replace(StreamOptions.from_config(config.training, config.cluster), workers=most)
        try:
            check_store(data.job, options, ranks)
            return most
        except ConfigError:
            most -= 1
    return most


def planner_of(config: Config, data: PreparedData) -> Planner:
    """Return a cached predictor of the memory of each setting of one rank; a prediction takes up to seconds.

    Volumes are not kept in memory, as they give way to readers.
    """
    config = config.model_copy(update={"data": config.data.model_copy(update={"resident": 0})})

    @cache
    def planned(setting: Setting) -> Planned:
        wanted = setting.applied_to(config)
        ram_bytes, vram_bytes = planned_bytes(wanted, data)
        return Planned(ram_bytes, max(plan_run(wanted, data).ram_bytes - ram_bytes, 0), vram_bytes)

    return planned
