"""The base install: what its packages suffice for, and the line to type for all else."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import textured, write_array
from vesuvius.doctor import Finding
from vesuvius.errors import _EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRACKERS = {"wandb", "mlflow"}  # extras of their own, which `monitor.trackers` names


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that an install of these brings."""
    found, left = set[str](), [Requirement(line) for line in requirements]
    while left:
        one = left.pop()
        if (name := name_of(one.name)) in found:
            continue
        found.add(name)
        try:
            needed = map(Requirement, importlib.metadata.requires(one.name) or ())
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        left += [need for need in needed if need.marker is None or _applies(need, one.extras)]
    return found


def _applies(need: Requirement, extras: set[str]) -> bool:
    assert need.marker is not None
    return any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))


MODULES = {
    module: {name_of(name) for name in names} for module, names in importlib.metadata.packages_distributions().items()
}
BASE = closure(PROJECT["dependencies"])


def names_base(modules: Iterable[str]) -> bool:
    """Whether all are of the base install, the standard library or ours."""
    ours = {"vesuvius", "vesuvius_diffusion", *sys.stdlib_module_names}
    return all(module in ours or MODULES.get(module, set()) & BASE for module in modules)


def test_every_module_outside_the_base_install_is_named_with_its_extra() -> None:
    """A module that is not would end a command with a traceback instead of the line to type."""
    imported = set[str]()
    for text in (file.read_text() for file in (ROOT / "src").rglob("*.py")):
        if names_base(re.findall(r"^ *(?:import|from) +(\w+)", text, re.MULTILINE)):
            continue  # a tree of each file takes a second
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    outside = {module for module in imported - TRACKERS if not names_base([module])}
    assert outside <= {module for modules in _EXTRAS.values() for module in modules}
    for extra, modules in _EXTRAS.items():
        brought = {name_of(line) for line in PROJECT["optional-dependencies"][extra]}
        assert all(MODULES[module] & (brought | {"botocore"}) for module in modules if module in MODULES)


WITH_BASE_ALONE = """
import sys
blocked, scan, copy = set(sys.argv[1].split(",")), sys.argv[2], sys.argv[3]

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import vesuvius
how = dict(patch_size=(8, 16, 16), batch_size=2, device="cpu")
with vesuvius.PatchLoader(scan, labels=scan, batches_per_epoch=2, cache_in_memory=True, **how) as loader:
    print(len([batch.image.sum() for batch in loader]))
data = vesuvius.DataConfig(volumes=(vesuvius.VolumeConfig(path=scan),), patch_size=(8, 16, 16))
with vesuvius.PatchStream(vesuvius.prepare_data(0, data).job, vesuvius.StreamOptions(batch_size=4)) as stream:
    print(next(stream).patches.shape)
print(vesuvius.open_volume(scan)[:2, 0, 0].shape)
tiles = dict(patch_size=(16, 32, 32))
print(next(iter(vesuvius.GridLoader(scan, **tiles))).image.shape[0], flush=True)
print(vesuvius.predict_volume(lambda image: image, scan, "predicted.zarr", **tiles).tiles > 0)

from vesuvius.commands.cli import COMMANDS, main
for command in (["info", scan], ["copy", scan, copy], ["verify", copy, "--processes", "1"]):
    print(main(["volume", *command]))
files = ["--volume", scan, "--out", "p.zarr", "--patch-size", "16,32,32"]
print(main(["predict", "--network", "torch.nn:Identity", *files]))
from vesuvius.doctor import Check, examine, start_ray
print(*examine([Check("Ray", lambda: start_ray(None, 9))], 99))
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
config = f"data.volumes=[{{path: {scan}}}]"
for command in (["train", "--config", sys.argv[4], "--dry-run"], ["tune", "--config", sys.argv[4]], ["demo"]):
    assert main(command) == 2, command
for call in (
    lambda: vesuvius.PatchLoader(scan, processes=True, **how),
    lambda: vesuvius.predict_volume("a:b", scan, "several.zarr", workers=2, **tiles),
):
    try:
        call()
    except vesuvius.ConfigError as error:
        print(error, file=sys.stderr)
"""


def test_the_base_install_reads_and_copies_and_says_what_to_type_for_the_rest(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((32, 64, 64)))
    blocked = ",".join(module for module, names in MODULES.items() if not names & (BASE | {"vesuvius-diffusion"}))
    assert {"ray", "pyarrow", "boto3", "rich", "PIL"} <= set(blocked.split(","))
    command = [sys.executable, "-c", WITH_BASE_ALONE, blocked, str(path), "copy.zarr", str(ROOT / "configs/demo.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("2\n(4, 8, 16, 16)\n(2,)\n1\nTrue\n")
    line = "which is not installed; pip install 'vesuvius-diffusion[train]'"
    assert re.search(rf"no picture: it needs \w+, {re.escape(line)}", done.stdout)
    value, _, remedy = line.partition("; ")
    assert str(Finding("fail", f"a private Ray needs ray, {value}", remedy)) in done.stdout
    assert not (tmp_path / "volumes").exists(), "a demo that cannot train writes nothing"
    lines = [line.partition("ERROR ")[2] or line for line in done.stderr.splitlines() if "which is not" in line]
    words = [re.fullmatch(r"(.*) needs \w+, which is not installed; (.*)", line) for line in lines]
    assert [match and match[1] for match in words] == [
        "`vesuvius train`", "`vesuvius tune`", "`vesuvius demo`", "processes=True", "Prediction with several workers",
    ]  # fmt: skip
    assert {match and match[2] for match in words} == {"pip install 'vesuvius-diffusion[train]'"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_wheel_without_extras_is_small_and_quick(tmp_path: Path) -> None:
    """As `docs/library.md` says.  Seconds are those of the CPU, which other programs do not lengthen as much."""
    wheels, venv = tmp_path / "dist", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [venv / "bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", *wheels.iterdir()]
    subprocess.run(install, check=True, timeout=1200)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        program = [venv / "bin" / command[0], *command[1:]]
        return subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    names = {name_of(line.partition("==")[0]) for line in run("pip", "freeze").splitlines() if "==" in line}
    assert not {"ray", "pyarrow", "boto3", "matplotlib", "pillow"} & names
    size = "import importlib.metadata as m, sys; print(sum(f.locate().stat().st_size for f in m.files(sys.argv[1])))"
    installed = {name: int(run("python", "-c", size, name)) for name in names - {"pip", "setuptools"}}
    ours = {name: installed[name] for name in installed.keys() - closure(["torch", "numpy"])}
    print({name: f"{size / 1e6:.1f} MB" for name, size in sorted(ours.items(), key=lambda each: -each[1])})
    assert sum(ours.values()) < 80e6, "19 MB to download; numcodecs is half of it"
    run("vesuvius", "volume", "synth", "v.zarr", "--shape", "64,128,128")
    snippet = (
        "import time\n"
        "began = time.process_time()\n"
        "import vesuvius\n"
        "imported = time.process_time()\n"
        "import torch\n"
        "loaded = time.process_time()\n"
        "loader = vesuvius.PatchLoader('v.zarr', patch_size=(16, 32, 32), batch_size=4)\n"
        "next(iter(loader))\n"
        "print(imported - began, time.process_time() - loaded)\n"
        "loader.close()"
    )
    import_s, first_s = (
        min(map(float, column))
        for column in zip(*(run("python", "-c", snippet).split() for _ in range(3)), strict=True)
    )
    assert import_s <= 0.1
    assert first_s <= 2
