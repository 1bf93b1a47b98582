"""`--help` of each command; a wrong option; output that cannot be written."""

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


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_help_ends_with_examples_that_use_existing_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command.split(), "--help"])
    text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    options, used = (set(re.findall(r"(--[a-z][a-z0-9-]*)", part)) for part in (text, examples))
    assert used <= options
    assert {shlex.split(line)[1] for line in examples.splitlines()} == {command.split()[0]}


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "--config", "x.yaml", "--replya", "3"])
    assert capsys.readouterr().err == (
        "vesuvius train: error: unrecognized arguments: --replya; see `vesuvius train --help`\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], []])
def test_help_that_cannot_be_written_is_an_error(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "import sys, vesuvius.commands.cli as c; sys.exit(c.main())", *arguments]
        done = fork_server.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == EXIT_DATA
    assert "Cannot write the output: [Errno 28] No space left on device; free some space" in done.stderr
