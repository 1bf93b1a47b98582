"""The command: real trainers, a cell that fails, Ctrl-C and a resume; loaders and ranks with `make test-long`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from obstore.store import GCSStore, HTTPStore, S3Store

from tests.support.tiny import tiny_sections
from vesuvius.benchmark.cells import command as command_cells
from vesuvius.benchmark.cells.loader import setup_of
from vesuvius.benchmark.cells.peers import store_of
from vesuvius.benchmark.cells.training import Bounds, Lab, measure_training
from vesuvius.benchmark.grid import Cell
from vesuvius.benchmark.ledger import Measurement
from vesuvius.benchmark.session import BenchRequest, _write, memory_over_time
from vesuvius.commands import bench as command
from vesuvius.config.load import parse_stored, read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from vesuvius.monitor.recent import MemorySample, RecentFile
from vesuvius.monitor.session import read_session
from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.runlog.run_dir import run_dir
from vesuvius.runlog.units import GIB

WriteConfig = Callable[..., Path]
_HANG_S = 120.0


@pytest.fixture
def config(tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tiny_config(training={"accumulate_steps": 1})
    monkeypatch.chdir(path.parent)
    monkeypatch.delenv("VESUVIUS_RUNS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


def folder_of(run: Path = Path("runs/tiny")) -> Path:
    (folder,) = [path for path in (run / "benches").iterdir() if path.is_dir()]
    return folder


def results_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "benchmark_results.json").read_text())["results"]
    return found


def interrupt_when_it_trains() -> threading.Thread:
    def body() -> None:
        give_up = time.monotonic() + _HANG_S
        while time.monotonic() < give_up:
            for metrics in Path("runs/tiny/benches").glob("*/cells/*/metrics.jsonl"):
                if any(record["kind"] == "step" for record in read_records(metrics)):
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_a_real_bench_with_a_cell_that_fails_interrupted_and_resumed(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = ["--compare", "training.accumulate_steps=1,2", "--compare", "data.patch_size=[8,16,16],[160,16,16]"]
    asked = ["--config", str(config), *axes, "--rounds", "1", "--seconds", "0.2"]

    def bench(*more: str) -> int:
        monkeypatch.setenv("VESUVIUS_TRAINING__ACCUMULATE_STEPS", "3")  # of the config, not of a cell
        return command.main([*asked, *more])

    thread = interrupt_when_it_trains()
    assert bench("--seconds", "1000") == EXIT_INTERRUPTED
    thread.join()
    folder = folder_of()
    session = read_session(next(folder.glob("cells/*/session.json")))
    assert session is not None
    assert not psutil.pid_exists(session.pid), "no orphan"
    assert not (folder / "bench.md").exists()
    assert bench("--resume") == EXIT_CONFIG, "of other seconds"
    ledger = folder / "ledger.json"
    ledger.write_text(ledger.read_text().replace('"seconds": 1000.0', '"seconds": 0.2'))
    assert bench("--resume") == EXIT_OK

    base, longer, failed = results_in(folder)
    assert [each["samples_s"]["count"] for each in (base, longer)] == [1, 1]
    assert base["figures"]["batch"] * 2 == longer["figures"]["batch"] == 4
    assert longer["speed"]["low"] <= longer["speed"]["mid"] <= longer["speed"]["high"]
    assert failed["samples_s"] is None
    assert "failed: " in failed["cause"]
    assert "160" in failed["cause"]
    for name in ("gpu_benchmark_comparison.png", "performance_summary_table.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    text = (folder / "bench.md").read_text()
    assert text.rstrip() in capsys.readouterr().out
    assert "## Failed" in text
    assert (folder / "bench.html").stat().st_size < 200_000
    assert not list(folder.glob("cells/*/checkpoints"))
    assert not run_dir(read_config(config)).exists(), "the run itself can still begin"


def measured(config: Path, tmp_path: Path, limit_s: float = _HANG_S, *overrides: str) -> Measurement:
    lab = Lab(tmp_path / "cells", Bounds(0.2, limit_s), None)
    return measure_training(lab, read_config(config, overrides), 1, Measurement(0, 0, "ok"))


def test_what_does_not_fit_into_memory_is_not_started(config: Path, tmp_path: Path) -> None:
    found = measured(config, tmp_path, _HANG_S, "monitor.ram_limit_gib=0.1")
    assert found.ended == "failed"
    assert "not started: it needs about" in found.cause
    assert not (tmp_path / "cells").exists()


def test_a_cell_that_takes_too_long_is_killed(config: Path, tmp_path: Path) -> None:
    found = measured(config, tmp_path, 0.0)
    assert found.ended == "timeout"
    assert "no result within" in found.cause
    session = read_session(tmp_path / "cells" / found.run / "session.json")
    assert session is None or not psutil.pid_exists(session.pid)


def test_a_trainer_whose_bench_is_killed_ends_at_the_limit(config: Path, tmp_path: Path) -> None:
    measured(config, tmp_path, 36.0)
    assert read_config(next((tmp_path / "cells").glob("*.yaml"))).training.max_hours == pytest.approx(0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--compare", "training.amp=off,b16"],
        ["--sweep", "training.workers"],
        ["--resume"],
        ["--loader", "--peer", "no command"],
    ],
)
def test_a_mistake_is_told_before_anything_runs(config: Path, wrong: list[str]) -> None:
    assert command.main(["--config", str(config), *wrong]) == EXIT_CONFIG
    assert not list(Path("runs").glob("tiny/benches/*/ledger.json"))


def test_a_bench_of_an_earlier_version_is_not_gone_on_with(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = Path("runs/tiny/benches/20260101_000000/ledger.jsonl")
    old.parent.mkdir(parents=True)
    old.touch()
    assert command.main(["--config", str(config), "--rounds", "1", "--resume"]) == EXIT_CONFIG
    assert "drop --resume" in capsys.readouterr().err


def test_a_peer_is_any_command_that_writes_figures_whatever_it_prints(config: Path) -> None:
    """Of one that writes none its last words are the cause; the others fail here, as there is no such volume."""
    peer = f"{sys.executable} -c"
    said = (
        "import atexit, json, sys, warnings; print(sys.argv[1:]); path = sys.argv[-1].split(chr(61), 1)[1]; "
        "json.dump(dict(samples_s=5.0, load_s=2), open(path, chr(119))); print(chr(123)); "
        "atexit.register(warnings.warn, chr(10) + chr(123))"
    )
    peers = [
        "none=no/such/program",
        f'mine={peer} "{said}"',
        f"""broken={peer} "raise SystemExit('no such package')" """,
        f"""silent={peer} "import warnings; print('nothing found'); warnings.warn('resource_tracker: leaked')" """,
        f"""prints={peer} "print('{{}}')" """.replace("{}", '{\\"samples_s\\": 5}'),
    ]
    asked = ["--config", str(config), "--loader", "--rounds", "1", "--seconds", "0.1", "data.volumes[0].path=nowhere"]
    assert command.main([*asked, *(f"--peer={each}" for each in peers)]) == EXIT_OK
    found = {each["label"]: each for each in results_in(folder_of())}
    assert found["mine"]["samples_s"]["mid"] == 5.0
    assert found["mine"]["figures"] == {"load_s": 2}
    assert found["broken"]["cause"] == "failed: no such package (exit code 1)"
    assert re.fullmatch(
        r"failed: no samples_s in \S+\.result\.json; nothing found \(exit code 0\)", found["silent"]["cause"]
    )
    assert "no samples_s" in found["prints"]["cause"]
    assert found["none"]["cause"] == "failed: there is no program no/such/program"
    assert "nowhere" in found["vesuvius"]["cause"]
    (log,) = [path for path in folder_of().glob("cells/*.log") if "--patch" in path.read_text()]
    assert "--patch=8,16,16', '--batch=2', '--workers=0', '--seconds=0.1'" in log.read_text()


def test_a_loader_that_is_not_installed_is_left_out_with_a_note(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row that failed, behind which the reader looks for a defect."""
    monkeypatch.setattr(command_cells, "PEERS", {"zarr-python": "zarr", "odd": "no_such_package"})
    cells, left_out = command_cells.loader_cells([Cell("baseline")], ["mine=true"])
    assert [cell.loader for cell in cells] == ["torch DataLoader + zarr-python", "vesuvius", "mine"]
    assert left_out == ("odd",)


@pytest.mark.parametrize(
    ("address", "anonymous", "kind", "unsigned"),
    [
        ("s3://scrolls/a.zarr", True, S3Store, True),
        ("s3://scrolls/a.zarr", False, S3Store, False),
        ("gs://scrolls/a.zarr", True, GCSStore, True),
        ("https://example.org/a.zarr", None, HTTPStore, False),
    ],
)
def test_peers_open_what_the_data_path_opens(address: str, anonymous: bool | None, kind: type, unsigned: bool) -> None:
    sections = tiny_sections("tiny", Path("x"))
    sections["data"] |= {"volumes": [{"path": address}], "store": {"anonymous": anonymous}}
    store = store_of(setup_of(parse_stored(sections), 1.0)).store
    assert isinstance(store, kind)
    assert ("skip_signature" in getattr(store, "config", {})) == unsigned


@pytest.mark.long
def test_the_loaders_that_are_installed(config: Path) -> None:
    asked = ["--config", str(config), "--loader", "--rounds", "1", "--seconds", "0.3"]
    assert command.main([*asked, "--sweep", "training.workers=0,1"]) == EXIT_OK
    found = results_in(folder_of())
    assert len(found) == 8
    assert [each["cause"] for each in found] == [""] * 8
    ours = [each for each in found if each["label"].startswith("vesuvius")]
    assert all(0 <= each["figures"]["wait_share"] < 1 for each in ours)


@pytest.mark.long
def test_ranks_are_measured_with_their_exchange_and_memory(config: Path) -> None:
    asked = ["--config", str(config), "--ranks", "1,2,64", "--rounds", "1", "--seconds", "0.3"]
    assert command.main(asked) == EXIT_OK
    one, two, many = results_in(folder_of())
    assert one["efficiency"] == 1
    assert two["figures"]["batch"] == 2 * one["figures"]["batch"]
    assert two["figures"]["comm_s"] > 0
    assert two["efficiency"] == pytest.approx(two["speed"]["mid"] / 2)
    assert many["cause"]
    assert "rank 1 of 2" in (folder_of() / "bench.html").read_text()


def test_memory_comes_from_records_or_else_from_samples_and_is_called_unknown_without_both(
    config: Path, tmp_path: Path
) -> None:
    """A rank that is ended before its first record of the system would be missing without a word."""
    main, folder = tmp_path / "bench/cells/001", tmp_path / "bench"
    for part in (main, main / "ranks/1"):
        part.mkdir(parents=True)
        recent = RecentFile(part / "recent.jsonl")
        recent.write(MemorySample(100.0, 0, used_bytes=9, shared_bytes=0, trainer_bytes=2 * GIB))
        recent.write(MemorySample(101.0, 1, used_bytes=9, shared_bytes=0, trainer_bytes=3 * GIB))
        recent.close()
    system = JsonLines(main / "system.jsonl")
    system.write("system", step=1, vram=None, trainer_bytes=[1, 2, 3])
    system.close()
    assert memory_over_time(main) == ([0.0], [3.0])
    assert memory_over_time(main / "ranks/1") == ([0.0, 1.0], [2 * GIB, 3 * GIB])
    cells = [Cell(f"training.ranks={ranks}", (f"training.ranks={ranks}",)) for ranks in (1, 3)]
    done = [Measurement(cell, 0, "ok", run="001", samples_s=5.0) for cell in (0, 1)]
    request = BenchRequest(config, (), tuple(cells), 1, Bounds(0.2, _HANG_S))
    assert _write(request, read_config(config), folder, SimpleNamespace(measurements=done)) == EXIT_OK
    assert "| memory not known | rank 2 of 3: " in (folder / "bench.md").read_text()


def test_nothing_measured_is_an_error(config: Path) -> None:
    asked = ["--config", str(config), "data.volumes[0].path=nowhere", "--rounds", "1"]
    assert command.main(asked) == EXIT_ERROR
