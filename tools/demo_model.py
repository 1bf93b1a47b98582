"""`make demo-model`: train the small model of a release on the synthetic scroll, and write its files to a folder:

    vesuvius-demo-model.safetensors   the weights (CC-BY-4.0), with config and data facts, for `vesuvius sample`
    vesuvius-demo-model.md            its card: data, training, figures, SHA-256 sum
    vesuvius-demo-model.png           the first samples

Scroll, weights and samples follow from the seed: the same commit, versions, number of threads and kind of CPU give the
same bytes.  `python tools/demo_model.py build/release training.epochs=1` overrides config keys.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from export_model import export

from vesuvius.training.checkpoint.trained import load_weights, read_checkpoint_info

ROOT = Path(__file__).parents[1]
NAME = "vesuvius-demo-model"
LICENSE = "CC-BY-4.0"
THREADS = "2"  # part of the result: they decide in which order sums are taken
SETTINGS = (
    f"name={NAME}",
    "data.volumes=[{path: volumes/demo.zarr}]",
    "data.condition_classes=null",
    "model.channels=[16, 32, 64]",
    "training.epochs=8",
    "training.workers=0",
    "training.preview_every=0",
)
CARD = """# {name} {version}

A diffusion model of 8 x 32 x 32 voxels of a synthetic scroll: rolled sheets, noise and air, written by `vesuvius volume
synth`. It shows that an installation works, and what a model file is. It knows nothing of real scrolls.

| | |
| --- | --- |
| Use | `vesuvius sample --checkpoint {name}.safetensors`, also `--shape 64,256,256 --out big.zarr` |
| License | weights: {license} (https://creativecommons.org/licenses/by/4.0/), the vesuvius developers; program: MIT |
| SHA-256 | `{sha256}` |
| Size | {megabytes:.1f} MB, {parameters:.2f} M parameters in float32 |
| Data | 192 x 256 x 256 voxels, `vesuvius volume synth volumes/demo.zarr --shape 192,256,256 --seed 0`; no other |
| Training | {steps} steps of 8 patches on a CPU, {threads} threads, seed 0 |
| Error on held-out patches | {error:.3f} of the stationary Wiener filter's (mean over the learnable noise levels) |
| Made by | `make demo-model` at commit {commit}; Python {python}, torch {torch}, numpy {numpy}, {machine} |

Limits: patches are small, so the winding of a scroll is not in the model; 1000 steps are
few. Its voxels stand for 7.91 um, as those of the phantom. There is no use in it beyond demonstrations and tests.
"""


def main(out: Path, overrides: list[str]) -> None:
    work = out.with_name(NAME)  # not in `out`, of which every file is signed and released
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": THREADS, "VESUVIUS_RUNS": str(work.resolve() / "runs")}

    def vesuvius(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "vesuvius", *arguments], cwd=work, env=environment, check=True)

    if not (work / "volumes/demo.zarr").exists():
        vesuvius("volume", "synth", "volumes/demo.zarr", "--shape", "192,256,256", "--seed", "0")
    config = ROOT / "src/vesuvius/demo.yaml"
    # A build that was stopped continues: a resume on a CPU changes no bit.
    vesuvius("train", "--config", str(config), *SETTINGS, "training.resume=auto", *overrides)
    run, model = work / "runs" / NAME, (out / f"{NAME}.safetensors").resolve()
    digest = export(run, model, LICENSE)
    vesuvius("sample", "--checkpoint", f"{model}", "--count", "8", "--out", f"samples/{digest[:12]}")
    (out / f"{NAME}.png").write_bytes((work / f"samples/{digest[:12]}/montage.png").read_bytes())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    card = CARD.format(
        name=NAME,
        license=LICENSE,
        sha256=digest,
        megabytes=model.stat().st_size / 1e6,
        parameters=sum(tensor.numel() for tensor in load_weights(model, "ema").values()) / 1e6,
        steps=read_checkpoint_info(model).step,
        error=[r["relative_error"] for r in records if "relative_error" in r][-1],
        threads=THREADS,
        commit=commit or "unknown",
        python=platform.python_version(),
        machine=platform.machine(),
        **{each.partition("-")[0]: version(each) for each in ("torch", "numpy")},
        version=version("vesuvius-diffusion"),
    )
    (out / f"{NAME}.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
