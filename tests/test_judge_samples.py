"""What judges samples: real patches of another volume pass, blurred ones do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from tests.conftest import REPOSITORY, write_array


def stripes(seed: int) -> NDArray[np.uint8]:
    """Sheets of grain, and air (0) in a quarter of the volume."""
    rng = np.random.default_rng(seed)
    z, y, x = np.mgrid[:32, :64, :128]
    grey = 120 + 50 * np.sin(x / 2 + y / 5 + z / 9) + 12 * rng.standard_normal(z.shape)
    return np.where(y < 16, 0, grey).astype(np.uint8)


def judged(tmp_path: Path, samples: NDArray[np.uint8]) -> dict[str, Any]:
    tmp_path.mkdir()
    zarr.save_array(tmp_path / "samples.zarr", samples)
    real = write_array(tmp_path / "real.zarr", stripes(1))
    file = tmp_path / "figures.json"
    command = [sys.executable, str(REPOSITORY / "tools" / "judge_samples.py")]
    options = [f"--samples={tmp_path / 'samples.zarr'}", f"--real={real}", "--seeds=1", "--steps=60", f"--json={file}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "planarity" in done.stdout
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_patches_of_another_volume_of_the_kind_pass_and_blurred_ones_do_not(tmp_path: Path) -> None:
    rng, volume = np.random.default_rng(2), stripes(2)
    starts = [rng.integers(0, np.subtract(volume.shape, (8, 16, 16)), endpoint=True) for _ in range(64)]
    samples = np.stack([volume[z : z + 8, y : y + 16, x : x + 16] for z, y, x in starts])
    same = judged(tmp_path / "same", samples)
    assert same["patches"] == 64
    assert abs(same["air"]["generated"] - same["air"]["real"]) < 0.08
    assert abs(same["planarity"]["generated"] - same["planarity"]["real"]) < 0.03
    assert 0.2 < same["auc"]["mean"] < 0.8
    smooth = (samples.astype(np.float32) + samples[:, ::-1]) / 2
    blurred = judged(tmp_path / "blurred", smooth.astype(np.uint8))
    assert blurred["auc"]["mean"] > 0.9
    assert blurred["spectrum_distance_db"] > same["spectrum_distance_db"]
