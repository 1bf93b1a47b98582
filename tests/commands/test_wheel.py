"""The wheel alone, in an empty environment and outside the checkout: the demo, a first config, a run, the loader."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vesuvius.commands import demo

ROOT = Path(__file__).parents[2]
TINY = (
    "training.epochs=1",
    "training.steps_per_epoch=2",
    "training.warmup_steps=1",
    "training.workers=0",
    "model.channels=[8, 16]",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("WHEEL"):  # `make wheel-test`: the one that is published
        return Path(given)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_wheel_is_all_that_is_needed(wheel: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"vesuvius/demo.yaml", "vesuvius/__init__.pyi", "vesuvius/py.typed"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "vesuvius",
        "vesuvius_diffusion",
        "vesuvius_diffusion.py",
    }
    venv, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[train]"]
    subprocess.run(pip, check=True, timeout=1200)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [venv / "bin" / command[0], *command[1:]], cwd=work, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert f"picture     {work}/runs/demo/samples/generated.png" in run("vesuvius", "demo", *TINY)
    assert (work / "runs/demo/samples/generated.zarr/0").is_dir()
    run("vesuvius", "init", str(demo.VOLUME), "--name", "first", "--out", "first.yaml")
    run("python", "-m", "vesuvius.train", "--config", "first.yaml", "--dry-run")
    snippet = (
        "import vesuvius\n"
        "with vesuvius.PatchLoader('volumes/demo.zarr', patch_size=(8, 32, 32), batch_size=4) as loader:\n"
        "    print(next(iter(loader)).image.shape, vesuvius.__file__)\n"
    )
    printed = run("python", "-c", snippet)
    assert "torch.Size([4, 1, 8, 32, 32])" in printed
    assert str(venv) in printed
    (package,) = venv.glob("lib/python*/site-packages/vesuvius")
    (package / "__init__.py").write_text("import something_of_villa\n")  # as if that were installed over it
    done = subprocess.run([venv / "bin/vesuvius", "--help"], cwd=work, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n"), "not vesuvius-diffusion" in done.stderr) == (2, 1, True)


def test_the_demo_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (ROOT / "configs/demo.yaml").samefile(ROOT / "src/vesuvius/demo.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/old").touch()
    assert demo.main([*TINY, "training.lr=x"]) != 0, "an earlier demo stays until the config is right"
    assert (tmp_path / "runs/demo/old").exists()
