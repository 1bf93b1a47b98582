"""Memory limits of a run: the machine, cgroups, Ray's memory monitor, and `monitor.ram_limit_gib`.  Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import GIB

CONFIGURED_NAME = "monitor.ram_limit_gib"
_RAY_SHARE = 0.95  # Ray's own default, RAY_memory_usage_threshold
_BELOW_KILL = 0.03  # exit_at stays this far below the kill, as a share
_LARGEST_BYTES = 200 * GIB  # shares of larger limits are of this size: with 8 % of 2 TiB left, memory is not short


@dataclass(frozen=True)
class MemoryPolicy:
    """Thresholds of the memory guard; shares are of the nearest limit, see `used_share`."""

    # share at which Ray's memory monitor kills a reader; None without Ray's readers or if that monitor is switched off
    ray_share: float | None = None
    configured_bytes: int | None = None  # `monitor.ram_limit_gib`, for the run's own memory
    exit_at: float = 0.92  # share at which the guard saves and exits
    # ranks of this run on this machine, each with a guard; each assumes that the others use as much memory as itself
    ranks_here: int = 1

    @property
    def warn_at(self) -> float:
        """Share at which the guard warns: 80 % for an exit at 92 %, in proportion otherwise."""
        return 0.80 / 0.92 * self.exit_at

    @property
    def shrink_at(self) -> float:
        """Share at which the guard reduces the readers: 84 % for an exit at 92 %, in proportion otherwise."""
        return 0.84 / 0.92 * self.exit_at


@dataclass(frozen=True)
class MemoryLimit:
    """A limit beyond which processes are killed."""

    name: str  # for people: "Ray's memory monitor", "memory.max of cgroup /x", "the machine", "monitor.ram_limit_gib"
    used_bytes: int  # current use, as it is counted for this limit
    total_bytes: int  # base of the shares in `MemoryPolicy`
    limit_bytes: int  # use at which it kills; below the limit for Ray's monitor
    own_bytes: int = 0  # part of it used by the run, with its other ranks on this machine
    least_others_bytes: int = 0  # smallest use by other programs seen so far

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes


def ray_share_from_environment(environ: Mapping[str, str], total_bytes: int) -> float | None:
    """Return the share of memory, 0 to 1, at which Ray's monitor kills; None if the environment switches it off.

    As in Ray 2.60 (`ThresholdMemoryMonitor`); other values than numbers are ignored.  `total_bytes`: see `ray_memory`.
    """
    if _number(environ, "RAY_memory_monitor_refresh_ms", 250) <= 0:
        return None
    share = _number(environ, "RAY_memory_usage_threshold", _RAY_SHARE)
    share = share if 0 < share <= 1 else _RAY_SHARE
    free_bytes = _number(environ, "RAY_min_memory_free_bytes", -1)
    if 0 <= free_bytes < total_bytes:
        share = max(share, 1 - free_bytes / total_bytes)
    return share


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        return default


def limits_of(sample: SystemSample, policy: MemoryPolicy) -> tuple[MemoryLimit, ...]:
    """Return all limits, the one with least memory left first; the machine itself is always among them.

    Shares are of memory without swap, beyond which a run crawls, but the machine and a cgroup kill only once the swap
    that is free to them is full.  Limits above the machine's memory are ignored.
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
        limits.append(MemoryLimit("Ray's memory monitor", used, total, int(total * policy.ray_share)))
    if (configured := policy.configured_bytes) is not None:
        limits.append(MemoryLimit(CONFIGURED_NAME, sample.used_bytes, configured, configured))
    own_bytes = run_bytes(sample, policy)
    limits = [replace(limit, own_bytes=min(own_bytes, limit.used_bytes)) for limit in limits]
    return tuple(sorted(limits, key=lambda limit: limit.left_bytes))


def run_bytes(sample: SystemSample, policy: MemoryPolicy) -> int:
    """Memory of the run on this machine; with several ranks a lower bound, as they may share one object store."""
    return policy.ranks_here * sample.anon_bytes + sample.shared_bytes


def ray_memory(sample: SystemSample) -> tuple[int, int]:
    """Return used and total bytes as counted by the memory monitor of Ray 2.60 (`memory_monitor_utils.cc`).

    Ray takes the smaller of the machine's memory and the hard limit at the root of the mounted cgroup file system (a
    container sees its own limit there, a process in a slice of the machine does not), and counts everything that the
    cgroup is charged for except file pages, with the kernel's reclaimable caches of file names.  Swap is not counted.
    """
    used, total = sample.machine.used_bytes, sample.machine.total_bytes
    for level in sample.cgroup.levels if sample.cgroup else ():
        if level.is_top and level.kills and 0 < level.limit_bytes <= total:
            counted = level.used_bytes if level.charged_bytes is None else level.charged_bytes
            used, total = min(counted, level.limit_bytes), level.limit_bytes
    return used, total


def tightest(sample: SystemSample, policy: MemoryPolicy) -> MemoryLimit:
    """Return the smallest limit: the memory that a run may use."""
    return min(limits_of(sample, policy), key=lambda limit: limit.total_bytes)


def left_bytes(limits: Iterable[MemoryLimit], policy: MemoryPolicy) -> int:
    """Return the memory left below `shrink_at`, by the tightest limit."""
    return min(
        int((policy.shrink_at - used_share(limit, policy)) / _squeeze(limit, policy) * _base_bytes(limit))
        for limit in limits
    )


def used_share(limit: MemoryLimit, policy: MemoryPolicy) -> float:
    """Return the used share to compare with the thresholds of `policy`; may be below 0.

    Up to 200 GiB it is `limit.share`.  Larger limits are treated as 200 GiB: 16 GiB are left at 0.92.  If the limit
    kills so early (Ray's monitor at RAY_memory_usage_threshold=0.7) that `policy.exit_at` would come too late, shares
    are scaled so that `exit_at` lies below the kill.
    """
    end_bytes = min(limit.limit_bytes, limit.total_bytes)  # beyond it is swap
    end = end_bytes / limit.total_bytes
    return (end - (end_bytes - limit.used_bytes) / _base_bytes(limit)) * _squeeze(limit, policy)


def _base_bytes(limit: MemoryLimit) -> int:
    return min(limit.total_bytes, _LARGEST_BYTES)


def _squeeze(limit: MemoryLimit, policy: MemoryPolicy) -> float:
    return max(1.0, (policy.exit_at + _BELOW_KILL) * limit.total_bytes / limit.limit_bytes)


def shrinking_helps(limit: MemoryLimit, policy: MemoryPolicy) -> bool:
    """Whether there would be no risk without this run; otherwise reducing or stopping it would not help."""
    return used_share(replace(limit, used_bytes=limit.used_bytes - limit.own_bytes), policy) < policy.warn_at
