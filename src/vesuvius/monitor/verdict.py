"""What holds a run up: from the figures of some steps to one line with the proof and what to try next.  Pure.

The device either computes or waits: for data, for copies, for the host.  Where it waits for data, the cause is looked
for from the trainer backwards: batches ahead, cutting, readers, store.  Each rule stands where it is applied.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vesuvius.monitor.probes.cores import others_text
from vesuvius.monitor.window import THROTTLED, Knobs, Thresholds, Window

Kind = Literal["compute-bound", "data-bound", "transfer-bound", "host-bound", "comm-bound"]
Cause = Literal[
    "prefetch too small",
    "cutting",
    "handing over",
    "workers too few",
    "decoding",
    "reading",
    "store latency",
    "readers stopped",
    "too few tasks",
]

# A reader that is busy for less of the time than this is not what the trainer waits for; one that is busy for more
# than the latter fills no larger queue either.
_BUSY, _SATURATED = 0.5, 0.9
# Processors that work for less than this share of the time in which a reader is busy: it waits for the disk.
_WAITS_FOR_DISK = 0.5
# More requests in flight per reader than this have not been seen to help.
_REQUESTS_MOST = 64
# A store that makes us try again as often as this is asked too much.
_RETRIES_MANY = 0.05
_VRAM_PLENTY = 0.5
# Kernels that run for less than this share of the stretches in which they are queued are launched too slowly.
_LAUNCHING = 0.7
# Where fewer of the readers have a task, more of them would not help, and these are busier than they seem.
_WITH_WORK = 0.75
# More readers than this to a processor, all decoding, are in each other's way.
_READERS_PER_CORE = 2
# Where others use this share of the processors, a trainer with more threads than are left waits in each of its
# operations for the thread that has none.
_OTHERS_CROWD = 0.25


@dataclass(frozen=True)
class Verdict:
    """What holds a run up."""

    # kind, cause: the cause is None unless data-bound
    kind: Kind
    cause: Cause | None
    evidence: str  # the figures that say so
    overrides: tuple[str, ...]  # what to try next, to be written after `vesuvius train`; empty where there is nothing
    advice: str  # in words
    window: Window  # all figures

    @property
    def text(self) -> str:
        """In one line."""
        kind = self.kind if self.cause is None else f"{self.kind} ({self.cause})"
        return (
            f"{kind}: {self.evidence}; step p50 {self.window.step_p50_s:.3g} s, p95 {self.window.step_p95_s:.3g} s "
            f"over {self.window.steps} steps; {self.advice}"
        )

    def line(self, step: int, steps: int) -> str:
        """For the log."""
        return f"Verdict step {step}/{steps} {self.text}"

    def record(self) -> dict[str, Any]:
        """For metrics.jsonl, unrounded."""
        w = self.window
        shares = {
            "compute_share": w.compute_share,
            "data_share": w.data_share,
            "h2d_share": w.h2d_share,
            "host_share": w.host_share,
            "comm_share": w.comm_share,
        }
        words = {"bound": self.kind, "cause": self.cause, "text": self.text, "evidence": self.evidence}
        return words | {"overrides": list(self.overrides), "advice": self.advice} | shares | asdict(w)


def judge(window: Window, knobs: Knobs, thresholds: Thresholds = Thresholds()) -> Verdict:
    """Say what holds a run up, and what to try next.

    Compute-bound is good: the device computes for most of the time, or nothing else takes long.  Otherwise what the
    device waits for longest.  What a signal or a quota took from the run is said with it.
    """
    found = _judge(window, knobs, thresholds)
    evidence = found.evidence
    if others := others_text(window.others_cores, window.cores):
        evidence += f", {others}"
    if window.throttled_share is not None and window.throttled_share >= THROTTLED:
        quota = "" if window.throttled_quota is None else f" of {window.throttled_quota:.3g} processors"
        evidence += f", the quota{quota} was used up in {_percent(window.throttled_share)} of its periods"
    found = replace(found, evidence=evidence)
    if window.stopped_readers:
        held = f"a signal (SIGSTOP) or a debugger holds {window.stopped_readers} reader(s)"
        found = replace(found, evidence=f"{evidence}, {held}", advice=f"{found.advice}; `kill -CONT` resumes readers")
        if found.kind == "data-bound":
            advice = "no setting helps while readers are stopped: `kill -CONT` resumes them"
            found = replace(found, cause="readers stopped", overrides=(), advice=advice)
    return found


def _judge(window: Window, knobs: Knobs, thresholds: Thresholds) -> Verdict:
    waits: dict[Kind, float] = {
        "data-bound": window.data_share,
        "transfer-bound": window.h2d_share,
        "host-bound": window.host_share,
        "comm-bound": window.comm_share,
    }
    kind = max(waits, key=lambda name: waits[name])
    if window.compute_share >= thresholds.gpu_share_good or waits[kind] <= thresholds.data_share_good:
        if knobs.on_gpu and window.gpu_busy is not None and window.gpu_busy < _LAUNCHING * window.compute_share:
            evidence = (
                f"the GPU had work {_percent(window.compute_share)} of the time, but kernels ran only "
                f"{_percent(window.gpu_busy)}: launching them is the limit"
            )
            return _host_bound(window, knobs, evidence)
        return _compute_bound(window, knobs, thresholds)
    good = f"(good: below {_percent(thresholds.data_share_good, 0)})"
    match kind:
        case "transfer-bound":
            evidence = (
                f"waited for copies to the device {_percent(window.h2d_share)} of the time {good}, "
                f"{window.delivered_bytes / window.steps / 1e6:.3g} MB a step"
            )
            advice = "nothing to try: voxels travel in their stored dtype; check the GPU's link (nvidia-smi -q)"
            return Verdict("transfer-bound", None, evidence, (), advice, window)
        case "host-bound":
            evidence = f"the device waited for the host {_percent(window.host_share)} of the time {good}"
            return _host_bound(window, knobs, evidence)
        case "comm-bound":
            evidence = f"waited for other ranks {_percent(window.comm_share)} of the time {good}"
            advice = (
                "nothing to change here: see the log, below ranks/, of the rank that the step line calls "
                "slowest; if all are alike the network is slow, and a larger training.accumulate_steps uses it less"
            )
            return Verdict("comm-bound", None, evidence, (), advice, window)
        case _:
            return _data_bound(window, knobs, thresholds, good)


def _compute_bound(w: Window, k: Knobs, t: Thresholds) -> Verdict:
    gpu_s = w.forward_s + w.backward_s + w.optimizer_s
    parts = " ".join(
        f"{name} {_percent(part / gpu_s if gpu_s else 0.0, 0)}"
        for name, part in (("forward", w.forward_s), ("backward", w.backward_s), ("optimizer", w.optimizer_s))
    )
    evidence = (
        f"computed {_percent(w.compute_share)} of the time (good: above {_percent(t.gpu_share_good, 0)}; {parts}), "
        f"waited for data {_percent(w.data_share)}"
    )
    if not k.on_gpu:
        left = max(int(w.cores - w.others_cores - (w.reader_cores or 0.0)), 1)
        if w.others_cores >= _OTHERS_CROWD * w.cores and k.threads is not None and k.threads > left:
            evidence += f", {k.threads} threads of the trainer wait for each other"
            return _to_try("compute-bound", None, evidence, (f"training.threads={left}",), w)
        return Verdict("compute-bound", None, evidence, (), "nothing to change: the device is a CPU", w)
    overrides = _faster_steps(w, k)
    if overrides:
        return _to_try("compute-bound", None, evidence, overrides, w)
    advice = "nothing to change: the device computes"
    if w.vram_share is not None and w.vram_share < _VRAM_PLENTY:
        advice += f"; {_percent(1 - w.vram_share, 0)} of its memory is free for a larger training.train_batch_size"
    return Verdict("compute-bound", None, evidence, (), advice, w)


def _faster_steps(w: Window, k: Knobs) -> tuple[str, ...]:
    """The next switch that may let a GPU compute faster; none changes what is learned beyond rounding."""
    if k.amp == "off":
        return ("training.amp=auto",)
    if not k.compile:
        return ("training.compile=true",)
    if not k.channels_last:
        return ("training.channels_last=true",)
    if not k.cudnn_benchmark and not k.deterministic:
        return ("training.cudnn_benchmark=true",)
    return _larger_micro_batch(w, k)


def _larger_micro_batch(w: Window, k: Knobs) -> tuple[str, ...]:
    """The same effective batch in half as many pieces, where they fit."""
    if k.accumulate_steps % 2 or w.vram_share is None or w.vram_share >= _VRAM_PLENTY:
        return ()
    return (
        f"training.train_batch_size={2 * k.train_batch_size}",
        f"training.accumulate_steps={k.accumulate_steps // 2}",
    )


def _host_bound(w: Window, k: Knobs, evidence: str) -> Verdict:
    """Launching kernels one by one, logging, or another thread of the trainer holds the interpreter."""
    overrides: tuple[str, ...] = ()
    if k.on_gpu and k.workers == 0 and not k.memory_is_short:
        overrides = ("training.workers=2",)
    elif k.on_gpu and not k.compile:
        overrides = ("training.compile=true",)
    elif k.on_gpu:
        overrides = _larger_micro_batch(w, k)
    if overrides:
        return _to_try("host-bound", None, evidence, overrides, w)
    advice = "nothing to try: no setting reduces the trainer's own work"
    if w.idle_cores is not None and w.idle_cores < 1:
        advice = "nothing to try: no processor is idle; see what else runs on this machine"
    return Verdict("host-bound", None, evidence, (), advice, w)


def _data_bound(w: Window, k: Knobs, t: Thresholds, good: str) -> Verdict:
    """From the trainer backwards to the store."""
    waited = f"waited for data {_percent(w.data_share)} of the time {good}"
    # Readers without a pause bring no more, however much is kept: the next queue would be as full and as empty.
    saturated = max(_readers_busy(w, k), (w.reader_cores or 0.0) / max(k.workers, 1)) >= _SATURATED
    # With endless places the feeder would have worked where it was held up: at most so much less would be waited.
    if w.ran_empty and w.held_up_s >= w.data_s / 2 and not saturated:
        return _prefetch_too_small(w, k, waited)
    if w.cut_s > w.starved_s:
        evidence = f"{waited}, cutting patches into batches took {_percent(w.cut_s / w.working_s)}"
        advice = "nothing to try: one thread of the trainer copies patches, and its memory is too slow"
        return Verdict("data-bound", "cutting", evidence, (), advice, w)
    return _readers_too_slow(w, k, t, waited)


def _prefetch_too_small(w: Window, k: Knobs, waited: str) -> Verdict:
    """The rule of tf.data's autotuner: a buffer that was full and yet ran empty is too small for how data come."""
    evidence = (
        f"{waited}, though the prefetch was full for {_percent(w.held_up_s / w.working_s)} of it and empty for "
        f"{w.ran_empty} of {w.batches} batches"
    )
    if k.memory_is_short:
        return _short_of_memory("prefetch too small", evidence, "batches ahead", w)
    override = f"training.prefetch_factor={2 * k.prefetch_factor}"
    if k.prefetch_limit_mib is not None:
        override = f"training.prefetch_mib={2 * k.prefetch_limit_mib}"
    return _to_try("data-bound", "prefetch too small", evidence, (override,), w)


def _readers_too_slow(w: Window, k: Knobs, t: Thresholds, waited: str) -> Verdict:
    """The feeder had nothing to cut: what were the readers doing?"""
    if w.working_readers is not None and w.working_readers < _WITH_WORK * k.workers:
        evidence = f"{waited}, {w.working_readers:.3g} of {k.workers} readers had a task on average"
        advice = (
            "nothing to try: the samples left are too few tasks; in a new run, a lower data.regions_per_task or "
            "data.patches_per_region makes more of them"
        )
        return Verdict("data-bound", "too few tasks", evidence, (), advice, w)
    read_s, busy = w.read_s or 0.0, _readers_busy(w, k)
    on_processor = None if w.reader_cores is None or k.workers == 0 else w.reader_cores / k.workers
    if k.workers and max(busy, on_processor or 0.0) < _BUSY:
        evidence = f"{waited}, readers busy only {_percent(busy)}"
        advice = "nothing to try: regions are small compared with what Ray needs to pass one on; see data.region_size"
        return Verdict("data-bound", "handing over", evidence, (), advice, w)
    if read_s > w.decode_s:
        return _store_too_slow(w, k, t, f"{waited}, readers waited for the store {_percent(read_s / _reader_s(w, k))}")
    evidence = f"{waited}, readers busy {_percent(busy)}"
    if w.read_s is None and on_processor is not None and on_processor < _WAITS_FOR_DISK * busy and w.free_cores >= 1:
        evidence += f" but their processors {_percent(on_processor)}"
        advice = "nothing to try: the disk is too slow; `vesuvius volume copy` to a faster one"
        return Verdict("data-bound", "reading", evidence, (), advice, w)
    return _too_few_cores_or_workers(w, k, evidence)


def _reader_s(w: Window, k: Knobs) -> float:
    """Seconds of all readers in which they had reason to read."""
    return w.reading_s * max(k.workers, 1)


def _readers_busy(w: Window, k: Knobs) -> float:
    """Share of it in which they read or decoded; above 1 where blocks that were read before have come since."""
    return (w.decode_s + (w.read_s or 0.0)) / _reader_s(w, k)


def _too_few_cores_or_workers(w: Window, k: Knobs, evidence: str) -> Verdict:
    """Where nobody measured which processors are idle, those are that neither the trainer nor a reader needs."""
    free = w.free_cores if w.idle_cores is not None else w.free_cores - k.workers - 1
    if w.idle_cores is not None:
        evidence += f", {free:.1f} cores idle"
    if free >= 1 and k.memory_is_short:
        return _short_of_memory("workers too few", evidence, "readers", w)
    if free >= 1:
        workers = min(k.workers + int(free), 2 * k.workers) if k.workers else 2
        return _to_try("data-bound", "workers too few", evidence, (f"training.workers={workers}",), w)
    if k.workers > _READERS_PER_CORE * w.cores:
        evidence += f", {k.workers} readers share {w.cores:.3g} processors"
        return _to_try("data-bound", "decoding", evidence, (f"training.workers={math.ceil(w.cores)}",), w)
    if w.others_cores >= max(w.cores / 4, 1):
        advice = "nothing to try here: other programs use the processors; stop them, or train elsewhere"
        return Verdict("data-bound", "decoding", evidence, (), advice, w)
    advice = "nothing to try: no processor is left; a new run with a higher data.patches_per_region decodes less"
    return Verdict("data-bound", "decoding", evidence, (), f"{advice}, a faster codec or more cores help too", w)


def _store_too_slow(w: Window, k: Knobs, t: Thresholds, waited: str) -> Verdict:
    """Latency, which more requests at once hide, or a link that is used up, which nothing hides.

    What the link gives is not known, so more requests are tried first, up to where no link known to us gains by them.
    """
    rate = w.bytes_fetched / w.reading_s
    count = max(w.requests, 1)
    request_s = (w.read_s or 0.0) * k.requests / count
    evidence = (
        f"{waited}, {1000 * request_s:.3g} ms for a request of {w.bytes_fetched / count / 1e6:.3g} MB, "
        f"{rate / 1e6:.3g} MB/s in all"
    )
    if w.retries >= _RETRIES_MANY * count and k.requests > 1:
        evidence += f", {_percent(w.retries / count)} of the requests retried"
        return _to_try("data-bound", "store latency", evidence, (f"data.store.requests={k.requests // 2}",), w)
    if rate < t.link_bytes_s / 2 and k.requests < _REQUESTS_MOST:
        requests = min(2 * k.requests, _REQUESTS_MOST)
        return _to_try("data-bound", "store latency", evidence, (f"data.store.requests={requests}",), w)
    copy = "copy the volume to a disk here (`vesuvius volume copy`)"
    advice = copy if k.cached else f"set data.store.cache_dir to a folder on a disk here, or {copy}"
    return Verdict("data-bound", "reading", evidence, (), advice, w)


def _short_of_memory(cause: Cause, evidence: str, what: str, w: Window) -> Verdict:
    advice = f"more {what} would help, but memory is short; lower data.reader_mib first"
    return Verdict("data-bound", cause, evidence, (), advice, w)


def _to_try(kind: Kind, cause: Cause | None, evidence: str, overrides: tuple[str, ...], w: Window) -> Verdict:
    return Verdict(kind, cause, evidence, overrides, f"try {' '.join(overrides)}", w)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * min(share, 1.0):.{digits}f} %"
