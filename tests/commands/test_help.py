"""`--help` of each command fits on a screen and ends with examples; `--help-all` has every option."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.support import fork_server
from vesuvius.commands.cli import COMMANDS, main
from vesuvius.errors import EXIT_DATA

SUBCOMMANDS = [f"volume {name}" for name in ("synth", "info", "copy", "import", "occupancy", "verify")]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(list(arguments))
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_help_is_at_most_25_lines_with_examples_that_use_existing_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, full = (printed(capsys, *command.split(), flag) for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 25
    options, examples = (set(re.findall(r"(--[a-z][a-z0-9-]*)", part)) for part in full.split("\nexamples:\n"))
    assert examples <= options
    assert set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", short, re.MULTILINE)) <= options
    lines = short.split("\nexamples:\n")[1].splitlines()
    assert lines
    assert all(shlex.split(line)[1] == command.split()[0] for line in lines)


def test_help_hides_the_options_that_only_help_all_shows(capsys: pytest.CaptureFixture[str]) -> None:
    short, full = (printed(capsys, "sample", flag) for flag in ("--help", "--help-all"))
    assert "--count" in short
    assert "--help-all" in short
    assert "--batch-size" not in short
    assert "--batch-size" in full
    assert "--help-all" not in printed(capsys, "report", "--help"), "nothing is hidden"


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "--config", "x.yaml", "--replya", "3"])
    assert capsys.readouterr().err == (
        "vesuvius train: error: unrecognized arguments: --replya; see `vesuvius train --help`\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["sample", "--help-all"], []])
def test_help_that_cannot_be_written_is_an_error(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [
            sys.executable,
            "-c",
            "import sys, vesuvius.commands.cli as c; sys.exit(c.main())",
            *arguments,
        ]
        done = fork_server.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == EXIT_DATA
    assert "Cannot write the output: [Errno 28] No space left on device; free some space" in done.stderr
