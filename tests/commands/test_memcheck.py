"""The command line of `vesuvius memcheck`: what goes together, what must be installed, the terminal, and plans."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.memcheck_runs import found_in, memcheck_command, run_memcheck, trainer
from tests.support.terminal import output_on_a_terminal
from vesuvius.commands import memcheck


def test_without_a_run_the_machine_and_its_active_runs_are_shown(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        found = found_in(run_memcheck("--json", cwd=tmp_path))
    assert found["what"] == "machine"
    assert found["parts"] == []
    assert found["machine"]["total_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert len(found["machine"]["core_total_s"]) >= 1
    assert found["remarks"] == ["runs in progress: tiny; try `vesuvius memcheck tiny`"]


def test_a_terminal_is_watched_until_ctrl_c_without_an_error(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        command = memcheck_command("tiny", "--watch", "0.1")
        code, text = output_on_a_terminal(command, tmp_path, interrupt_at=lambda shown: shown.count("run tiny") > 2)
    assert code == 0
    assert text.count("run tiny") > 2
    assert "\x1b[" in text
    assert "Traceback" not in text
    assert "interrupted" not in text


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_watch_ends_once_its_pipe_is_closed(tmp_path: Path, arguments: list[str]) -> None:
    with trainer(tmp_path / "runs/tiny"):
        command = memcheck_command("tiny", "--watch", "0.1", *arguments)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as watching:
            assert watching.stdout is not None
            assert watching.stderr is not None
            assert watching.stdout.readline()
            watching.stdout.close()
            assert watching.stderr.read() == b""
    assert watching.returncode == 0


def test_a_watch_may_sleep_for_ages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def sleep(seconds: float) -> None:
        assert 1e9 < seconds <= threading.TIMEOUT_MAX
        raise KeyboardInterrupt

    monkeypatch.setattr(memcheck.time, "sleep", sleep)
    assert memcheck.main(["--watch", "1e300", "--json"]) in (0, 10, 11), "the state of this machine"
    assert "Bug" not in capsys.readouterr().err


def test_another_package_of_that_name_does_not_hide_that_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "vesuvius").mkdir()
    (tmp_path / "vesuvius/__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(
        memcheck_command("--once", "--json"), env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert found_in(shown)["what"] == "machine"


@pytest.mark.parametrize(
    "arguments", [["a", "b"], ["--once", "--watch", "1"], ["--watch", "0"], ["--watch", "soon"], ["--post-mortem"]]
)
def test_conflicting_arguments_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        memcheck.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def only_psutil_and_rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages with psutil, rich and what it needs, and nothing else."""
    import markdown_it
    import mdurl
    import psutil
    import pygments
    import rich

    packages = tmp_path_factory.mktemp("packages")
    for package in (psutil, rich, markdown_it, mdurl, pygments):
        assert package.__file__ is not None
        (packages / package.__name__).symlink_to(Path(package.__file__).parent)
    return packages


def bare(only_psutil_and_rich: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As a Python sees it that has nothing but psutil and rich: no site-packages, this package not installed."""
    command = [sys.executable, "-S", *memcheck_command(*arguments)[1:]]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(only_psutil_and_rich)}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=60)


def test_it_works_with_only_psutil_and_rich_installed(only_psutil_and_rich: Path, tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        table = bare(only_psutil_and_rich, "tiny", cwd=tmp_path)
        machine = bare(only_psutil_and_rich, cwd=tmp_path)
    assert (table.returncode, table.stderr) == (0, "")
    assert "trainer" in table.stdout
    assert machine.returncode == 0


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, vesuvius.commands.memcheck; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True)
    assert not {"torch", "ray", "numpy", "pydantic", "zarr", "yaml", "rich"} & set(eval(done.stdout))
