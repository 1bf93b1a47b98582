"""Input of a verdict: figures of some steps, and the settings of the run."""

from dataclasses import dataclass

from vesuvius.monitor.clock import StepTimes

# A CPU quota that is used up in this share of its periods slows the run down.
THROTTLED = 0.05


@dataclass(frozen=True, kw_only=True)
class Window(StepTimes):
    """Figures of some steps: sums unless stated otherwise."""

    steps: int
    # step_p50_s, step_p95_s: quantiles of the steps without their pauses
    step_p50_s: float
    step_p95_s: float
    read_s: float | None  # readers waited for a remote store; None on disk: reading is part of decode_s
    # decode_s to retries: of all readers, as `BlockReport`
    decode_s: float
    bytes_read: int
    bytes_fetched: int
    requests: int
    retries: int
    # cut_s to delivered_bytes: of the trainer's side, as `FeederStats`
    cut_s: float
    wait_for_readers_s: float
    idle_s: float
    batches: int
    empty_queue_hits: int
    delivered_bytes: int
    # Cores are averages; with several ranks on a node, of the rank's share.  None = unknown.
    cores: float  # usable by this process: affinity and cgroup quotas
    idle_cores: float | None = None  # of those this process is bound to
    own_cores: float | None = None  # used by the whole run
    # the CPU quota (of the cgroup or an ancestor) that was used up most often: in which share of its periods, and its
    # cores; None without a quota
    throttled_share: float | None = None
    throttled_quota: float | None = None
    working_readers: float | None = None  # readers that had a task, on average; None = all
    stopped_readers: int = 0  # stopped by a signal (SIGSTOP) or a debugger at the end
    reader_cores: float | None = None  # used by all reader processes; None = unknown, or `workers: 0`
    # share of the time in which a kernel ran, from NVML; None = unknown.  Events around a span of computing cannot
    # distinguish kernels from the gaps that a slow host leaves between them.
    gpu_busy: float | None = None
    vram_share: float | None = None  # share of the device's memory that is reserved; None on a CPU

    @property
    def working_s(self) -> float:
        """Time without pauses such as validation and saving; base of the shares."""
        return self.step_s - self.pause_s

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the working time: computing, then what the device waited for; data first, so that it wins ties."""
        host_s = self.other_s - self.pause_s
        spent = {"compute": self.gpu_s, "data": self.data_s, "h2d": self.h2d_s, "host": host_s, "comm": self.comm_s}
        return {f"{name}_share": seconds / self.working_s for name, seconds in spent.items()}

    @property
    def queue_full_s(self) -> float:
        """Time in which the queue was full, without pauses."""
        return max(self.idle_s - self.pause_s, 0.0)

    @property
    def reading_s(self) -> float:
        """Time in which readers had work: without the part of a pause in which the queue was full."""
        return self.step_s - min(self.idle_s, self.pause_s)

    @property
    def fetched_bytes_s(self) -> float:
        """Bytes per second that all readers fetched from a remote store while they had work."""
        return self.bytes_fetched / self.reading_s if self.reading_s else 0.0

    @property
    def is_throttled(self) -> bool:
        return self.throttled_share is not None and self.throttled_share >= THROTTLED

    @property
    def free_cores(self) -> float:
        """Usable cores that are idle; all usable ones if that was not measured."""
        if self.is_throttled:
            return 0.0
        left = max(self.cores - (self.own_cores or 0.0), 0.0)
        return left if self.idle_cores is None else min(self.idle_cores, left)

    @property
    def others_cores(self) -> float:
        """Usable cores kept busy by other programs; 0 if unknown."""
        if self.idle_cores is None or self.own_cores is None:
            return 0.0
        return max(self.cores - self.own_cores - self.idle_cores, 0.0)


@dataclass(frozen=True)
class Knobs:
    """Settings that a verdict may suggest to change, by their names in the config."""

    on_gpu: bool
    amp: str
    compile: bool
    channels_last: bool
    train_batch_size: int
    accumulate_steps: int
    workers: int  # reader processes
    prefetch_factor: int
    requests: int
    cached: bool  # whether `data.store.cache_dir` is set
    reader_threads: int = 1  # of the trainer, which reads itself with `workers: 0`
    threads: int | None = None  # computing threads of a trainer on a CPU; None = unknown
    resident: bool = False  # whether volumes are kept in memory and the trainer reads the rest, without readers
    memory_is_short: bool = False  # rules out more readers or prefetched batches
