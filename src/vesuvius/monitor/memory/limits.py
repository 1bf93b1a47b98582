"""What may kill a run for its memory: the machine, control groups, Ray's memory monitor, our own limit.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import GIB

RAY_NAME = "Ray's memory monitor"
CONFIGURED_NAME = "monitor.ram_limit_gib"
_RAY_SHARE = 0.95  # Ray's own default, RAY_memory_usage_threshold
_BELOW_KILL = 0.03  # share of the limit by which exit_at stays below where a limit strikes
_LARGEST_BYTES = 200 * GIB  # of a larger limit, shares are of this much: 8 % of 2 TiB are not short of memory


@dataclass(frozen=True)
class MemoryPolicy:
    """What a run's memory is held against; shares are of the limit of whichever limit is nearest, see `used_share`."""

    # share of the memory at which Ray's own monitor kills a reader; None without readers of Ray, or where that monitor
    # is switched off
    ray_share: float | None = None
    configured_bytes: int | None = None  # `monitor.ram_limit_gib`, for the run's own memory; None = none
    exit_at: float = 0.92  # share at which the guard saves and exits
    # ranks of this run on this machine, each with a guard: what one holds, the others are taken to hold too
    ranks_here: int = 1

    @property
    def warn_at(self) -> float:
        """Share at which there is a warning: 80 % for an exit at 92 %, and in proportion."""
        return 0.80 / 0.92 * self.exit_at

    @property
    def shrink_at(self) -> float:
        """Share at which the guard makes the readers smaller: 84 % for an exit at 92 %, and in proportion."""
        return 0.84 / 0.92 * self.exit_at


@dataclass(frozen=True)
class MemoryLimit:
    """Something that ends processes when memory runs out."""

    name: str  # for people: "Ray's memory monitor", "memory.max of cgroup /x", "the machine", "monitor.ram_limit_gib"
    used_bytes: int  # what it counts as used now
    limit_bytes: int  # what the shares of `MemoryPolicy` are of
    kills_at_bytes: int  # where it kills; below the limit for Ray's monitor
    own_bytes: int = 0  # what the run, with its other ranks here, holds of it
    least_others_bytes: int = 0  # the least that was seen of the rest

    @property
    def left_bytes(self) -> int:
        return self.kills_at_bytes - self.used_bytes

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes


def ray_share_from_environment(environ: Mapping[str, str], total_bytes: int | None = None) -> float | None:
    """The share of memory, 0 to 1, at which Ray's monitor kills; None where Ray's environment switches it off.

    As Ray 2.60 does it (`ThresholdMemoryMonitor`): RAY_memory_usage_threshold (0.95) of the total, or where
    RAY_min_memory_free_bytes is set, the later of that and so many bytes below the total;
    RAY_memory_monitor_refresh_ms=0 switches it off.  A value that is no number counts as not set.

    Args:
        total_bytes: the memory that Ray counts with (`ray_memory`); None = RAY_min_memory_free_bytes is ignored.
    """
    if _number(environ, "RAY_memory_monitor_refresh_ms", 250) <= 0:
        return None
    share = _number(environ, "RAY_memory_usage_threshold", _RAY_SHARE)
    share = share if 0 < share <= 1 else _RAY_SHARE
    free_bytes = _number(environ, "RAY_min_memory_free_bytes", -1)
    if total_bytes and 0 <= free_bytes < total_bytes:
        share = max(share, 1 - free_bytes / total_bytes)
    return share


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        return default


def limits_of(sample: SystemSample, policy: MemoryPolicy) -> tuple[MemoryLimit, ...]:
    """All that may kill, nearest (least left) first; never empty: the machine's own is always there.

    Shares of the machine are of its memory without swap, beyond which a run crawls; but nothing is killed before free
    swap is full.  Cgroups too are killed for only once what they may swap out is in swap; a limit that the machine's
    memory does not reach is none.
    """
    machine = sample.machine
    free_swap = max(machine.swap_total_bytes - machine.swap_used_bytes, 0)
    limits = [MemoryLimit("the machine", machine.used_bytes, machine.total_bytes, machine.total_bytes + free_swap)]
    for level in sample.cgroup.levels if sample.cgroup else ():
        if 0 < level.limit_bytes < machine.total_bytes:
            name = f"{level.file} of cgroup {level.path}" + ("" if level.kills else " (slows the run to a crawl)")
            swap = free_swap if level.swap_left_bytes is None else min(free_swap, level.swap_left_bytes)
            limits.append(MemoryLimit(name, level.used_bytes, level.limit_bytes, level.limit_bytes + swap))
    if policy.ray_share is not None:
        used, total = ray_memory(sample)
        limits.append(MemoryLimit(RAY_NAME, used, total, int(total * policy.ray_share)))
    if (configured := policy.configured_bytes) is not None:
        limits.append(MemoryLimit(CONFIGURED_NAME, sample.used_bytes, configured, configured))
    own_bytes = run_bytes(sample, policy)
    limits = [replace(limit, own_bytes=min(own_bytes, limit.used_bytes)) for limit in limits]
    return tuple(sorted(limits, key=lambda limit: limit.left_bytes))


def run_bytes(sample: SystemSample, policy: MemoryPolicy) -> int:
    """What the run holds on this machine; of ranks at least that, as they may share one object store or not."""
    return policy.ranks_here * sample.anon_bytes + sample.shared_bytes


def ray_memory(sample: SystemSample) -> tuple[int, int]:
    """Bytes in use, and in all, as Ray's monitor of Ray 2.60 counts them (its `memory_monitor_utils.cc`).

    It takes the smaller of the machine's memory and the hard limit at the root of the mounted cgroup file system (a
    container sees its own limit there, a process in a slice of the machine does not), and counts what belongs to it:
    the machine's total less available, or all that the cgroup is charged for but file pages.  The kernel's caches of
    file names are counted there, though they could be given back.  No swap, unless RAY_count_swap_in_memory_monitor is
    set, which is not looked at here.
    """
    used, total = sample.machine.used_bytes, sample.machine.total_bytes
    for level in sample.cgroup.levels if sample.cgroup else ():
        if level.is_top and level.kills and 0 < level.limit_bytes <= total:
            counted = level.used_bytes if level.charged_bytes is None else level.charged_bytes
            used, total = min(counted, level.limit_bytes), level.limit_bytes
    return used, total


def tightest(sample: SystemSample, policy: MemoryPolicy) -> MemoryLimit:
    """The one with the smallest limit: that is what a run may use."""
    return min(limits_of(sample, policy), key=lambda limit: limit.limit_bytes)


def left_bytes(limits: Iterable[MemoryLimit], policy: MemoryPolicy) -> int:
    """Memory that may be taken more before the guard's first rung, as the tightest of all limits counts it."""
    return min(
        int((policy.shrink_at - used_share(limit, policy)) / _squeeze(limit, policy) * _whole_bytes(limit))
        for limit in limits
    )


def used_share(limit: MemoryLimit, policy: MemoryPolicy) -> float:
    """A limit's share as the thresholds of `policy` mean it; may be below 0.

    That is `limit.share` of a limit up to 200 GiB.  Of a larger one the same bytes are left as of 200 GiB: 16 GiB at
    0.92.  Where a limit strikes so early (Ray's monitor at RAY_memory_usage_threshold=0.7) that `policy.exit_at` would
    come too late, the ladder is squeezed below the point where it strikes.
    """
    end_bytes = min(limit.kills_at_bytes, limit.limit_bytes)  # beyond it is swap
    end = end_bytes / limit.limit_bytes
    return (end - (end_bytes - limit.used_bytes) / _whole_bytes(limit)) * _squeeze(limit, policy)


def _whole_bytes(limit: MemoryLimit) -> int:
    return min(limit.limit_bytes, _LARGEST_BYTES)


def _squeeze(limit: MemoryLimit, policy: MemoryPolicy) -> float:
    return max(1.0, (policy.exit_at + _BELOW_KILL) * limit.limit_bytes / limit.kills_at_bytes)


def largest_share(limits: Iterable[MemoryLimit], policy: MemoryPolicy) -> float:
    """The share that counts: the largest `used_share` of all limits."""
    return max(used_share(limit, policy) for limit in limits)


def shrinking_helps(limit: MemoryLimit, policy: MemoryPolicy) -> bool:
    """Whether without this run there would be no risk: otherwise its end leaves the others' memory as it is, and the
    next start finds the same."""
    return used_share(replace(limit, used_bytes=limit.used_bytes - limit.own_bytes), policy) < policy.warn_at
