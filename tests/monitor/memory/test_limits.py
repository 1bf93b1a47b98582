"""Memory limits and where they kill.  Ray's is compared with the log of a raylet."""

import pytest

from tests.monitor.memory.simulated import sample
from vesuvius.monitor.memory.limits import (
    MemoryPolicy,
    left_bytes,
    limits_of,
    ray_memory,
    ray_share_from_environment,
    tightest,
    used_share,
)
from vesuvius.monitor.probes.cgroup import CgroupLevel
from vesuvius.runlog.units import GIB


def _named(limits):
    return {limit.name: limit for limit in limits}


def test_the_machine_is_always_a_limit_and_counts_unavailable_memory():
    (limit,) = limits_of(sample(0, 24 * GIB, 6 * GIB), MemoryPolicy())
    figures = (limit.name, limit.used_bytes, limit.total_bytes, limit.limit_bytes)
    assert figures == ("the machine", 6 * GIB, 24 * GIB, 24 * GIB)
    assert limit.left_bytes == 18 * GIB
    assert limit.share == 0.25
    swap = sample(0, 24 * GIB, 20 * GIB, swap_used_bytes=1 * GIB, swap_total_bytes=8 * GIB)
    (limit,) = limits_of(swap, MemoryPolicy())
    assert limit.limit_bytes == 31 * GIB, "free swap postpones the kill, but not the warning"
    assert limit.share == pytest.approx(20 / 24)


def test_the_tightest_limit_is_the_smallest_of_machine_cgroups_and_config():
    levels = [CgroupLevel("/a/b", "memory.max", 8 * GIB, 1 * GIB, True)]
    assert tightest(sample(0, 24 * GIB, 1 * GIB), MemoryPolicy(ray_share=0.5)).total_bytes == 24 * GIB
    assert tightest(sample(0, 24 * GIB, 1 * GIB, levels=levels), MemoryPolicy()).total_bytes == 8 * GIB
    levels.append(CgroupLevel("/a", "memory.high", 6 * GIB, 2 * GIB, False))
    at = sample(0, 24 * GIB, 1 * GIB, levels=levels)
    assert tightest(at, MemoryPolicy()).total_bytes == 6 * GIB
    assert tightest(at, MemoryPolicy(configured_bytes=4 * GIB)).total_bytes == 4 * GIB
    assert tightest(at, MemoryPolicy(configured_bytes=7 * GIB)).total_bytes == 6 * GIB


def test_ray_s_threshold_equals_the_one_logged_by_its_raylet():
    """raylet.out of Ray 2.60: "usage threshold at 24012685312 bytes (95.000008% of system memory), total ...

    25276510208".  Ray computes in float32, hence not to the byte.
    """
    limit = _named(limits_of(sample(0, 25276510208, 5 * GIB), MemoryPolicy(ray_share=0.95)))["Ray's memory monitor"]
    assert limit.total_bytes == 25276510208
    assert limit.limit_bytes == pytest.approx(24012685312, rel=1e-6)


@pytest.mark.parametrize(
    ("path", "is_top", "total_gib"), [("/", True, 8), ("/docker/1f2e", True, 8), ("/user.slice", False, 24)]
)
def test_ray_uses_a_container_s_limit_but_not_a_slice_s(path: str, is_top: bool, total_gib: int):
    level = CgroupLevel(path, "memory.max", 8 * GIB, 2 * GIB, True, is_top)
    limits = _named(limits_of(sample(0, 24 * GIB, 9 * GIB, levels=[level]), MemoryPolicy(ray_share=0.95)))
    ray = limits["Ray's memory monitor"]
    assert ray.total_bytes == total_gib * GIB
    assert ray.used_bytes == (2 * GIB if total_gib == 8 else 9 * GIB)


def test_ray_s_minimum_of_free_bytes_refers_to_the_container_s_memory():
    """2 GiB are an eighth of 16 GiB, so 95 % is later; of the machine's 128 GiB they would be 1.6 %."""
    level = CgroupLevel("/", "memory.max", 16 * GIB, 2 * GIB, True, True)
    at = sample(0, 128 * GIB, 9 * GIB, levels=[level])
    share = ray_share_from_environment({"RAY_min_memory_free_bytes": str(2 * GIB)}, ray_memory(at)[1])
    assert share == 0.95
    assert _named(limits_of(at, MemoryPolicy(ray_share=share)))["Ray's memory monitor"].limit_bytes == int(15.2 * GIB)


def test_ray_counts_kernel_caches_but_the_kernel_does_not():
    """Many chunk files: 3 GiB of reclaimable file names are charged to the container."""
    level = CgroupLevel("/", "memory.max", 8 * GIB, 4 * GIB, True, True, charged_bytes=7 * GIB)
    limits = limits_of(sample(0, 24 * GIB, 9 * GIB, levels=[level]), MemoryPolicy(ray_share=0.95))
    assert limits[0].name == "Ray's memory monitor", "it kills first"
    assert (limits[0].used_bytes, limits[0].total_bytes) == (7 * GIB, 8 * GIB)
    assert _named(limits)["memory.max of cgroup /"].used_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("swap_left", "free", "kills_at_gib"),
    [(None, 4, 12), (None, 0, 8), (2 * GIB, 4, 10), (6 * GIB, 4, 12), (0, 4, 8), (-GIB, 4, 7)],
)
def test_a_cgroup_kills_only_once_its_swap_is_full(swap_left: int | None, free: int, kills_at_gib: int):
    level = CgroupLevel("/a", "memory.max", 8 * GIB, 4 * GIB, True, swap_left_bytes=swap_left)
    swap = {"swap_used_bytes": GIB, "swap_total_bytes": (1 + free) * GIB}
    limits = _named(limits_of(sample(0, 24 * GIB, 9 * GIB, levels=[level], **swap), MemoryPolicy(ray_share=0.95)))
    limit = limits["memory.max of cgroup /a"]
    assert (limit.total_bytes, limit.limit_bytes) == (8 * GIB, kills_at_gib * GIB)


def test_the_configured_limit_counts_only_the_run_and_the_largest_share_decides():
    at = sample(0, 170 * GIB, 150 * GIB, processes={1: 2 * GIB, 2: 1 * GIB})
    limits = limits_of(at, MemoryPolicy(configured_bytes=4 * GIB))
    assert limits[0].name == "monitor.ram_limit_gib"
    assert (limits[0].used_bytes, limits[0].limit_bytes) == (3 * GIB, 4 * GIB)
    assert max(used_share(limit, MemoryPolicy()) for limit in limits) == pytest.approx(150 / 170)


@pytest.mark.parametrize("total_gib", [24, 2048])
@pytest.mark.parametrize("limits", [MemoryPolicy(), MemoryPolicy(ray_share=0.95), MemoryPolicy(ray_share=0.7)])
def test_left_bytes_lead_exactly_to_the_shrink_share(total_gib: int, limits: MemoryPolicy):
    at = sample(0, total_gib * GIB, total_gib * GIB / 2)
    left = left_bytes(limits_of(at, limits), limits)
    full = limits_of(sample(0, total_gib * GIB, total_gib * GIB / 2 + left), limits)
    assert max(used_share(limit, limits) for limit in full) == pytest.approx(limits.shrink_at)


def test_limits_above_200_gib_are_treated_as_200_gib():
    (limit,) = limits_of(sample(0, 2048 * GIB, (2048 - 16) * GIB), MemoryPolicy())
    assert used_share(limit, MemoryPolicy()) == pytest.approx(0.92)


@pytest.mark.parametrize("ray_share", [0.7, 0.8, 0.9])
def test_shares_are_scaled_below_an_early_kill_by_ray(ray_share: float):
    limits = MemoryPolicy(ray_share=ray_share)
    just_killed = sample(0, 100 * GIB, ray_share * 100 * GIB)
    ray = _named(limits_of(just_killed, limits))["Ray's memory monitor"]
    assert used_share(ray, limits) == pytest.approx(limits.exit_at + 0.03)


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8"}, 0.8),
        ({"RAY_memory_usage_threshold": "lots"}, 0.95),
        ({"RAY_memory_usage_threshold": "1.5"}, 0.95),
        ({"RAY_memory_monitor_refresh_ms": "0"}, None),
        ({"RAY_memory_monitor_refresh_ms": "100"}, 0.95),
        ({"RAY_min_memory_free_bytes": str(2 * GIB)}, 0.98),
        ({"RAY_min_memory_free_bytes": str(10 * GIB)}, 0.95),
        ({"RAY_min_memory_free_bytes": "-1"}, 0.95),
    ],
)
def test_ray_s_environment_is_read_as_ray_does(environ: dict[str, str], share: float | None):
    assert ray_share_from_environment(environ, total_bytes=100 * GIB) == share
