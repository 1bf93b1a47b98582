"""Memory samples: which are kept, what a record of many says, and that files survive crashes and full disks."""

from __future__ import annotations

from pathlib import Path

from tests.support.memory_samples import memory_samples
from tests.support.small_disk import fill, small_disk
from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.monitor.memory.risk import Exhaustion, Trend
from vesuvius.monitor.probes.gpus import GpuUse, VramUse
from vesuvius.monitor.samples import MemorySample, RecentFile, read_recent, spreads, summarize
from vesuvius.runlog.records import JsonLines, read_records

MONTH_RECORDS = 31 * 24 * 60


def sample(step: int, **figures: object) -> MemorySample:
    return MemorySample(1000.0 + step, step, 100 + step, 10, 40, {7: 30, 8: 20 + step}, **figures)  # type: ignore[arg-type]


def full(step: int = 1) -> MemorySample:
    """A sample in which everything is known."""
    gpu = GpuUse(0, "GPU-5f", "NVIDIA H200", 2**36, 2**37, step / 7, 412.3456 + step, 64.0)
    vram = VramUse(2**30 + step, 2**31 + step, 2**31 + 2 * step, 2**36 - step, 2**37, retries=1, failures=0)
    return sample(
        step,
        limits=tuple(MemoryLimit(name, 5, 9, 8, 2, 1) for name in ("the machine", "Ray's memory monitor")),
        risk="WARN", reason="near", growth_bytes_s=Trend(1.1, 1.0, 1.25, 60.0),
        exhaustion_s=Exhaustion(1.0, 2.0, 3.5, firm=False), page_cache_bytes=4, machine_available_bytes=90 - step,
        swap_used_bytes=0, cgroup_oom_kills=0, machine_oom_kills=2, gpus=(gpu,), vram=vram, workers=2, awaits="batch",
        silent_s=0.5,
    )  # fmt: skip


def write(path: Path, steps: range, kept: int = 4) -> None:
    recent = RecentFile(path, kept)
    for step in steps:
        recent.write(sample(step))
    recent.close()


def test_samples_are_read_back_in_order_before_the_file_is_closed(tmp_path: Path) -> None:
    """Each line is handed to the system at once, so it survives SIGKILL."""
    path = tmp_path / "recent.jsonl"
    ring = RecentFile(path)
    ring.write(sample(0))
    ring.write(full())
    assert read_recent(path) == [sample(0), full()]
    ring.close()


def test_only_the_last_samples_are_kept_in_two_bounded_files(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    for count in (1, 4, 5, 11):
        for file in tmp_path.iterdir():
            file.unlink()
        write(path, range(count))
        assert [m.step for m in read_recent(path, 4)] == list(range(max(count - 4, 0), count))
        assert len(list(tmp_path.iterdir())) <= 2
        assert all(len(file.read_text().splitlines()) <= 4 for file in tmp_path.iterdir())


def test_a_new_session_appends_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    write(path, range(100, 103))
    path.write_bytes(path.read_bytes()[:-20])  # torn by a crash
    write(path, range(1))  # the clock was set back
    assert [m.step for m in read_recent(path)] == [100, 101, 0]
    assert read_recent(tmp_path / "nowhere") == []


def test_rotation_frees_space_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, kib=96) as disk:
        recent = RecentFile(disk / "recent.jsonl", 30)  # of 15 KiB
        for step in range(60):
            recent.write(sample(step))
        fill(disk)
        for step in range(60, 100):
            recent.write(sample(step))
        assert [m.step for m in read_recent(disk / "recent.jsonl", 10)] == list(range(90, 100))
        recent.close()


def test_a_record_has_the_range_of_what_varies_and_the_last_of_the_rest() -> None:
    record = summarize([full(1), full(3), full(2)])
    assert record["used_bytes"] == [101, 102, 103]
    assert record["machine_available_bytes"] == 87
    assert (record["step"], record["samples"], record["limit_bytes"], record["risk"]) == (2, 3, 9, "WARN")
    assert record["gpus"][0]["busy"] == [round(x / 7, 2) for x in (1, 2, 3)]
    vram = record["vram"]
    assert (vram["reserved_bytes"][2], vram["peak_bytes"], vram["free_bytes"]) == (2**31 + 3, 2**31 + 6, 2**36 - 3)
    assert spreads(record)["GPU 0"] == record["gpus"][0]["busy"]
    assert spreads(summarize([sample(1)]))["vram"] == [], "unknown is not 0"


def test_a_month_of_records_stays_below_100_mb(tmp_path: Path) -> None:
    """With the figures of a run with 12 readers and a GPU."""
    lines = JsonLines(tmp_path / "system.jsonl")
    readers = {pid: pid * 4097 * 1000 for pid in range(40_000, 40_012)}
    cores = {"cores_busy": 11.25, "trainer_cores": 1.25, "reader_cores": dict.fromkeys(map(str, readers), 0.98)}
    of = [
        memory_samples(1e9 + 60 * n, count=60, readers=readers, gpus=full().gpus, vram=full().vram) for n in range(20)
    ]
    for samples in of:
        lines.write("system", **summarize(samples), **cores)
    lines.close()
    path = tmp_path / "system.jsonl"
    assert len(read_records(path)) == len(of)
    assert path.stat().st_size / len(of) * MONTH_RECORDS < 100e6
