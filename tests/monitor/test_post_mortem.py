"""Post-mortems: causes from evidence, text and record, a real kernel kill, and a killed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.memory_samples import memory_samples
from tests.support.real_cgroup import memory_cgroup_or_skip
from tests.support.system_trees import write_machine, write_process, write_v2
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.post_mortem import (
    Cause,
    Death,
    KillCounts,
    append_death,
    classify_death,
    death_lines,
    deaths_of,
    examine_reader,
    examine_run,
    headline,
    read_counts_of,
    read_deaths,
    record_run_death,
    remedy_of,
)
from vesuvius.monitor.samples import MemorySample, RecentFile
from vesuvius.monitor.session import SessionRecord, begin_session
from vesuvius.runlog.files import boot_id
from vesuvius.runlog.run_dir import RunDir
from vesuvius.runlog.units import GIB, format_time

LIMIT_BYTES = 48 * 2**20


def session_record(**fields: object) -> SessionRecord:
    """A session on this machine whose process is gone."""
    record = SessionRecord(
        name="tiny",
        host=os.uname().nodename,
        boot_id=boot_id(),
        pid=2**22 + 1,  # above the highest possible pid
        started_s=time.clock_gettime(time.CLOCK_BOOTTIME),  # later than the first process of a container
        begin_time=time.time() - 3600,
        workers=4,
        limits=MemoryPolicy(ray_share=0.95),
        cgroup_oom_kills=0,
        machine_oom_kills=0,
        pid_namespace=os.readlink("/proc/self/ns/pid"),
    )
    return replace(record, **fields)  # type: ignore[arg-type]


FULL, ROOMY = (memory_samples(0.0, count=1, in_use=size * GIB)[0] for size in (15, 1))
KILL_LINE = (
    "Memory cgroup out of memory: Killed process 11 (python3) total-vm:75160kB, anon-rss:65280kB, "
    "file-rss:6576kB, shmem-rss:0kB, UID:0 pgtables:192kB oom_score_adj:0"
)


def example(cause: Cause = "kernel", **fields: object) -> Death:
    last = tuple(memory_samples(1e9)[-60:])
    death = Death(1e9 + 2, "worker", 11, 144, cause, (KILL_LINE, "the limit was that of cgroup /job"), last, "fewer")
    return replace(death, **fields)  # type: ignore[arg-type]


def test_deaths_are_read_back_and_torn_records_skipped(tmp_path: Path) -> None:
    path = tmp_path / "post_mortem.jsonl"
    assert read_deaths(path) == []
    first, second = example(), example("signal", victim="run", moments=())
    append_death(path, first)
    with path.open("a") as file:
        file.write('{"kind": "death", "victim": "worker", "cau')
    append_death(path, second)
    assert read_deaths(path) == [first, second]


def test_the_text_names_victim_cause_evidence_memory_and_remedy() -> None:
    lines = death_lines(example())
    text = "\n".join(lines)
    assert lines[0].startswith("worker 11 was killed: out of memory")
    assert "anon-rss:65280kB" in text
    assert "what to change: fewer" in text
    rows = [line.split() for line in lines if line.rstrip().endswith("%")]
    assert [int(row[0]) for row in rows] == [-50, -40, -30, -20, -10, 0]
    end = 2 * GIB + 89 * 50 * 10**6
    assert rows[-1][1:4] == [f"{(end + 6 * GIB) / GIB:.2f}", "4.00", f"{end / GIB:.2f}"]
    assert rows[-1][6] == f"{100 * (end + 7 * GIB) / (16 * GIB):.1f}"


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_grep_for_kills_finds_each_kill(cause: Cause) -> None:
    assert any(word in headline(example(cause)).lower() for word in ("killed", "oom", "out of memory"))


def test_remedies_name_overrides_that_exist() -> None:
    text = remedy_of("ray", "run", 4, FULL, 0.95)
    assert "--resume training.workers=3 training.prefetch_factor=1" in text
    assert "95 %" in text
    assert "training.workers" not in remedy_of("kernel", "run", 0, None, None)
    assert "--resume" in remedy_of("signal", "run", 2, ROOMY, None)
    assert "training.workers=1" in remedy_of("signal", "run", 2, FULL, None), "something else watches memory"
    assert "continues" in remedy_of("signal", "worker", 2, None, None)


@pytest.mark.parametrize(
    ("rise", "share", "counted_s", "cause", "says"),
    [
        (KillCounts(cgroup=1), None, 0, "kernel", "most likely this one"),
        (KillCounts(cgroup=1), 0.95, 0, "kernel", "nearly full, most likely this one"),
        (KillCounts(cgroup=0, machine=2), 0.95, 0, "signal", "OOM-killed no process of this cgroup"),
        (KillCounts(machine=0), 0.95, 0, "signal", "OOM-killed no process of this machine"),
        (KillCounts(machine=2), 0.95, 0, "kernel", "nearly full"),
        (KillCounts(machine=2), 0.1, 0, "unknown", "which ones is unknown"),
        (KillCounts(), None, 0, "unknown", "cannot be read"),
        # A run ended by a scheduler and examined days later: something else in its cgroup was killed since.
        (KillCounts(cgroup=2), 0.1, 2 * 24 * 3600, "unknown", "which ones is unknown"),
        (KillCounts(cgroup=2), 0.1, 30, "kernel", "most likely this one"),  # it took all that was left at once
        (KillCounts(cgroup=2), 0.95, 2 * 24 * 3600, "kernel", "nearly full"),
    ],
)
def test_the_cause_follows_from_the_kernel_s_kill_counts(
    rise: KillCounts, share: float | None, counted_s: float, cause: Cause, says: str
) -> None:
    found, evidence = classify_death(rise, share, "the last sample", counted_s)
    assert found == cause
    assert says in " ".join(evidence)


def test_a_falling_count_or_one_of_another_cgroup_is_not_compared() -> None:
    for before, now, expected in ((3, 5, 2), (3, 3, 0), (None, 5, None), (3, None, None), (5, 3, None)):
        assert KillCounts(now, now).since(KillCounts(before, before)) == KillCounts(expected, expected)
    for path, cgroup in (("/job", 2), ("", 2), ("/other", None)):
        assert KillCounts(5, 9, path).since(KillCounts(3, 4, "/job")) == KillCounts(cgroup, 5)


class TestReader:
    @property
    def end(self) -> dict[str, Any]:
        """The current time, not that of the import."""
        return {
            "pid": 11, "node": "", "exit_type": "SYSTEM_ERROR", "exit_detail": "Worker unexpectedly exits",
            "exit_time": time.time(), "signal": None, "volume": None,
        }  # fmt: skip

    def examine(self, **known: object) -> Death:
        return examine_reader(self.end | known, 144, session_record(), memory_samples(time.time()))

    def test_ray_s_memory_monitor_reports_its_kills(self) -> None:
        death = self.examine(
            exit_type="NODE_OUT_OF_MEMORY", exit_detail="Memory usage 22.83 GiB exceeded", exit_time=None
        )
        assert death.cause == "ray"
        assert death.evidence[0] == "Ray: NODE_OUT_OF_MEMORY: Memory usage 22.83 GiB exceeded"
        assert "the worker itself used" in " ".join(death.evidence)
        assert "training.workers=3" in death.remedy
        assert 55 <= len(death.moments) <= 62

    def test_a_kill_counted_while_the_new_reader_started_is_included(self) -> None:
        """Samples after the death already have the new count."""
        counts, died = read_counts_of(os.getpid()), time.time() - 5
        if counts.cgroup is None:
            pytest.skip("needs a cgroup whose OOM kills the kernel counts")
        samples = [
            replace(m, cgroup_oom_kills=counts.cgroup - (m.time < died - 0.5), machine_oom_kills=counts.machine)
            for m in memory_samples(time.time())
        ]
        death = examine_reader(self.end | {"exit_time": died}, 144, session_record(), samples)
        assert death.cause == "kernel"
        assert "most likely this one" in death.evidence[0]
        assert max(moment.time for moment in death.moments) <= died

    def test_the_count_of_the_reader_s_cgroup_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The trainer's count says nothing about readers of a shared Ray."""
        counts = {12: KillCounts(7, 9, "/ray"), os.getpid(): KillCounts(3, 9, "/job")}
        monkeypatch.setattr("vesuvius.monitor.post_mortem.read_counts_of", counts.__getitem__)
        samples = [
            replace(m, readers={11: 2**20}, cgroup_oom_kills=3, machine_oom_kills=8)
            for m in memory_samples(time.time())
        ]
        job = session_record(cgroup="/job")
        assert examine_reader(self.end, 144, job, samples, [12]).cause == "unknown"
        death = examine_reader(self.end, 144, job, samples)
        assert death.cause == "signal", "by the trainer's own count"
        assert "Ray: SYSTEM_ERROR: Worker unexpectedly exits" in death.evidence

    def test_the_kernel_of_another_machine_is_not_queried(self) -> None:
        death = self.examine(node="elsewhere")
        assert death.cause == "unknown"
        assert "elsewhere" in " ".join(death.evidence)


def write_run(directory: Path, record: SessionRecord, samples: list[MemorySample]) -> Path:
    """Write the run directory of a killed session."""
    directory.mkdir()
    (directory / "session.json").write_text(json.dumps(asdict(record)))
    recent = RecentFile(directory / "recent.jsonl")
    for moment in samples:
        recent.write(moment)
    recent.close()
    return directory


def test_ended_living_and_remote_sessions_are_no_deaths(tmp_path: Path) -> None:
    assert examine_run(tmp_path) is None
    ended = session_record(end_time=time.time(), exit_code=0)
    assert examine_run(write_run(tmp_path / "ended", ended, [])) is None
    alive = tmp_path / "alive"
    alive.mkdir()
    begin_session(alive / "session.json", "alive", 0, MemoryPolicy())
    assert examine_run(alive) is None
    elsewhere = session_record(host="elsewhere", boot_id="other")
    run = write_run(tmp_path / "elsewhere", elsewhere, [])
    assert examine_run(run) is None
    assert read_deaths(run / "post_mortem.jsonl") == []


def test_the_lock_holder_knows_that_a_remote_session_is_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", session_record(host="elsewhere", boot_id="other"), memory_samples(time.time()))
    death = record_run_death(run)
    assert death is not None
    assert death.cause == "unknown"
    assert "another machine" in death.evidence[0]


def test_the_advice_starts_from_the_last_number_of_readers(tmp_path: Path) -> None:
    full = memory_samples(time.time(), workers=2, in_use=16 * GIB)  # the guard has stopped four
    death = examine_run(write_run(tmp_path / "run", session_record(workers=6), full))
    assert death is not None
    assert "training.workers=1" in death.remedy


def restarted_container(tmp_path: Path, session: SessionRecord, kills: int | None) -> None:
    """A restarted container: a cgroup with the same path whose count begins at 0."""
    roots = write_v2(tmp_path / "system", limit=16 * GIB, oom_kills=0)
    write_machine(roots, total=64 * GIB, available=40 * GIB, oom_kills=kills)
    write_process(roots, 1, parent=0, started_s=session.started_s + 100)
    own = write_process(roots, os.getpid(), parent=1, started_s=session.started_s + 100)
    (own / "cgroup").write_text("0::/\n")
    boot = roots.proc / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(session.boot_id)
    (roots.proc / "self/ns").mkdir()
    (roots.proc / "self/ns/pid").symlink_to(session.pid_namespace)


@pytest.mark.parametrize("kills", [8, None])
@pytest.mark.parametrize("namespace", ["pid:[4026532001]", "pid:[4026532002]"], ids=["reused", "new"])
def test_a_restarted_container_recognises_an_out_of_memory_kill(
    tmp_path: Path, kills: int | None, namespace: str
) -> None:
    session = session_record(cgroup="/", pid_namespace=namespace)
    full = memory_samples(time.time(), cgroup_oom_kills=0, in_use=int(15.9 * GIB))
    run = write_run(tmp_path / "run", session, full)
    restarted_container(tmp_path, replace(session, pid_namespace="pid:[4026532001]"), kills)
    death = record_run_death(run)
    assert death is not None
    assert death.cause == ("kernel" if kills else "unknown"), "the host's count went from 7 to 8"
    assert "training.workers=3" in death.remedy


def test_a_death_is_dated_by_the_last_sign_of_life(tmp_path: Path) -> None:
    end = time.time() - 100
    run = write_run(tmp_path / "run", session_record(), memory_samples(end))
    records = [
        {"kind": "step", "time": end - 30, "step": 139},
        {"kind": "event", "time": end - 12, "event": "worker_died", "step": 140, "text": "worker 9 was killed"},
        {"kind": "step", "time": end - 1, "step": 145},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "st')
    logged = {
        -90: "WARNING before",
        -8: "ERROR the head is gone",
        -2: "INFO Train step 145",
        30: "ERROR of the next session",
    }
    (run / "logs").mkdir()
    RunDir(run).log.write_text("".join(f"{format_time(end + s)} {text}\n" for s, text in logged.items()))
    death = examine_run(run)
    assert death is not None
    assert (death.victim, death.pid, death.step) == ("run", 2**22 + 1, 145)
    assert "12 s before: worker 9 was killed" in death.evidence
    assert [line for line in death.evidence if "warning" in line] == [
        f"the log's last warning: {format_time(end - 8)} ERROR the head is gone"
    ]
    assert 55 <= len(death.moments) <= 62
    assert death.moments[-1].time == end


DYING = """
import os, sys, time
from pathlib import Path
from vesuvius.monitor.post_mortem import read_counts_of
from vesuvius.monitor.samples import MemorySample, RecentFile
from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy
from vesuvius.monitor.session import begin_session

run = Path(sys.argv[1])
begin_session(run / "session.json", "dying", 0, MemoryPolicy())
recent, kept = RecentFile(run / "recent.jsonl"), []
while True:
    counts = read_counts_of(os.getpid())
    size = len(kept) * 2**20
    limit = MemoryLimit("memory.limit_in_bytes of cgroup /x", size, 48 * 2**20, 48 * 2**20)
    recent.write(MemorySample(time.time(), len(kept), size, 0, size, limits=(limit,),
                              cgroup_oom_kills=counts.cgroup, machine_oom_kills=counts.machine))
    kept.append(b"x" * 2**20)
"""

EXAMINE = """
import sys
from pathlib import Path
from vesuvius.monitor.post_mortem import examine_run

death = examine_run(Path(sys.argv[1]))
print(death.cause, "|", *death.evidence, death.remedy)
"""


def in_cgroup(cgroup: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$0" "$@"'
    command = ["sh", "-c", enter, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_a_real_kernel_kill_is_recognized_by_the_cgroup_s_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with memory_cgroup_or_skip(LIMIT_BYTES) as cgroup:
        assert in_cgroup(cgroup, DYING, run).returncode == -9
        by_count = in_cgroup(cgroup, EXAMINE, run)  # from the same container
    assert by_count.returncode == 0, by_count.stderr
    assert by_count.stdout.startswith("kernel | the kernel OOM-killed 1 process of this cgroup")
    assert "training.train_batch_size" in by_count.stdout, "there are no readers to do without"
    # From another cgroup, it could have been any process.
    elsewhere = examine_run(run)
    assert elsewhere is not None
    assert elsewhere.cause in ("kernel", "unknown")
    assert elsewhere.step > 10


def test_a_run_killed_from_outside_is_examined_once(tmp_path: Path) -> None:
    counts = read_counts_of(os.getpid())
    kept = memory_samples(time.time(), cgroup_oom_kills=counts.cgroup, machine_oom_kills=counts.machine)
    record = session_record()
    run = write_run(tmp_path / "run", record, kept)
    death = examine_run(run)
    assert death is not None
    assert death.cause == ("unknown" if counts.cgroup is None and counts.machine is None else "signal")
    assert "--resume" in death.remedy
    assert not (run / "post_mortem.jsonl").exists(), "to examine is to read"
    before = write_run(tmp_path / "before", replace(record, boot_id="0-0-0"), kept)
    assert examine_run(before) is None, "of this machine before a restart or of another one, where it may be alive"
    restarted = examine_run(before, locked=True)
    assert restarted is not None
    assert restarted.cause == "unknown"
    assert "on this one before a restart" in restarted.evidence[0]
    # As if one more kill had been counted since the last sample.
    last = replace(kept[-1], cgroup_oom_kills=-1)
    counted = examine_run(write_run(tmp_path / "counted", record, [last]))
    assert counted is not None
    assert counted.cause == ("unknown" if counts.cgroup is None else "kernel")
    assert [known.victim for known in deaths_of(run)] == ["run"], "not yet written down"
    first, second = record_run_death(run), record_run_death(run)
    assert first == second
    assert read_deaths(run / "post_mortem.jsonl") == deaths_of(run) == [first]
