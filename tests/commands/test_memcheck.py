"""The command line of `vesuvius memcheck`: what goes together, what must be installed, the terminal, and plans."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_terminal import output_on_a_terminal
from tests.support.memcheck_runs import MIB, found_in, memcheck_command, run_memcheck, trainer
from vesuvius.commands import memcheck


def test_without_a_run_the_machine_is_shown_and_the_runs_at_work(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        found = found_in(run_memcheck("--json", cwd=tmp_path))
    assert found["what"] == "machine"
    assert found["parts"] == []
    assert found["machine"]["total_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert len(found["machine"]["core_total_s"]) >= 1
    assert found["remarks"] == ["running below runs/: tiny; try `vesuvius memcheck tiny`"]


def test_a_terminal_is_watched_until_ctrl_c_which_is_no_error(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        command = memcheck_command("tiny", "--watch", "0.1")
        text = output_on_a_terminal(command, tmp_path, interrupt_at=lambda shown: shown.count("run tiny") > 2)
    assert text.count("run tiny") > 2
    assert "\x1b[" in text
    assert "Traceback" not in text
    assert "interrupted" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "b"],
        ["a", "--pid", "1"],
        ["--config", "x.yaml", "name"],
        ["--once", "--watch", "1"],
        ["--watch", "0"],
        ["--watch", "soon"],
        ["--post-mortem"],
    ],
)
def test_arguments_that_do_not_go_together_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        memcheck.main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


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


def test_it_works_where_only_psutil_and_rich_are_installed(only_psutil_and_rich: Path, tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        table = bare(only_psutil_and_rich, "tiny", cwd=tmp_path)
        machine = bare(only_psutil_and_rich, cwd=tmp_path)
    assert (table.returncode, table.stderr) == (0, "")
    assert "trainer" in table.stdout
    assert machine.returncode == 0


def test_what_a_config_needs_takes_the_projects_packages(only_psutil_and_rich: Path, tmp_path: Path) -> None:
    done = bare(only_psutil_and_rich, "--config", "x.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search("got no module '(yaml|pydantic)'; run `make install`", done.stderr)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, vesuvius.commands.memcheck; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True)
    assert not {"torch", "ray", "numpy", "pydantic", "zarr", "yaml", "rich"} & set(eval(done.stdout))


def test_a_plan_without_torch_is_refused_with_the_remedy(tiny_config: Any) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from vesuvius.commands import memcheck; sys.exit(memcheck.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--config", str(tiny_config())]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "needs the project's packages; got no module 'torch'; run `make install`" in done.stderr


def test_a_configs_need_is_shown_below_the_machines_state_and_one_beyond_the_limit_is_10(
    tiny_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", str(tiny_config()), "training.workers=2", "monitor.ram_limit_gib=0.1"]
    assert memcheck.main(command) == 10
    shown = capsys.readouterr()
    assert shown.out.index("machine ") < shown.out.index("0.60 GiB with the reserve") < shown.out.index("host RAM")
    assert "monitor.ram_limit_gib" in shown.err
    assert memcheck.main([*command, "--json"]) == 10
    found = json.loads(capsys.readouterr().out)
    assert found["what"] == "machine"
    assert {part["term"] for part in found["plan"]["parts"]} == {"readers", "store", "Ray", "trainer"}
    assert found["plan"]["total_bytes"] > 100 * MIB
    assert "monitor.ram_limit_gib" in found["plan"]["warnings"][0]


def test_the_usage_says_that_one_run_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memcheck.main(["--help"])
    assert "[RUN |" in capsys.readouterr().out
