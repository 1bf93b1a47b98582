"""Twenty simulated minutes of healthy machines, without alarms, and of leaks, which must be reported in time.

Not compared here: the real system's figures (tests/observe/system) and real leaks (the memory tests of whole runs).
"""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.monitor.memory.simulated import MB, healthy_series, process, sample
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.memory.risk import Level, Risk, RiskWatch
from vesuvius.monitor.probes.cgroup import CgroupLevel
from vesuvius.runlog.units import GIB

HYGIENE = re.compile("killed|oom|out of memory", re.IGNORECASE)
LIMITS = MemoryPolicy(ray_share=0.95)


def _risks(used, total_bytes: int, limits: MemoryPolicy = LIMITS, watch: RiskWatch | None = None, begin_s: float = 1e9):
    watch = watch or RiskWatch(limits)
    return [
        watch.add(sample(begin_s + second, total_bytes, value, processes={1: value}))
        for second, value in enumerate(used)
    ]


def _first(risks: list[Risk], level: Level) -> int:
    return next(second for second, risk in enumerate(risks) if risk.level >= level)


_MACHINES = [(8, 0), (24, 1), (170, 2)]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "total_gib", "seed"),
    [(name, *_MACHINES[n % 3]) for n, name in enumerate(sorted(healthy_series()))],
)
def test_no_alarm_in_20_healthy_minutes_with_peaks_just_below_the_warning(name: str, total_gib: int, seed: int):
    series = healthy_series(seed)[name]
    used = series + 0.78 * total_gib * GIB - series.max()
    risks = _risks(used, total_gib * GIB)
    assert {risk.level for risk in risks} == {Level.LOW}
    assert not any(HYGIENE.search(risk.reason) for risk in risks)


def _wandering(count: int, correlation_s: float, seed: int) -> np.ndarray:
    """An AR(1) series of mean 0 and standard deviation 1, a value per second."""
    keeps, rng = np.exp(-1 / correlation_s), np.random.default_rng((7, int(correlation_s), seed))
    shocks, values = rng.normal(0, np.sqrt(1 - keeps**2), count), np.empty(count)
    values[0] = rng.normal()
    for second in range(1, count):
        values[second] = keeps * values[second - 1] + shocks[second]
    return values


def _alarms(hours: int, seed: int) -> int:
    """Hours with an alarm, of memory that fluctuates about a constant mean and peaks at 77 % of 24 GiB."""
    alarms = 0
    for hour in range(seed, seed + hours):
        used = _wandering(3600, (10, 15, 20)[hour % 3], hour) * (0.3, 1.0, 2.0)[hour // 3 % 3] * GIB
        used += 0.77 * 24 * GIB - used.max()
        alarms += any(risk.level > Level.LOW for risk in _risks(used, 24 * GIB))
    return alarms


def test_memory_that_fluctuates_about_its_mean_is_no_growth():
    """One of the hours that have an alarm unless growth must stand out; `make test-long` has 300."""
    assert _alarms(1, seed=4) == 0


@pytest.mark.long
def test_fluctuating_memory_raises_an_alarm_in_at_most_one_hour_of_a_hundred():
    """At most 6 of 300: at a rate of 1 %, 3 are expected, and more than 6 have a probability of 3 %."""
    assert _alarms(300, seed=100) <= 6


_FITTING = [
    (total_gib, lasts_s)
    for total_gib in (8, 24, 170)
    for lasts_s in (102, 110, 130, 160, 220, 400, 900)
    if lasts_s * 50 * MB < 0.95 * total_gib * GIB
]


@pytest.mark.sample(11)
@pytest.mark.parametrize("noise", [0, 30 * MB, 100 * MB, 200 * MB])
@pytest.mark.parametrize(("total_gib", "lasts_s"), _FITTING)
def test_a_leak_of_50_mb_s_is_reported_60_s_before_the_kill(lasts_s: int, total_gib: int, noise: float):
    """For leaks that last more than 100 s, after five and a half flat minutes."""
    base = 0.95 * total_gib * GIB - lasts_s * 50 * MB
    t = np.arange(333 + lasts_s)
    used = base + 50 * MB * np.maximum(t - 333, 0) - np.abs(np.random.default_rng((6, 3)).normal(0, noise, len(t)))
    risks = _risks(used, total_gib * GIB)
    assert len(used) - _first(risks, Level.WARN) >= 60
    assert risks[-1].level is Level.CRITICAL
    assert HYGIENE.search(risks[-1].reason)


@pytest.mark.parametrize(("leaks", "level"), [(0, Level.LOW), (50 * MB, Level.CRITICAL)])
def test_loading_volumes_into_memory_is_no_growth(leaks: int, level: Level):
    """Half of the free memory within five minutes; a leak at the same time is reported."""
    watch = RiskWatch(LIMITS)
    for second in range(300):
        kept = 37 * MB * second
        used = 2 * GIB + kept + leaks * second
        told = sample(1e9 + second, 24 * GIB, used, processes={1: used - kept})
        risk = watch.add(replace(told, shared_bytes=kept, kept_bytes=kept))
        if not leaks:
            assert (risk.level, risk.trend) == (Level.LOW, None)
    assert risk.level is level


@pytest.mark.sample(2)
@pytest.mark.parametrize(("total_gib", "noise"), [(24, 100 * MB), (8, 0)])
def test_a_leak_of_1_mb_s_is_reported_by_share_minutes_before_the_kill(total_gib: int, noise: float):
    """At this rate there is time; only the growing process is named before."""
    t = np.arange(1200)
    used = 0.795 * total_gib * GIB + 1 * MB * t - np.abs(np.random.default_rng((6, 4)).normal(0, noise, 1200))
    risks = _risks(used, total_gib * GIB)
    reached = int(np.argmax(used >= 0.80 * total_gib * GIB))
    assert _first(risks, Level.WARN) == reached
    assert (0.95 * total_gib * GIB - used[reached]) / MB > 600
    assert risks[-1].trend.bytes_per_s == pytest.approx(1 * MB, rel=0.5)
    assert risks[-1].growing.keys() == {1}


def test_a_leak_below_a_sawtooth_is_reported_60_s_before_the_kill():
    t = np.arange(700)
    used = 2 * GIB + 600 * MB * (t % 18) / 18 + 50 * MB * np.maximum(t - 400, 0)
    end = int(np.argmax(used > 0.95 * 8 * GIB))
    assert end - _first(_risks(used[:end], 8 * GIB), Level.WARN) >= 60 - 18  # the last tooth shortens the time


def test_the_limit_that_growth_reaches_first_is_named_first():
    watch = RiskWatch(MemoryPolicy(configured_bytes=4 * GIB))
    for second in range(240):
        risk = watch.add(sample(second, 24 * GIB, 8 * GIB + 50 * MB * second, processes={1: 1 * GIB}))
    assert risk.limits[0].name == "the machine"
    assert risk.limits[1].left_bytes < risk.limits[0].left_bytes
    assert risk.exhaustion.likely_s == pytest.approx(risk.limits[0].left_bytes / (50 * MB), rel=0.01)
    assert "the machine" in risk.reason


def test_the_level_does_not_flap_around_its_threshold():
    used = (0.80 + 0.012 * np.sin(np.arange(600) / 3)) * 24 * GIB
    levels = [risk.level for risk in _risks(used, 24 * GIB)]
    assert sum(a != b for a, b in itertools.pairwise(levels)) == 1


def test_only_the_growing_process_is_named():
    watch, rng = RiskWatch(LIMITS), np.random.default_rng((6, 5))
    for second in range(420):
        processes = {pid: 1 * GIB + rng.normal(0, 20 * MB) for pid in range(100, 108)}
        processes[104] += 20 * MB * second
        risk = watch.add(sample(second, 24 * GIB, sum(processes.values()) + 6 * GIB, processes=processes))
    assert risk.growing.keys() == {104}
    assert risk.growing[104].bytes_per_s == pytest.approx(20 * MB, rel=0.05)
    assert "process 104 (20" in risk.reason


def test_swapped_private_memory_counts_as_growth():
    watch = RiskWatch(LIMITS)
    for second in range(120):
        reader = process(7, 1 * GIB, swap_bytes=10 * MB * second)
        risk = watch.add(sample(second, 24 * GIB, 6 * GIB, processes=[reader]))
    assert risk.growing[7].bytes_per_s == pytest.approx(10 * MB)


def test_a_reused_pid_restarts_the_series():
    watch = RiskWatch(LIMITS)
    for second in range(120):
        watch.add(sample(second, 24 * GIB, 6 * GIB, processes=[process(7, 10 * MB * second)]))
    risk = watch.add(sample(120, 24 * GIB, 6 * GIB, processes=[process(7, 10 * MB * 120, started_s=119.0)]))
    assert not risk.growing


def test_restart_forgets_growth_and_judges_again_within_50_s():
    watch = RiskWatch(LIMITS)
    used = 3 * GIB + 50 * MB * np.arange(100)
    assert _risks(used, 24 * GIB, watch=watch)[-1].trend
    watch.restart()
    after = _risks(used[-1] + 50 * MB * np.arange(50), 24 * GIB, watch=watch, begin_s=1e9 + 100)
    assert after[0].trend is None
    assert not after[0].growing
    assert after[-1].trend.bytes_per_s == pytest.approx(50 * MB)


@pytest.mark.parametrize("name", ["ray::zoom", "systemd-oomd", "killed"])
def test_the_reason_at_low_risk_has_no_word_of_a_kill(name: str):
    level = CgroupLevel(f"/{name}.service", "memory.max", 8 * GIB, 2 * GIB, True)
    watch = RiskWatch(LIMITS)
    for second in range(120):
        grown = 10 * MB * second
        at = sample(second, 24 * GIB, 3 * GIB + grown, [process(3, 1 * GIB + grown, name=name)], [level])
        assert not HYGIENE.search(watch.add(at).reason)


def test_a_warning_gives_used_limit_growth_time_and_process():
    reason = _risks(4 * GIB + 50 * MB * np.arange(66), 8 * GIB)[-1].reason
    assert reason == (
        "close to running out of memory: Ray's memory monitor: 7.03 of 8.00 GiB in use (88 %); kills at 7.60 GiB, "
        "growing 50 MB/s: full in 12 s (12 s to 12 s), fastest process 1 (50 MB/s)"
    )
