"""Finds the bottleneck of a run: from the figures of some steps to one line with evidence and a setting to try.  Pure.

The device either computes or waits: for data, for copies, for the host.  If it waits for data, the cause is traced back
from the trainer: prefetched batches, cutting, readers, store.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vesuvius.monitor.probes.cores import others_text
from vesuvius.monitor.window import Knobs, Window
from vesuvius.runlog.units import format_count, format_duration, format_rate, format_size

Kind = Literal["compute-bound", "data-bound", "transfer-bound", "host-bound", "comm-bound"]
Cause = Literal[
    "prefetch too small", "cutting", "handing over", "first pass", "workers too few", "decoding", "reading",
    "store latency", "workers stopped", "too few tasks",
]  # fmt: skip

# Shares of the working time: waiting is fine below the first, computing above the second.
_WAITS_GOOD, _COMPUTES_GOOD = 0.15, 0.80
# Readers busy for less of the time than the first are not the bottleneck; above the second, a larger queue stays empty.
_BUSY, _SATURATED = 0.5, 0.9
# A reader whose CPU use is below this share of its busy time waits for the disk.
_WAITS_FOR_DISK = 0.5
# More requests in flight per reader than this have never helped.
_REQUESTS_MOST = 64
# A store with this share of retries is overloaded.
_RETRIES_MANY = 0.05
_VRAM_PLENTY = 0.5
# Kernels that run for less than this share of the time they are queued are launched too slowly.
_LAUNCHING = 0.7
# If fewer of the readers have a task, more readers would not help.
_WITH_WORK = 0.75
# More decoding readers per core than this slow each other down.
_READERS_PER_CORE = 2
# If other programs use this share of the cores, a trainer with more threads than free cores waits in each operation
# for the thread without a core.
_OTHERS_CROWD = 0.25


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    cause: Cause | None  # None unless data-bound
    evidence: str  # the figures behind it
    overrides: tuple[str, ...]  # settings to try next, as arguments of `vesuvius train`; may be empty
    advice: str  # for people
    window: Window  # all figures

    @property
    def bottleneck(self) -> str:
        return self.kind if self.cause is None else f"{self.kind} ({self.cause})"

    @property
    def text(self) -> str:
        w = self.window
        steps = f"step p50 {w.step_p50_s:.3g} s, p95 {w.step_p95_s:.3g} s over {w.steps} steps"
        return f"{self.bottleneck}: {self.evidence}; {steps}; {self.advice}"

    def line(self, step: int, steps: int) -> str:
        return f"Verdict step {step}/{steps} {self.text}"

    def record(self) -> dict[str, Any]:
        words: dict[str, Any] = {"bound": self.kind, "cause": self.cause, "text": self.text, "evidence": self.evidence}
        words |= {"overrides": list(self.overrides), "advice": self.advice, "other_s": self.window.other_s}
        return words | self.window.shares | asdict(self.window)


def diagnose(window: Window, knobs: Knobs) -> Verdict:
    """Find the bottleneck and what to try next.  Pure.

    Compute-bound is good: the device computes most of the time, or no wait is long.  Otherwise the longest wait
    decides.  The evidence also names other programs, CPU quotas and signals that slow the run down.
    """
    found = _Diagnosis(window, knobs).verdict()
    evidence = found.evidence
    if others := others_text(window.others_cores, window.cores):
        evidence += f", {others}"
    if window.is_throttled:
        quota = "" if window.throttled_quota is None else f" of {window.throttled_quota:.3g} cores"
        evidence += f", the quota{quota} was used up in {_percent(window.throttled_share or 0.0)} of its periods"
    if not window.stopped_readers:
        return replace(found, evidence=evidence)
    evidence += f", a signal (SIGSTOP) or a debugger has stopped {format_count(window.stopped_readers, 'worker')}"
    if found.kind != "data-bound":
        return replace(found, evidence=evidence, advice=f"{found.advice}; `kill -CONT` resumes workers")
    advice = "no setting helps while workers are stopped: `kill -CONT` resumes them"
    return replace(found, evidence=evidence, cause="workers stopped", overrides=(), advice=advice)


class _Diagnosis:
    """The rules, from the trainer backwards to the store."""

    def __init__(self, window: Window, knobs: Knobs) -> None:
        self.w, self.k = window, knobs

    def verdict(self) -> Verdict:
        w = self.w
        computes, data, copies, host, ranks = w.shares.values()
        longest = max(data, copies, host, ranks)
        if computes >= _COMPUTES_GOOD or longest <= _WAITS_GOOD:
            return self._compute_bound()
        share = f"{_percent(longest)} of the time (good: below {_percent(_WAITS_GOOD, 0)})"
        if longest == data:
            return self._data_bound(f"waited for data {share}")
        if longest == copies:
            evidence = f"waited for copies to the device {share}, {format_size(w.delivered_bytes / w.steps)} per step"
            advice = "no setting to try: voxels are copied in their stored dtype; check the GPU's link (nvidia-smi -q)"
            return self._found("transfer-bound", evidence, advice)
        if longest == host:
            return self._host_bound(f"the device waited for the host {share}")
        advice = (
            "no setting to try: see the log in ranks/ of the slowest rank, named in the step line; if all are equally "
            "slow, the network is the bottleneck, and a larger training.accumulate_steps uses it less"
        )
        return self._found("comm-bound", f"waited for other ranks {share}", advice)

    def _found(self, kind: Kind, evidence: str, advice: str, *overrides: str, cause: Cause | None = None) -> Verdict:
        return Verdict(kind, cause, evidence, overrides, f"try {' '.join(overrides)}" if overrides else advice, self.w)

    def _data(self, cause: Cause, evidence: str, advice: str, *overrides: str) -> Verdict:
        return self._found("data-bound", evidence, advice, *overrides, cause=cause)

    def _more(self, cause: Cause, evidence: str, what: str, override: str) -> Verdict:
        """Advise more readers or prefetched batches, unless memory is short."""
        if self.k.memory_is_short:
            advice = f"more {what} would help, but memory is short; lower data.regions_in_flight first"
            return self._data(cause, evidence, advice)
        return self._data(cause, evidence, "", override)

    def _compute_bound(self) -> Verdict:
        w, k = self.w, self.k
        computes, waits, *_ = w.shares.values()
        if k.on_gpu and w.gpu_busy is not None and w.gpu_busy < _LAUNCHING * computes:
            kernels = f"kernels ran only {_percent(w.gpu_busy)}: launching them is the bottleneck"
            return self._host_bound(f"the GPU had work {_percent(computes)} of the time, but {kernels}")
        spent = {"forward": w.forward_s, "backward": w.backward_s, "optimizer": w.optimizer_s}
        parts = ", ".join(f"{name} {_percent(part / (w.gpu_s or 1.0), 0)}" for name, part in spent.items())
        good = f"good: above {_percent(_COMPUTES_GOOD, 0)}; {parts}"
        evidence = f"computed {_percent(computes)} of the time ({good}), waited for data {_percent(waits)}"
        if not k.on_gpu:
            advice = "the CPU is the bottleneck: no data-path setting will help"
            left = max(int(w.cores - w.others_cores - (w.reader_cores or 0.0)), 1)
            if w.others_cores >= _OTHERS_CROWD * w.cores and k.threads is not None and k.threads > left:
                evidence += f", the trainer's {k.threads} threads wait for each other"
                advice = f"try OMP_NUM_THREADS={left} in the environment of the trainer"
            return self._found("compute-bound", evidence, advice)
        advice = "the GPU is the bottleneck: no data-path setting will help"
        if w.vram_share is not None and w.vram_share < _VRAM_PLENTY:
            free = _percent(1 - w.vram_share, 0)
            advice += f"; {free} of the GPU's memory is free for a larger training.train_batch_size"
        return self._found("compute-bound", evidence, advice, *self._faster_steps())

    def _faster_steps(self) -> tuple[str, ...]:
        """Return the next switch that may speed up a GPU; none changes results beyond rounding."""
        k = self.k
        off = (
            ("training.amp=auto", k.amp == "off"),
            ("training.compile=auto", not k.compile),
            ("training.channels_last=auto", not k.channels_last),
        )
        return next(((override,) for override, is_off in off if is_off), None) or self._larger_micro_batch()

    def _larger_micro_batch(self) -> tuple[str, ...]:
        """Return the same effective batch in half as many micro-batches, if they fit."""
        batch, pieces = self.k.train_batch_size, self.k.accumulate_steps
        if pieces % 2 or self.w.vram_share is None or self.w.vram_share >= _VRAM_PLENTY:
            return ()
        return f"training.train_batch_size={2 * batch}", f"training.accumulate_steps={pieces // 2}"

    def _host_bound(self, evidence: str) -> Verdict:
        w, k = self.w, self.k
        overrides: tuple[str, ...] = ()
        if k.on_gpu and k.workers == 0 and not k.resident and not k.memory_is_short:
            overrides = ("training.workers=2",)
        elif k.on_gpu:
            overrides = self._larger_micro_batch() if k.compile else ("training.compile=auto",)
        advice = "no setting reduces the trainer's own work"
        if w.idle_cores is not None and w.idle_cores < 1:
            advice = "no core is idle; see what else runs on this machine"
        return self._found("host-bound", evidence, advice, *overrides)

    def _data_bound(self, waited: str) -> Verdict:
        w, k = self.w, self.k
        # Readers without a pause deliver no more, however large the queue.
        saturated = max(self._readers_busy(), (w.reader_cores or 0.0) / max(k.workers, 1)) >= _SATURATED
        # The rule of tf.data's autotuner: a buffer that was full and yet ran empty is too small.  With unlimited space
        # the feeder would have worked while the queue was full, so the wait would shrink by at most that time.
        if w.empty_queue_hits and w.queue_full_s >= w.data_s / 2 and not saturated:
            full = f"the prefetch was full {_percent(w.queue_full_s / w.working_s)} of the time"
            evidence = f"{waited}, though {full} and empty for {w.empty_queue_hits} of {w.batches} batches"
            override = f"training.prefetch_factor={2 * k.prefetch_factor}"
            return self._more("prefetch too small", evidence, "batches ahead", override)
        if w.cut_s > w.wait_for_readers_s:
            evidence = f"{waited}, cutting patches into batches took {_percent(w.cut_s / w.working_s)}"
            advice = "no setting to try: the trainer's memory is too slow for the thread that copies patches"
            return self._data("cutting", evidence, advice)
        return self._readers_too_slow(waited)

    def _reader_s(self) -> float:
        """Total time of all readers in which they had work."""
        return self.w.reading_s * (self.k.workers or self.k.reader_threads)

    def _readers_busy(self) -> float:
        """Share of it spent reading or decoding; above 1 if blocks read earlier arrived in this window."""
        return (self.w.decode_s + (self.w.read_s or 0.0)) / self._reader_s()

    def _readers_too_slow(self, waited: str) -> Verdict:
        w, k = self.w, self.k
        if k.resident:
            advice = "nothing to change: decoded volumes stay in memory"
            return self._data("first pass", f"{waited}, voxels not yet in memory were read", advice)
        if w.working_readers is not None and w.working_readers < _WITH_WORK * k.workers:
            evidence = f"{waited}, {w.working_readers:.3g} of {format_count(k.workers, 'worker')} had a task on average"
            more = "a lower data.patches_per_region makes more tasks"
            advice = f"the remaining samples make too few tasks; in a new run, {more}"
            return self._data("too few tasks", evidence, advice)
        read_s, busy, who = w.read_s or 0.0, self._readers_busy(), "workers" if k.workers else "reading threads"
        on_core = None if w.reader_cores is None or k.workers == 0 else w.reader_cores / k.workers
        if k.workers and max(busy, on_core or 0.0) < _BUSY:
            advice = "regions are small compared with Ray's overhead per region; raise data.stream_gib in a new run"
            return self._data("handing over", f"{waited}, workers busy only {_percent(busy)}", advice)
        if read_s > w.decode_s:
            return self._store_too_slow(f"{waited}, {who} waited for the store {_percent(read_s / self._reader_s())}")
        evidence = f"{waited}, {who} busy {_percent(busy)}"
        waits_for_disk = on_core is not None and on_core < _WAITS_FOR_DISK * busy
        if w.read_s is None and waits_for_disk and w.free_cores >= 1:
            evidence += f", each with only {_percent(on_core or 0.0)} of a core"
            advice = "the disk is too slow; copy the volume to a faster one with `vesuvius volume copy`"
            return self._data("reading", evidence, advice)
        return self._too_few_cores_or_workers(evidence)

    def _too_few_cores_or_workers(self, evidence: str) -> Verdict:
        """If idle cores were not measured, all cores without a trainer or reader count as idle."""
        w, k = self.w, self.k
        free = w.free_cores if w.idle_cores is not None else w.free_cores - k.workers - 1
        if w.idle_cores is not None:
            evidence += f", {free:.1f} cores idle"
        if free >= 1:
            workers = min(k.workers + int(free), 2 * k.workers) if k.workers else 2
            return self._more("workers too few", evidence, "workers", f"training.workers={workers}")
        if k.workers > _READERS_PER_CORE * w.cores:
            evidence += f", {format_count(k.workers, 'worker')} share {w.cores:.3g} cores"
            return self._data("decoding", evidence, "", f"training.workers={math.ceil(w.cores)}")
        if w.others_cores >= max(w.cores / 4, 1):
            advice = "other programs use the cores; stop them, or train elsewhere"
            return self._data("decoding", evidence, advice)
        help_ = "more cores, a faster codec, or a new run with a higher data.patches_per_region will help"
        return self._data("decoding", evidence, f"no core is free; {help_}")

    def _store_too_slow(self, waited: str) -> Verdict:
        """Latency, which more concurrent requests hide, or a saturated link, which nothing hides.  The link's capacity
        is unknown, so more requests are tried first."""
        w, k = self.w, self.k
        rate, count = w.fetched_bytes_s, max(w.requests, 1)
        request_s = (w.read_s or 0.0) * k.requests / count
        request = f"{format_duration(request_s)} for a request of {format_size(w.bytes_fetched / count)}"
        evidence = f"{waited}, {request}, {format_rate(rate)} in total"
        requests = min(2 * k.requests, _REQUESTS_MOST)
        retried = w.retries >= _RETRIES_MANY * count and k.requests > 1
        if retried:
            evidence += f", {_percent(w.retries / count)} of the requests retried"
            requests = k.requests // 2
        if retried or k.requests < _REQUESTS_MOST:
            return self._data("store latency", evidence, "", f"data.store.requests={requests}")
        copy = "copy the volume to a local disk (`vesuvius volume copy`)"
        advice = copy if k.cached else f"set data.store.cache_dir to a folder on a local disk, or {copy}"
        return self._data("reading", evidence, advice)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * min(share, 1.0):.{digits}f} %"
