"""A model conditioned on labels and voxel size, from the volumes to the checkpoint and back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from tests.conftest import textured
from tests.support.runs import WriteConfig, vesuvius_train
from tests.training.step.test_conditioning import write_group
from vesuvius.commands import sample


@pytest.fixture
def conditional_config(tmp_path: Path, tiny_config: WriteConfig) -> Path:
    voxels = textured((96, 128, 128))
    scan = write_group(tmp_path / "scan.zarr", voxels, [8.0] * 3)
    labels = write_group(tmp_path / "labels.zarr", (voxels > 100).astype(np.uint8), [8.0] * 3)
    return tiny_config(
        data={
            "volumes": [{"path": str(scan), "condition": {"path": str(labels)}}],
            "condition_classes": 2,
        },
        training={"max_steps": 2, "save_every": 1, "preview_every": 2},
        model={"full_res_channels": 4},
        diffusion={"sampler": "dpmpp2m", "sampler_steps": 3, "sampler_guidance": 2.0},
    )


def test_a_conditional_run_trains_samples_and_resumes_bit_by_bit(tmp_path: Path, conditional_config: Path) -> None:
    assert vesuvius_train(conditional_config, "name=straight") == 0
    assert (tmp_path / "runs/straight/samples/step_00000002.png").is_file()
    assert vesuvius_train(conditional_config, "name=parts", "training.max_steps=1", "training.preview_every=0") == 0
    assert vesuvius_train(conditional_config, "name=parts", "training.preview_every=0", "--resume") == 0
    ends = [
        torch.load(tmp_path / f"runs/{name}/checkpoints/step_00000002/state.pt", weights_only=True)
        for name in ("straight", "parts")
    ]
    for name, weight in ends[0]["model"].items():
        assert torch.equal(weight, ends[1]["model"][name]), name
    assert ends[0]["model"]["full_in.weight"].shape[1] == 2 + 2 + 1  # x_t in two parts, labels, "it is there"
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "parts")
    ]
    assert [x for x in losses[0] if x is not None] == [x for x in losses[1] if x is not None]


@pytest.mark.long
def test_sampler_settings_and_scale_may_change_on_resume_but_network_labels_and_alignment_may_not(
    tmp_path: Path, conditional_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(conditional_config, "training.max_steps=1") == 0
    resume = ("--resume", "training.max_steps=2")
    assert vesuvius_train(conditional_config, *resume, "data.condition_classes=3") == 2
    assert "data.condition_classes: was 2, is 3" in capsys.readouterr().err
    moved = write_group(tmp_path / "moved.zarr", np.ones((96, 128, 128), np.uint16), [8.0] * 3)
    scan = tmp_path / "scan.zarr"
    other_labels = f"data.volumes=[{{path: {scan}, condition: {{path: {moved}}}}}]"
    assert vesuvius_train(conditional_config, *resume, other_labels) == 2
    assert 'dtype of the conditions: was "uint8", is "uint16"' in capsys.readouterr().err
    for name in ("scan", "labels"):  # both: else the labels would lie elsewhere
        attributes = tmp_path / f"{name}.zarr" / ".zattrs"
        attributes.write_text(attributes.read_text().replace("8.0", "2.0"))
    assert vesuvius_train(conditional_config, *resume, "diffusion.sampler=heun") == 0
    assert "changed since the checkpoint: diffusion.sampler" in capsys.readouterr().out
    attributes.write_text(attributes.read_text().replace("2.0", "4.0"))  # as coarse again, from the same corner
    assert vesuvius_train(conditional_config, "training.max_steps=3", "--resume") == 2
    place = 'alignment of the conditions (factors, offsets): was "1x1x1 at 0x0x0", is "2x2x2 at 0x0x0"'
    assert place in capsys.readouterr().err


@pytest.mark.long
def test_labels_can_be_drawn_from_scans(tmp_path: Path, conditional_config: Path) -> None:
    scan, labels = tmp_path / "scan.zarr", tmp_path / "labels.zarr"
    assert not vesuvius_train(
        conditional_config,
        f"data.volumes=[{{path: {labels}, condition: {{path: {scan}}}}}]",
        "data.condition_classes=null",
        "data.normalize={low: 0.0, high: 1.0}",
        "training.max_steps=2",
    )
    assert sample.main(["--checkpoint", "tiny", "--count", "1", "--batch-size", "1", "--out", "s"]) == 0
    drawn = zarr.open_group(tmp_path / "s" / "samples.zarr", mode="r")["0"]
    assert isinstance(drawn, zarr.Array)
    assert set(np.unique(np.asarray(drawn[:]))) <= {0, 1, 2}, "intensities of the labels, a little beyond at most"


def test_keys_newer_than_a_checkpoint_have_their_defaults(trained: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs/tiny/checkpoints/step_00000002"
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    del state["config"]["model"]["attention_heads"]
    state["config"]["training"] |= {"threads": 3, "preview_count": 5}  # of another version
    torch.save(state, checkpoint / "state.pt")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.pt"] = hashlib.sha256((checkpoint / "state.pt").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    heads = ("model.attention_heads=8",)  # the default
    assert vesuvius_train(trained, "training.max_steps=3", "--resume", *heads) == 0
    assert sample.main(["--checkpoint", "tiny", "--count", "1"]) == 0
