"""Verdicts on constructed windows with a known bottleneck."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.monitor.verdict import Verdict, diagnose
from vesuvius.monitor.window import Knobs, Window

GPU = Knobs(
    on_gpu=True,
    amp="auto",
    compile=True,
    channels_last=True,
    train_batch_size=2,
    accumulate_steps=1,
    workers=2,
    prefetch_factor=2,
    requests=16,
    cached=False,
)
CPU = replace(GPU, on_gpu=False, amp="off", compile=False, channels_last=False)


def window(**figures: Any) -> Window:
    """50 steps in 100 s, all computing except for `figures`; the readers are idle and batches are ready."""
    waits = {name: figures.pop(name, 0.0) for name in ("data_s", "h2d_s", "other_s", "comm_s", "pause_s")}
    computed = 100 - sum(waits.values()) + waits["pause_s"]
    healthy: dict[str, Any] = {
        "steps": 50,
        "step_s": 100.0,
        "forward_s": 0.3 * computed,
        "backward_s": 0.6 * computed,
        "optimizer_s": 0.1 * computed,
        "step_p50_s": 2.0,
        "step_p95_s": 2.5,
        "read_s": None,
        "decode_s": 10.0,
        "bytes_read": 10**9,
        "bytes_fetched": 0,
        "requests": 0,
        "retries": 0,
        "cut_s": 1.0,
        "wait_for_readers_s": 1.0,
        "idle_s": 98.0,
        "batches": 50,
        "empty_queue_hits": 0,
        "delivered_bytes": 50 * 10**6,
        "cores": 12,
        "idle_cores": 8.0,
        "reader_cores": 0.2,
        "vram_share": 0.9,
    }
    del waits["other_s"]  # the rest
    return Window(**(healthy | waits | figures))


def hungry(**figures: Any) -> Window:
    """The device waits for data 60 s of 100, because readers that decode all the time cannot keep up."""
    starved: dict[str, Any] = {
        "data_s": 60.0,
        "decode_s": 196.0,
        "cut_s": 2.0,
        "wait_for_readers_s": 97.0,
        "idle_s": 0.5,
        "empty_queue_hits": 45,
        "reader_cores": 1.9,
    }
    return window(**(starved | figures))


def far(**figures: Any) -> Window:
    """The same, but the readers wait for a store: 20,000 requests of 50 kB, 16 at once per reader."""
    remote = {"read_s": 180.0, "decode_s": 15.0, "requests": 20_000, "bytes_fetched": 10**9, "reader_cores": 0.3}
    return hungry(**(remote | figures))


HELD_BACK = {"throttled_share": 0.4, "throttled_quota": 4.0}
BURSTS = {"data_s": 30.0, "idle_s": 40.0, "wait_for_readers_s": 50.0, "decode_s": 120.0, "reader_cores": 1.2}
HALVED = "training.train_batch_size=4 training.accumulate_steps=2"
FOUR = {"decode_s": 390.0, "reader_cores": 3.9}

# Figures, changed settings, cause (if data-bound) or kind, overrides, and words of the line.
RULES: list[tuple[Window, dict[str, Any], str, str, str]] = [
    # the device computes
    (window(), {"amp": "off", "compile": False}, "compute-bound", "training.amp=auto", ""),
    (window(), {"compile": False, "channels_last": False}, "compute-bound", "training.compile=auto", ""),
    (window(), {"channels_last": False}, "compute-bound", "training.channels_last=auto", ""),
    (window(vram_share=None), {"on_gpu": False}, "compute-bound", "", "the CPU is the bottleneck"),
    (window(data_s=14.0, h2d_s=14.0, other_s=14.0), {}, "compute-bound", "", ""),
    (window(**HELD_BACK), {}, "compute-bound", "", "used up in 40.0 %"),
    (window(gpu_busy=0.9), {}, "compute-bound", "", ""),
    # the same effective batch in fewer micro-batches if they fit; twice the batch would be another experiment
    (window(vram_share=0.9), {"accumulate_steps": 4}, "compute-bound", "", ""),
    (window(vram_share=0.3), {"accumulate_steps": 4}, "compute-bound", HALVED, ""),
    (window(vram_share=0.3), {}, "compute-bound", "", "70 % of the GPU's memory is free"),
    # events include the gaps between kernels; NVML does not
    (window(gpu_busy=0.4), {"compile": False}, "host-bound", "training.compile=auto", "kernels ran only 40.0 %"),
    # the longest wait names the kind
    (hungry(data_s=30.0, h2d_s=20.0, other_s=25.0), {}, "workers too few", "training.workers=4", ""),
    (hungry(data_s=20.0, h2d_s=30.0, other_s=25.0), {}, "transfer-bound", "", ""),
    (hungry(data_s=20.0, h2d_s=25.0, other_s=30.0), {}, "host-bound", "", ""),
    (hungry(data_s=10.0, comm_s=45.0), {}, "comm-bound", "", "waited for other ranks 45.0 % of the time"),
    (window(h2d_s=40.0), {}, "transfer-bound", "", "copies to the device 40.0 % of the time (good: below 15 %)"),
    # the host
    (window(other_s=40.0), {}, "host-bound", "", "waited for the host 40.0 %"),
    (window(other_s=40.0), {"workers": 0, "compile": False}, "host-bound", "training.workers=2", ""),
    (
        window(other_s=40.0),
        {"workers": 0, "compile": False, "memory_is_short": True},
        "host-bound",
        "training.compile=auto",
        "",
    ),
    (
        window(other_s=40.0, vram_share=0.2),
        {"accumulate_steps": 2},
        "host-bound",
        "training.train_batch_size=4 training.accumulate_steps=1",
        "",
    ),
    (window(other_s=40.0), {"on_gpu": False, "compile": False}, "host-bound", "", ""),
    # as many readers as cores are idle, at most twice as many; idle cores of other ranks do not count
    (hungry(idle_cores=1.2, **FOUR), {"workers": 4}, "workers too few", "training.workers=5", ""),
    (hungry(idle_cores=9.0, **FOUR), {"workers": 4}, "workers too few", "training.workers=8", ""),
    (hungry(idle_cores=60.0, cores=2, **FOUR), {"workers": 4}, "workers too few", "training.workers=6", ""),
    (hungry(), {"memory_is_short": True}, "workers too few", "", "memory is short"),
    (hungry(idle_cores=None, reader_cores=None, cores=4), {}, "workers too few", "training.workers=3", ""),
    (hungry(idle_cores=None, reader_cores=None, cores=3), {}, "decoding", "", ""),
    (hungry(idle_cores=0.4), {}, "decoding", "", "no core is free"),
    # a pod of four cores on a machine of 64, used up by its readers; a quota that is used up
    (hungry(idle_cores=58.0, cores=4, own_cores=3.9, **FOUR), {"workers": 4}, "decoding", "", "0.1 cores"),
    (hungry(**HELD_BACK), {}, "decoding", "", "quota of 4 cores was used up in 40.0 % of its"),
    # disk and store
    (hungry(reader_cores=0.3), {}, "reading", "", "workers busy 98.0 %, each with only 15.0 % of a core"),
    (hungry(reader_cores=0.3, idle_cores=0.2), {}, "decoding", "", ""),
    (far(), {}, "store latency", "data.store.requests=32", "144 ms for a request of 48.8 KiB, 10 MB/s"),
    # nothing but a measurement tells whether a link is saturated: 100 Mbit/s or 100 Gbit/s may be all of it
    (far(bytes_fetched=10**12), {}, "store latency", "data.store.requests=32", ""),
    (far(), {"requests": 48}, "store latency", "data.store.requests=64", ""),
    (far(), {"requests": 64}, "reading", "", ""),
    (far(retries=3000), {}, "store latency", "data.store.requests=8", "15.0 % of the requests retried"),
    (far(), {"requests": 64, "cached": True}, "reading", "", "copy the volume to a local disk"),
    (far(read_s=20.0, decode_s=170.0, reader_cores=1.7), {}, "workers too few", "training.workers=4", ""),
    # the queue
    (
        hungry(**BURSTS),
        {},
        "prefetch too small",
        "training.prefetch_factor=4",
        "full 40.0 % of the time and empty for 45",
    ),
    (hungry(**BURSTS), {"memory_is_short": True}, "prefetch too small", "", "memory is short"),
    (hungry(idle_s=5.0), {}, "workers too few", "training.workers=4", ""),  # it would save only 5 s of 60
    # the trainer reads itself
    (hungry(decode_s=97.0, reader_cores=None), {"workers": 0}, "workers too few", "training.workers=2", ""),
    # volumes in memory
    (hungry(decode_s=97.0, reader_cores=None), {"workers": 0, "resident": True}, "first pass", "", "stay in memory"),
    (window(data_s=40.0, cut_s=9.0), {"workers": 0, "resident": True}, "cutting", "", ""),
    (
        window(other_s=30.0),
        {"workers": 0, "resident": True, "compile": False},
        "host-bound",
        "training.compile=auto",
        "",
    ),
    (hungry(decode_s=97.0, reader_cores=None, idle_cores=0.2), {"workers": 0}, "decoding", "", ""),
    (
        hungry(decode_s=97.0, reader_cores=None, idle_cores=0.2),
        {"workers": 0, "reader_threads": 4},
        "decoding",
        "",
        "y 24.",
    ),
    (far(read_s=90.0, decode_s=5.0), {"workers": 0}, "store latency", "data.store.requests=32", ""),
    # fewer tasks than readers; more readers than cores
    (
        hungry(decode_s=95.0, reader_cores=0.95, working_readers=1.0),
        {"workers": 8},
        "too few tasks",
        "",
        "1 of 8 workers had a task",
    ),
    (
        hungry(idle_cores=0.0, cores=2, own_cores=2.0, decode_s=6300.0, reader_cores=1.8),
        {"workers": 64},
        "decoding",
        "training.workers=2",
        "64 workers share 2 cores",
    ),
    # one segment of Ray hands over to the next
    (window(data_s=12.0, wait_for_readers_s=12.0, idle_s=80.0, empty_queue_hits=2), {}, "compute-bound", "", ""),
    # between readers and trainer
    (hungry(decode_s=20.0, reader_cores=0.3), {}, "handing over", "", ""),
    (hungry(decode_s=20.0, reader_cores=1.8), {}, "workers too few", "training.workers=4", ""),  # with what?
    (hungry(cut_s=90.0, wait_for_readers_s=5.0), {}, "cutting", "", ""),
]


@pytest.mark.parametrize(("figures", "knobs", "says", "overrides", "words"), RULES)
def test_each_window_has_its_cause_and_override(
    figures: Window, knobs: dict[str, Any], says: str, overrides: str, words: str
) -> None:
    found = diagnose(figures, replace(GPU, **knobs))
    assert (found.cause or found.kind, " ".join(found.overrides)) == (says, overrides), found.text
    assert words in found.text


def test_a_computing_device_is_compute_bound_without_an_override() -> None:
    found = diagnose(window(data_s=1.2), GPU)
    assert (found.kind, found.cause, found.overrides) == ("compute-bound", None, ())
    assert found.line(100, 128000) == (
        "Verdict step 100/128000 compute-bound: computed 98.8 % of the time (good: above 80 %; forward 30 %, backward "
        "60 %, optimizer 10 %), waited for data 1.2 %; step p50 2 s, p95 2.5 s over 50 steps; the GPU is "
        "the bottleneck: no data-path setting will help"
    )


# ---- other programs


CROWDED = {"cores": 2.0, "idle_cores": 0.0, "own_cores": 0.9, "reader_cores": 0.0}


@pytest.mark.parametrize("found", [window(**CROWDED), hungry(**CROWDED), far(**CROWDED), window(other_s=40, **CROWDED)])
@pytest.mark.parametrize("knobs", [GPU, CPU])
def test_every_verdict_names_the_cores_of_other_programs(found: Window, knobs: Knobs) -> None:
    assert diagnose(found, knobs).evidence.count("other programs use 1.1 of 2 cores") == 1
    alone = replace(found, own_cores=1.9)
    assert "other programs" not in diagnose(alone, knobs).evidence
    assert "other programs" not in diagnose(replace(found, idle_cores=None), knobs).evidence, "not known"


@pytest.mark.parametrize(
    ("threads", "figures", "fewer"),
    [
        (2, {}, 1),
        (1, {}, None),
        (None, {}, None),
        (2, {"own_cores": 1.9}, None),  # no other programs
        (16, {"cores": 16.0, "own_cores": 6.0, "reader_cores": 1.5}, 4),  # 10 are in use
        (4, {"cores": 16.0, "own_cores": 6.0, "reader_cores": 1.5}, None),  # as many as are free
        (16, {"cores": 16.0, "own_cores": 6.0, "idle_cores": 9.0}, None),  # one is in use
    ],
)
def test_a_trainer_with_more_threads_than_free_cores_should_use_fewer(
    threads: int | None, figures: dict[str, Any], fewer: int | None
) -> None:
    found = diagnose(window(**(CROWDED | figures)), replace(CPU, threads=threads))
    assert found.kind == "compute-bound"
    assert (f"try OMP_NUM_THREADS={fewer} " in found.advice) if fewer else ("THREADS" not in found.advice)
    on_gpu = diagnose(window(**(CROWDED | figures)), replace(GPU, threads=threads))
    assert "THREADS" not in on_gpu.advice, "it computes on a GPU"


def test_a_validation_counts_neither_as_host_bound_nor_as_waiting_readers() -> None:
    """90 of the 100 s are a pause, in which the queue is full and the readers are idle."""
    calm = diagnose(window(other_s=91.0, pause_s=90.0, idle_s=99.0), GPU)
    assert calm.kind == "compute-bound"
    assert "computed 90.0 %" in calm.evidence
    found = diagnose(
        hungry(other_s=90.0, pause_s=90.0, data_s=6.0, idle_s=90.0, wait_for_readers_s=9.0, decode_s=19.0), GPU
    )
    assert (found.kind, found.cause) == ("data-bound", "workers too few")
    assert "workers busy 95.0 %" in found.evidence


def test_busy_readers_and_idle_cores_mean_too_few_workers() -> None:
    found = diagnose(hungry(idle_cores=5.1), GPU)
    assert (found.kind, found.cause, found.overrides) == ("data-bound", "workers too few", ("training.workers=4",))
    assert found.line(1200, 128000) == (
        "Verdict step 1200/128000 data-bound (workers too few): waited for data 60.0 % of the time (good: below 15 %), "
        "workers busy 98.0 %, 5.1 cores idle; step p50 2 s, p95 2.5 s over 50 steps; try training.workers=4"
    )
    record = diagnose(hungry(data_s=60.123456789), GPU).record()
    assert (record["data_s"], record["data_share"]) == (60.123456789, 60.123456789 / 100), "unrounded"
    assert (record["bound"], record["cause"]) == ("data-bound", "workers too few")
    assert (record["overrides"], record["step_p95_s"]) == (["training.workers=4"], 2.5)


def test_stopped_readers_are_named_as_the_cause() -> None:
    calm = diagnose(window(stopped_readers=2), replace(GPU, compile=False))
    assert (calm.kind, calm.overrides) == ("compute-bound", ("training.compile=auto",))
    assert "(SIGSTOP) or a debugger has stopped 2 workers" in calm.evidence
    idle = hungry(decode_s=20.0, reader_cores=0.3)
    assert diagnose(idle, GPU).cause == "handing over"
    held = diagnose(replace(idle, stopped_readers=1), GPU)
    assert (held.cause, held.overrides) == ("workers stopped", ())
    assert "-CONT" in held.advice


@pytest.mark.parametrize("idle_s", [30.0, 60.0, 95.0])
@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"read_s": 185.0, "decode_s": 5.0}, "store latency"),
        ({"read_s": 90.0, "decode_s": 100.0}, "workers too few"),
        ({"read_s": None, "decode_s": 181.0, "reader_cores": 1.8}, "workers too few"),
        ({"read_s": None, "decode_s": 60.0, "reader_cores": 1.9}, "workers too few"),
    ],
)
def test_saturated_readers_take_precedence_over_the_queue(figures: dict[str, Any], cause: str, idle_s: float) -> None:
    """A queue of one batch is nearly always full, and a larger one would not fill faster."""
    found = diagnose(far(data_s=30.0, idle_s=idle_s, wait_for_readers_s=50.0, **figures), GPU)
    assert (found.kind, found.cause) == ("data-bound", cause)
    paused = {"read_s": 100.0, "decode_s": 70.0, "reader_cores": 0.7}
    assert (
        diagnose(far(data_s=30.0, idle_s=idle_s, wait_for_readers_s=50.0, **paused), GPU).cause == "prefetch too small"
    )


# Recorded: one reader with `requests: 4`, one prefetched batch of one patch, chunks of 32^3 over HTTP with 500 ms
# latency; a step sleeps for about three quarters of the time that the reader needs for a patch.
RECORDED: dict[str, Any] = {
    "steps": 98, "step_s": 21.097, "data_s": 7.194, "forward_s": 13.878, "other_s": 0.02, "read_s": 19.798,
    "decode_s": 0.656, "bytes_fetched": 3194327, "requests": 163, "cut_s": 0.078, "wait_for_readers_s": 10.149,
    "idle_s": 10.866, "batches": 98, "empty_queue_hits": 20, "backward_s": 0.0, "optimizer_s": 0.0,
    "reader_cores": None,
}  # fmt: skip
OPERATOR = replace(CPU, workers=1, prefetch_factor=1, train_batch_size=1, requests=4)


def test_recorded_window_with_a_queue_of_one_blames_the_store() -> None:
    found = window(**RECORDED)
    assert found.queue_full_s >= found.data_s / 2, "by the queue alone its prefetch is too small"
    assert found.empty_queue_hits
    verdict = diagnose(found, OPERATOR)
    assert (verdict.cause, verdict.overrides) == ("store latency", ("data.store.requests=8",))


def seconds(most: float = 300.0) -> st.SearchStrategy[float]:
    return st.floats(0, most)


@given(
    waits=st.fixed_dictionaries({n: seconds(30) for n in ("data_s", "h2d_s", "other_s")}),
    readers=st.fixed_dictionaries(
        {
            "read_s": st.none() | seconds(),
            "decode_s": seconds(),
            "requests": st.integers(0, 10**5),
            "retries": st.integers(0, 10**5),
            "bytes_fetched": st.integers(0, 10**11),
            "cut_s": seconds(100),
            "wait_for_readers_s": seconds(100),
            "idle_s": seconds(100),
            "batches": st.integers(0, 50),
            "empty_queue_hits": st.integers(0, 50),
            "idle_cores": st.none() | seconds(64),
            "reader_cores": st.none() | seconds(64),
            "vram_share": st.none() | st.floats(0, 1),
        }
    ),
    knobs=st.builds(
        Knobs,
        on_gpu=st.booleans(),
        amp=st.sampled_from(["auto", "off"]),
        compile=st.booleans(),
        channels_last=st.booleans(),
        train_batch_size=st.integers(1, 8),
        accumulate_steps=st.integers(1, 8),
        workers=st.integers(0, 16),
        prefetch_factor=st.integers(1, 8),
        requests=st.integers(1, 256),
        cached=st.booleans(),
    ),
)
def test_every_window_gets_one_plain_line_and_a_record_whatever_its_figures(
    waits: dict[str, float], readers: dict[str, Any], knobs: Knobs
) -> None:
    found: Verdict = diagnose(window(**waits, **readers), knobs)
    line = found.line(7, 10)
    assert line.isascii()
    assert "\n" not in line
    assert not re.search(r"killed|oom|out of memory|error|warn", line, re.IGNORECASE), line
    assert (found.cause is None) == (found.kind != "data-bound")
    assert all(re.fullmatch(r"(training|data\.store)\.\w+=\w+", override) for override in found.overrides)
    assert json.loads(json.dumps(found.record()))["bound"] == found.kind
