"""Every block of commands in the pages below runs, in order and in one folder, with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from vesuvius.config.describe import iter_keys

AFTER_THE_GUIDE = ["tuning", "sampling", "library", "synthetic-labels"]
BLOCK = re.compile(r"(?:^ *<!-- not run: (.*?) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", re.M | re.S)
FEW_STEPS = {
    "OMP_NUM_THREADS": "1",
    "VESUVIUS_TRAINING__STEPS_PER_EPOCH": "2",
    "VESUVIUS_TRAINING__EPOCHS": "1",
    "VESUVIUS_TRAINING__WARMUP_STEPS": "1",
    "VESUVIUS_TRAINING__VALIDATE_PATCHES": "2",
    "VESUVIUS_TRAINING__PREVIEW_EVERY": "0",
    "VESUVIUS_MODEL__CHANNELS": "[8,16]",
    "VESUVIUS_MODEL__FULL_RES_CHANNELS": "8",
    "VESUVIUS_DIFFUSION__SAMPLER_STEPS": "1",
}
# Of an option that is given twice the last one counts.
FEWER = f"""#!/bin/bash
case "$1" in
sample)
    few="--steps 1"
    [[ "$*" =~ --(shape|condition|inpaint) ]] && few+=" --overlap 0 --workers 1"
    [[ "$*" =~ --shape ]] && few+=" --shape 32,96,96" ;;
evaluate) few="--count 16 --steps 1 --classifier-steps 2" ;;
tune) few="--budget 60s" ;;
bench) few="--rounds 1 --seconds 1" ;;
profile) few="--steps 5" ;;
esac
exec {sys.executable} -m vesuvius "$@" $few
"""


class Block(NamedTuple):
    reason: str
    """Why it is not run; empty: it is."""
    indent: str
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((REPOSITORY / f"docs/{page}.md").read_text())]


def run(block: Block, folder: Path) -> None:
    """Run a block of commands, or write the files that a block of YAML names in comments."""
    if block.reason or block.language in ("text", ""):
        return
    if block.language == "yaml":
        for name, text in re.findall(r"^# (\S+\.yaml)$\n(.*?)(?=^# \S+\.yaml$|\Z)", block.text, re.M | re.S):
            (folder / name).write_text(text)
        return
    program = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | FEW_STEPS | {"PATH": path}
    done = subprocess.run([*program, block.text], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", ["guide", *AFTER_THE_GUIDE])
def test_every_block_says_whether_it_is_code_or_output(page: str) -> None:
    blocks = blocks_of(page)
    assert len(blocks) == len(re.findall(r"^ *```\w*$", (REPOSITORY / f"docs/{page}.md").read_text(), re.M)) / 2
    assert {block.language for block in blocks} <= {"bash", "python", "yaml", "text"}


def test_the_config_keys_in_pages_exist_and_their_shell_scripts_can_be_parsed() -> None:
    keys = {name for name, _ in iter_keys()}
    known = keys | {name.rpartition(".")[0] for name in keys}
    sections = "|".join({name.partition(".")[0] for name in keys if "." in name})
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        text = page.read_text()
        named = set(re.findall(rf"`((?:{sections})\.(?!py|safetensors|augment.turn`)[a-z_.]+)(?:=|`|: )", text))
        assert named <= known, page.name
        for block in map(Block._make, BLOCK.findall(text)):
            if block.language == "bash":
                subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def test_links_between_files_exist_in_the_checkout_too() -> None:
    """`make docs` checks them on the site, on which docs/ is the root."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for page in map(REPOSITORY.joinpath, listed.stdout.split()):
        for link in re.findall(
            r"\]\((?!https?:|mailto:|#)([^)#\s]+)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        ):
            assert (page.parent / link).exists(), f"{page.relative_to(REPOSITORY)}: {link}"


@pytest.fixture(scope="module")
def after_the_guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after all commands of the user guide, from the first to the last."""
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed, which [dev] brings")
    folder = tmp_path_factory.mktemp("pages")
    (folder / "bin").mkdir()
    (folder / "bin/vesuvius").write_text(FEWER)
    (folder / "bin/vesuvius").chmod(0o755)
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    (folder / "slices").mkdir()
    for z in range(8):
        tifffile.imwrite(folder / f"slices/{z}.tif", np.full((32, 32), z, np.uint8))
    for block in blocks_of("guide"):
        run(block, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", AFTER_THE_GUIDE)
def test_every_command_of_a_page_runs_after_the_guide(page: str, after_the_guide: Path) -> None:
    for block in blocks_of(page):
        run(block, after_the_guide)


@pytest.mark.long
def test_the_notebook_runs_from_a_volume_to_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = (
        pytest.importorskip(name, reason=f"{name} is not installed, which [dev] brings")
        for name in ("nbformat", "nbclient")
    )
    notebook = nbformat.read(REPOSITORY / "examples/first_volume.ipynb", as_version=4)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": tmp_path}}).execute()
    assert any("image/png" in output.get("data", {}) for output in notebook.cells[-1].outputs)
