"""The figures of some steps, the settings of a run, and what is good: what a verdict is made from."""

from __future__ import annotations

from dataclasses import dataclass

# A CPU quota that is used up in this share of its periods holds the run up.
THROTTLED = 0.05


@dataclass(frozen=True)
class Window:
    """What happened over some steps: sums, where nothing else is said."""

    steps: int  # how many
    # step_s, data_s, h2d_s, forward_s, backward_s, optimizer_s, comm_s, other_s, pause_s: as `StepTimes`
    step_s: float
    data_s: float
    h2d_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float
    pause_s: float
    # step_p50_s, step_p95_s: of the steps, without their pauses
    step_p50_s: float
    step_p95_s: float
    read_s: float | None  # readers waited for bytes of a remote store; None on disk, where reading is part of decode_s
    # decode_s, bytes_read, bytes_fetched, requests, retries: of all readers, as `BlockReport`
    decode_s: float
    bytes_read: int
    bytes_fetched: int
    requests: int
    retries: int
    # cut_s, starved_s, full_s, batches, ran_empty, delivered_bytes: of the trainer's side, as `FeederStats`
    cut_s: float
    starved_s: float
    full_s: float
    batches: int
    ran_empty: int
    delivered_bytes: int
    # of several ranks on a node, its share of the cores; None = not known
    cores: float  # that this process may use, by its affinity and the quotas of its cgroups
    idle_cores: float | None = None  # of those that this process is bound to, on average
    own_cores: float | None = None  # cores that the whole run used; None = not known
    # throttled_share, throttled_quota: of the CPU quota (the cgroup's, or one above) that was used up most often,
    # the share of its periods in which it was, and its cores; None without a quota
    throttled_share: float | None = None
    throttled_quota: float | None = None
    working_readers: float | None = None  # readers for which there was a task, on average; None = all
    stopped_readers: int = 0  # readers that a signal (SIGSTOP) or a debugger holds at the end
    reader_cores: float | None = None  # that all reader processes used; None = not known, or `workers: 0`
    # share of the time in which a kernel ran, as NVML says; None = not known.  Events around a stretch of computing
    # cannot tell kernels from the gaps that a slow host leaves between them.
    gpu_busy: float | None = None
    vram_share: float | None = None  # share of the device's memory that is reserved; None on a CPU
    comm_s: float = 0.0

    @property
    def working_s(self) -> float:
        """The time that the shares are of: validation and saving are no part of it."""
        return self.step_s - self.pause_s

    @property
    def shares(self) -> dict[str, float]:
        """Of the working time: `compute_share`, and what the device waited for; data first, as in a tie it decides."""
        computing_s, host_s = self.forward_s + self.backward_s + self.optimizer_s, self.other_s - self.pause_s
        waits = {"data": self.data_s, "h2d": self.h2d_s, "host": host_s, "comm": self.comm_s}
        return {f"{name}_share": each / self.working_s for name, each in ({"compute": computing_s} | waits).items()}

    @property
    def queue_full_s(self) -> float:
        """The feeder had no free place.  In a pause that is as it should be."""
        return max(self.full_s - self.pause_s, 0.0)

    @property
    def reading_s(self) -> float:
        """The time in which readers had reason to read: not that part of a pause in which all places were full."""
        return self.step_s - min(self.full_s, self.pause_s)

    @property
    def free_cores(self) -> float:
        """Idle cores that this process may use besides its own; where nobody measured, all that it may use."""
        if self.throttled_share is not None and self.throttled_share >= THROTTLED:
            return 0.0
        left = max(self.cores - (self.own_cores or 0.0), 0.0)
        return left if self.idle_cores is None else min(self.idle_cores, left)

    @property
    def others_cores(self) -> float:
        """Of the cores that this process may use, those that other programs keep busy; 0 where not known."""
        if self.idle_cores is None or self.own_cores is None:
            return 0.0
        return max(self.cores - self.own_cores - self.idle_cores, 0.0)


@dataclass(frozen=True)
class Knobs:
    """The settings that a verdict may want to change, by their names in the config."""

    on_gpu: bool  # whether the device is one
    amp: str
    compile: bool
    channels_last: bool
    cudnn_benchmark: bool
    deterministic: bool
    train_batch_size: int
    accumulate_steps: int
    workers: int
    prefetch_factor: int
    requests: int
    cached: bool  # whether `data.store.cache_dir` is set
    threads: int | None = None  # that a trainer on a CPU computes with; None = not known
    resident: bool = False  # whether the trainer reads the rest of volumes that it keeps in memory, without readers
    memory_is_short: bool = False  # more readers or batches ahead are out of the question
