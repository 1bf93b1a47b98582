"""TensorBoard's events, made again from the metrics of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from tests.conftest import REPOSITORY
from tests.support import fork_server
from vesuvius.runlog.listeners.tensorboard import TensorBoard
from vesuvius.runlog.records import JsonLines


def session(run: Path, first: int, last: int) -> None:
    """One session of a run that ends without a word, as a killed one does."""
    tensorboard = TensorBoard(run / "tb", run)
    metrics, system = JsonLines(run / "metrics.jsonl", [tensorboard.write]), JsonLines(run / "system.jsonl")
    metrics.write("run_start", step=first)
    for step in range(first + 1, last + 1):
        metrics.write("step", step=step, loss=1 / step, lr=None if step == 3 else 0.1)
        metrics.share(system.write("system", step=step, used_bytes=[step, step, step], cores_busy=1.5))
        if step % 2 == 0:
            weights = {name: {"loss": 1 / step, "bins": [0.1, 0.2]} for name in ("raw", "ema")}
            metrics.write("validation", step=step, weights=weights)
    metrics.write("event", event="nonfinite", step=last, samples=(0, last))
    metrics.write("preview", step=last, picture="samples/p.png", histogram_distance=0.5, spectrum_distance_db=None)
    metrics.close()
    system.close()
    tensorboard.close()


def make_run(run: Path) -> Path:
    (run / "samples").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(run / "samples/p.png")
    for first, last in ((0, 7), (4, 9)):
        session(run, first, last)
    return run


def rebuild(*arguments: Path) -> subprocess.CompletedProcess[str]:
    tool = REPOSITORY / "tools/tensorboard_from_metrics.py"
    return fork_server.run([sys.executable, tool, *arguments], capture_output=True, text=True, timeout=60)


def shown(directory: Path) -> dict[str, list[Any]]:
    """All that TensorBoard's pages are given, by tag; its reader makes tensors of scalars and pictures."""
    board = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    return {tag: board.Tensors(tag) for tag in board.Tags()["tensors"]}


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_they_are_what_the_run_had_written_killed_and_gone_on_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = content(run)
    done = rebuild(run)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rebuilt = shown(run / "tb_rebuilt")
    assert rebuilt == shown(run / "tb")
    assert [event.step for event in rebuilt["train/loss"]] == list(range(1, 10))
    assert [event.step for event in rebuilt["system/cores_busy"]] == [1, 5], "one a minute, and one a session"
    for tag in ("preview/picture", "events/nonfinite/text_summary"):
        assert [event.step for event in rebuilt[tag]] == [9], tag
    assert before.items() <= content(run).items(), "nothing of the run is changed"


def test_nothing_is_replaced_and_what_fails_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = content(run)
    for place, message in (
        ("tb", "the directory must be new; got"),
        ("metrics.jsonl/tb", "must be writable; got [Errno 20]"),
    ):
        done = rebuild(run, run / place)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr
    assert content(run) == before
    done = rebuild(tmp_path)
    assert done.returncode == 1
    assert f"a run has a metrics.jsonl; got [Errno 2] No such file or directory: '{tmp_path}" in done.stderr
