"""Samples of simulated machines and their memory, second by second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vesuvius.monitor.probes.cgroup import CgroupLevel, CgroupUse
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import MachineUse, SystemSample

MB = 10**6
MINUTES_20 = 1200


def process(
    pid: int, anon_bytes: float, started_s: float = 0.0, name: str = "python", swap_bytes: int = 0
) -> ProcessUse:
    return ProcessUse(pid, 1, name, started_s, "S", int(anon_bytes), 0, 0, swap_bytes, 0.0)


def machine(total_bytes: int, used_bytes: float, swap_used_bytes: int = 0, swap_total_bytes: int = 0) -> MachineUse:
    return MachineUse(
        total_bytes=total_bytes,
        available_bytes=total_bytes - int(used_bytes),
        page_cache_bytes=0,
        swap_used_bytes=swap_used_bytes,
        swap_total_bytes=swap_total_bytes,
        oom_kills=0,
        core_busy_s=(0.0,),
        core_total_s=(0.0,),
    )


def cgroup(*levels: CgroupLevel) -> CgroupUse:
    return CgroupUse("/x", 0, 0, 0, tuple(levels), 0)


def sample(
    time_s: float,
    total_bytes: int,
    used_bytes: float,
    processes: Mapping[int, float] | Sequence[ProcessUse] = (),
    levels: Sequence[CgroupLevel] = (),
    swap_used_bytes: int = 0,
    swap_total_bytes: int = 0,
) -> SystemSample:
    """Sample of a machine with this use; private bytes of processes by pid."""
    if isinstance(processes, Mapping):
        processes = [process(pid, anon) for pid, anon in processes.items()]
    use = machine(total_bytes, used_bytes, swap_used_bytes, swap_total_bytes)
    return SystemSample(time_s, tuple(processes), 0, cgroup(*levels) if levels else None, use)


def _seconds(count: int = MINUTES_20) -> np.ndarray:
    return np.arange(count, dtype=float)


def _noise(seed: int, sigma: float, count: int = MINUTES_20) -> np.ndarray:
    return np.random.default_rng((6, seed)).normal(0, sigma, count)


def healthy_series(seed: int = 0) -> dict[str, np.ndarray]:
    """Bytes above a base, per second for 20 minutes, as in healthy runs; at most 4.2 GB."""
    t = _seconds()
    noise = _noise(seed, 30 * MB)
    restart = np.minimum(t % 240, 12) / 12  # a reader is restarted every four minutes and is full after 12 s
    return {
        "flat": 1000 * MB + noise,
        "quiet": np.full_like(t, 1000 * MB),
        "a step": 1000 * MB + 1000 * MB * (t >= 400) + noise,
        "a step without noise": 1000 * MB + 1000 * MB * (t >= 403),
        "a step every five minutes, given back": 1000 * MB + 1000 * MB * (t % 300 >= 240) + noise,
        "three steps": 800 * MB * (1 + (t >= 200) + (t >= 500) + (t >= 900)) + noise,
        "a ramp of 12 s": 1000 * MB + 1000 * MB * np.clip((t - 500) / 12, 0, 1) + noise,
        "sawtooth of 7 s": 1500 * MB + 800 * MB * (t % 7) / 7 + noise,
        "sawtooth of 18 s": 1500 * MB + 1500 * MB * (t % 18) / 18 + noise,
        "sawtooth of 45 s": 1500 * MB + 1500 * MB * (t % 45) / 45 + noise,
        "sawtooth of 100 s": 1500 * MB + 1500 * MB * (t % 100) / 100 + noise,
        "slow wave": 2000 * MB + 700 * MB * np.sin(2 * np.pi * t / 170) + noise,
        "growth that ends": 500 * MB + 2500 * MB * (1 - np.exp(-t / 60)) + noise,
        "growth that ends late": 500 * MB + 2500 * MB * (1 - np.exp(-t / 300)) + noise,
        "growth like a logarithm": 1000 * MB + 400 * MB * np.log1p(t / 10) + noise,
        "a reader restarted": 1000 * MB + 1200 * MB * restart + noise,
        "noise": 2000 * MB + _noise(seed + 1, 250 * MB),
        "random walk": 2000 * MB + np.clip(np.cumsum(_noise(seed + 2, 15 * MB)), -1500 * MB, 2000 * MB),
    }
