"""docs/synthetic-labels.md from its first block to its last, with fewer steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from vesuvius.volume_tools.phantom import write_phantom

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/synthetic-labels.md").read_text()


@pytest.mark.long
def test_the_page_runs_from_labelled_boxes_to_files_of_nnunet(tmp_path: Path) -> None:
    pytest.importorskip("nibabel")
    write_phantom(tmp_path / "scan.zarr", (128, 256, 256), 0)
    label, load = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (config, *_) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "pairs.yaml").write_text(config)
    commands = re.findall(r"^(?:vesuvius (?:train|sample)|python) .*", PAGE, re.M)
    assert [line.split()[1] for line in commands] == ["train", "sample", "sample", "examples/export_nnunet.py"]
    few = {
        "train": "training.steps_per_epoch=2 training.epochs=1 training.warmup_steps=1 training.train_batch_size=1 "
        "training.validate_every=0 training.preview_every=0",
        "sample": "--steps 1 --overlap 0 --workers 1",
    }

    def run(*command: str) -> None:
        done = fork_server.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr

    run("-c", label)
    for line in commands[:3]:
        run("-m", *shlex.split(f"{line} {few[line.split()[1]]}"))
    run("-c", load)
    run(str(ROOT / "examples/export_nnunet.py"), *shlex.split(commands[3])[2:])
    boxes = {path.name for path in (tmp_path / "nnUNet_raw/Dataset501_Pairs/labelsTr").iterdir()}
    assert boxes == {"1_0_0_0.nii.gz", "2_0_0_0.nii.gz"}
