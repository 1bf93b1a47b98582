"""Options of a prediction: what it writes equals a computation in memory."""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vesuvius
from tests.predict.test_predict import PATCH, VOXELS, by_monai, level, network, write
from vesuvius.errors import ConfigError, NonFiniteError, VesuviusError
from vesuvius.predict import run
from vesuvius.predict.forecast import forecast
from vesuvius.predict.output import make_output
from vesuvius.predict.run import PredictRequest


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write(tmp_path / "v.zarr", VOXELS)


def predicted(net: Any, volume: Any, out: Path, **options: Any) -> np.ndarray:
    options = {"patch_size": PATCH, "normalize": (0, 255)} | options
    done = vesuvius.predict_volume(net, volume, out, **options)
    assert done.tiles
    return level(done.path)


LOGITS = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (3, 4, 5, 6)).astype(np.float32))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LOGITS.numpy()),
        ({"kept": [2, 0]}, LOGITS.numpy()[[2, 0]]),
        ({"activation": "sigmoid"}, torch.sigmoid(LOGITS).numpy()),
        ({"activation": "softmax", "kept": [1]}, torch.softmax(LOGITS, 0).numpy()[[1]]),
        ({"activation": "softmax", "dtype": "uint8"}, (torch.softmax(LOGITS, 0) * 255).round().numpy().astype("u1")),
        ({"activation": "sigmoid", "threshold": 0.7}, (torch.sigmoid(LOGITS) >= 0.7).numpy().astype("u1")),
        ({"threshold": -1.5, "kept": [0]}, (LOGITS[:1] >= -1.5).numpy().astype("u1")),
        ({"activation": "argmax"}, LOGITS.argmax(0).numpy().astype("u1")[None]),
        ({"activation": "argmax", "threshold": 0.8, "dtype": "uint16"},
         torch.where(torch.softmax(LOGITS, 0).amax(0) >= 0.8, LOGITS.argmax(0), 0).numpy().astype("u2")[None]),
        ({"dtype": np.float16}, LOGITS.numpy().astype("f2")),
    ],
)  # fmt: skip
def test_outputs_are_those_of_their_definition(options: dict[str, Any], expected: np.ndarray) -> None:
    arguments = {"activation": None, "threshold": None, "kept": None, "dtype": None} | options
    output = make_output(3, **arguments)
    blended = LOGITS if output.blended is None else LOGITS[list(output.blended)]
    found = output.voxels(blended.clone())
    assert found.dtype == output.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert output.channels == len(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "activation 'relu' does not exist"),
        ({"activation": "argmax", "kept": [0]}, "channels has no effect with argmax"),
        ({"activation": "argmax", "channels": 1}, "argmax needs a network with two channels"),
        ({"kept": [3]}, r"channels \[3\] are not channels of the network \(0 to 2\)"),
        ({"kept": [1, 1]}, "are not distinct"),
        ({"kept": []}, "are not channels of the network"),
        ({"kept": ["ink"]}, "are not channels of the network"),
        ({"kept": 0}, "channels 0 are not channels of the network"),
        ({"threshold": float("nan")}, "threshold nan is not a number"),
        ({"threshold": "half"}, "threshold 'half' is not a number"),
        ({"activation": "sigmoid", "threshold": 1.5}, "threshold 1.5 is not between 0 and 1"),
        ({"dtype": "uint8"}, "dtype uint8 is for values from 0 to 1"),
        ({"dtype": "int32"}, "dtype int32 is not possible"),
        ({"activation": "argmax", "dtype": "float32"}, "dtype float32 is not that of labels"),
        ({"activation": "argmax", "channels": 300, "dtype": "uint8"}, "dtype uint8 is not that of labels; use uint16"),
    ],
)
def test_impossible_outputs_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"channels": 3, "activation": None, "threshold": None, "kept": None, "dtype": None} | options
    with pytest.raises(ConfigError, match=message):
        make_output(**arguments)


def test_labels_are_downsampled_by_the_mode_and_values_that_float16_lacks_are_an_error(
    tmp_path: Path, volume: Path
) -> None:
    net = network(out=3)
    wide = write(tmp_path / "w.zarr", np.tile(VOXELS, (1, 1, 3)), 64)
    found = predicted(net, wide, tmp_path / "o.zarr", activation="argmax")
    assert found.dtype == np.uint8
    expected = by_monai(np.tile(VOXELS, (1, 1, 3)), net, overlap=0.25, mode="gaussian").argmax(0)
    assert (found != expected).mean() < 1e-3, "ties round differently"
    assert set(np.unique(level(tmp_path / "o.zarr", 1))) <= {0, 1, 2}
    with pytest.raises(NonFiniteError, match=r"An output in z 0:37.* does not fit float16; use dtype float32"):
        predicted(lambda x: x * 1e5, volume, tmp_path / "p.zarr", dtype="float16")


def test_mirrored_evaluations_are_averaged(tmp_path: Path, volume: Path) -> None:
    net, flips = network(), [axes for n in range(3) for axes in itertools.combinations((3, 4), n)]
    found = predicted(net, volume, tmp_path / "o.zarr", mirror="yx")

    def mirrored(x: Tensor) -> Tensor:
        return torch.stack([net(x.flip(axes)).flip(axes) for axes in flips]).mean(0)

    np.testing.assert_allclose(found, by_monai(VOXELS, mirrored, overlap=0.25, mode="gaussian"), atol=1e-5)
    assert len(flips) == 4
    found = predicted(lambda x: x.mul_(2), volume, tmp_path / "p.zarr", mirror="zyx", normalize=False)
    np.testing.assert_allclose(
        found, 2 * VOXELS.astype(np.float32), rtol=1e-6, err_msg="a network may change its batch"
    )


@pytest.mark.parametrize("shape", [(37, 45, 52), (32, 33, 15)])
def test_an_output_at_half_resolution_covers_the_volume(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    """A mean over 2x2x2 voxels knows no neighbors, so all blends give it exactly; the edge repeats at an odd end."""
    voxels = VOXELS[tuple(map(slice, shape))]
    found = predicted(nn.AvgPool3d(2), write(tmp_path / "v.zarr", voxels), tmp_path / "o.zarr", normalize=False)
    padded = np.pad(voxels.astype(np.float32), [(0, size % 2) for size in shape], mode="edge")
    expected = nn.AvgPool3d(2)(torch.from_numpy(padded)[None])[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    scale = json.loads((tmp_path / "o.zarr" / ".zattrs").read_text())["multiscales"][0]["datasets"][0]
    assert scale["coordinateTransformations"][0]["scale"] == [2, 2, 2]
    fine = predicted(nn.Upsample(scale_factor=2), tmp_path / "v.zarr", tmp_path / "p.zarr", normalize=False)
    np.testing.assert_allclose(fine, voxels.repeat(2, 0).repeat(2, 1).repeat(2, 2), rtol=1e-5)


@pytest.mark.parametrize("factor", [pytest.param(1, marks=pytest.mark.long), 2])
def test_with_a_mask_only_tiles_over_it_are_evaluated_and_voxels_outside_are_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    monkeypatch.setattr(run, "CHUNK", 32)  # of which the volume has several
    voxels = np.tile(VOXELS[:32, :40], (1, 1, 4))
    mask = np.zeros(voxels.shape, np.uint16)
    mask[10:20, 5:30, 150:180] = 7
    seen: list[int] = []

    def net(x: Tensor) -> Tensor:
        seen.append(len(x))
        return nn.functional.avg_pool3d(x, factor)

    paths = write(tmp_path / "v.zarr", voxels), write(tmp_path / "m.zarr", mask)
    found = predicted(net, paths[0], tmp_path / "o.zarr", mask=str(paths[1]), normalize=False, batch_size=2)
    cut = (slice(factor - 1, None, factor),) * 3  # the voxel that holds the center of a coarse one
    expected = nn.AvgPool3d(factor)(torch.from_numpy(voxels.astype(np.float32))[None])[0].numpy()
    np.testing.assert_allclose(found, np.where(mask[cut], expected, 0), rtol=1e-5)
    every = vesuvius.predict_volume(net, paths[0], tmp_path / "p.zarr", patch_size=PATCH, normalize=False).tiles
    assert 0 < sum(seen[1 : -every - 1]) < every // 2 + 2, "the first call of each is the probe"


def test_a_mask_of_labels_is_that_of_the_loader(tmp_path: Path, volume: Path) -> None:
    values = np.arange(VOXELS.size, dtype=np.uint8).reshape(VOXELS.shape) % 5
    mask = write(tmp_path / "m.zarr", values)
    foreground = {"labels": np.isin(values, (1, 4)), "ignore": ~np.isin(values, (1, 4))}
    for key, expected in foreground.items():
        marked: Any = vesuvius.MaskConfig(path=mask, **{key: (1, 4)})
        out = tmp_path / f"{key}.zarr"
        found = predicted(lambda x: x, volume, out, mask=marked, normalize=False, blend="crop")
        np.testing.assert_array_equal(found, np.where(expected, VOXELS, 0))
        with pytest.raises(ConfigError, match="was started with other arguments"):
            predicted(lambda x: x, volume, out, mask=mask, normalize=False, blend="crop")


def test_where_no_chunk_is_stored_nothing_is_evaluated(tmp_path: Path) -> None:
    voxels = np.zeros((32, 32, 400), np.uint8)
    voxels[:, :, 16:32] = 9
    path = write(tmp_path / "v.zarr", voxels)
    done = vesuvius.predict_volume(
        lambda x: x + 1, path, tmp_path / "o.zarr", patch_size=(16, 16, 16), overlap=0, mask="stored", normalize=False
    )
    found = level(tmp_path / "o.zarr")
    assert (found[:, :, 16:32] == 10).all()
    assert (found[:, :, 128:] == 0).all()
    assert done.tiles == 2 * 2 * 8, "those over the first block of 128 voxels"
    assert "32 tiles" in forecast(
        PredictRequest(lambda x: x, path, tmp_path / "q.zarr", (16, 16, 16), 0, mask="stored", normalize=False)
    )


def test_channels_are_aligned_and_each_normalized_as_by_the_loader(tmp_path: Path, volume: Path) -> None:
    second = write(tmp_path / "w.zarr", (VOXELS.astype(np.float32) / 3 + 1000).astype(np.float32))
    net = network(channels=2)
    found = predicted(net, (volume, second), tmp_path / "o.zarr", normalize=True)
    scans = vesuvius.VolumeConfig(path=str(volume), channels=(vesuvius.ArrayConfig(path=str(second)),))
    with vesuvius.PatchLoader(scans, batch_size=1, patch_size=PATCH, num_workers=0, device="cpu") as loader:
        (a, b), state = loader.intensity_ranges, json.loads(json.dumps(loader.state_dict()))
        both = np.stack([VOXELS.astype(np.float64), VOXELS / np.float64(3) + 1000])
        both = np.stack([(v - r.low) / (r.high - r.low) * 255 for v, r in zip(both, (a, b), strict=True)])
        np.testing.assert_allclose(found, by_monai(both, net, overlap=0.25, mode="gaussian"), atol=1e-4)
        for given in (loader, state):
            with pytest.raises(ConfigError, match=r"batch_size 2 \(was 1\)"):
                predicted(net, (volume, second), tmp_path / "o.zarr", normalize=given, batch_size=2)
        assert vesuvius.predict_volume(
            net, scans, tmp_path / "o.zarr", patch_size=PATCH, normalize=state
        ).tiles == 0, "the same record"  # fmt: skip


def test_a_loader_hands_its_ranges_to_the_prediction_of_its_volumes_and_its_rule_to_others(
    tmp_path: Path, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However the path of a volume is spelled; others are named."""
    other = write(tmp_path / "w.zarr", VOXELS // 2 + 50)
    options: dict[str, Any] = {"batch_size": 1, "patch_size": PATCH, "num_workers": 0, "device": "cpu"}
    with vesuvius.PatchLoader(volume, validation_fraction=0.2, **options) as trained:
        low, high = trained.intensity_ranges[0].low, trained.intensity_ranges[0].high
        state = trained.state_dict()
        found = predicted(lambda x: x, volume, tmp_path / "a.zarr", normalize=trained)
    np.testing.assert_allclose(found, (VOXELS - low) / (high - low) * 2 - 1, atol=1e-5)
    (tmp_path / "link").symlink_to(volume.parent)
    for number, spelled in enumerate((f"{volume}/", tmp_path / "link" / volume.name, f"file://{volume}")):
        again = predicted(lambda x: x, spelled, tmp_path / f"a{number}.zarr", normalize=state)
        np.testing.assert_array_equal(again, found)
    assert not caplog.records
    both = state | {"intensity_ranges": {**state["intensity_ranges"], f"{tmp_path}/link/{volume.name} []": (0.0, 1.0)}}
    np.testing.assert_array_equal(predicted(lambda x: x, volume, tmp_path / "own.zarr", normalize=both), found)
    with vesuvius.PatchLoader(other, **options) as bare:
        low, high = bare.intensity_ranges[0].low, bare.intensity_ranges[0].high
    found = predicted(lambda x: x, other, tmp_path / "b.zarr", normalize=state)
    assert re.search(rf"w\.zarr .*was not in training .*estimated anew, {low:g} to {high:g};", caplog.text)
    np.testing.assert_allclose(found, ((VOXELS // 2 + 50.0) - low) / (high - low) * 2 - 1, atol=1e-5)
    for rule, scaled in ((False, VOXELS // 2 + 50), ((10, 30), (VOXELS // 2 + 50 - 10.0) / 10 - 1)):
        with vesuvius.PatchLoader(volume, normalize=rule, **options) as loader:
            found = predicted(lambda x: x, other, tmp_path / f"{rule}.zarr", normalize=loader)
            np.testing.assert_allclose(found, scaled, rtol=1e-6)
            state = {
                key: value for key, value in loader.state_dict().items() if key not in ("normalize", "intensity_ranges")
            }
            loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="has no normalization: it was saved by an older version"):
        predicted(lambda x: x, other, tmp_path / "c.zarr", normalize=state)


class Uncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_networks_are_files_functions_or_living_modules_that_stay_as_they_are(
    tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(network(), nn.Dropout(0.5)).train()
    example = torch.zeros(1, 1, *PATCH)
    torch.jit.trace(net.eval(), example).save(str(tmp_path / "net.pt"))
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    Path("built_net.py").write_text(
        textwrap.dedent("""
        import torch
        def build():
            return torch.jit.load("net.pt")
    """)
    )
    net.train()
    expected = predicted(net, volume, tmp_path / "o.zarr")
    assert net.training
    for number, given in enumerate(("net.pt", "built_net:build")):
        np.testing.assert_allclose(predicted(given, volume, tmp_path / f"{number}.zarr"), expected, atol=1e-6)
    for given, message in (
        ("weights.pt", "may hold weights alone"),
        ("gone.pt", "The network gone.pt does not exist; pass a file, or MODULE:FUNCTION"),
        ("built_net:other", "Cannot open the network built_net:other: AttributeError"),
        (Uncopied(), "Cannot open the network Uncopied: TypeError: .*; pass a function that calls it"),
        (nn.Conv3d(3, 1, 1), r"fails on a batch of \(1, 1, 16, 20, 16\): RuntimeError"),
        (lambda x: (x, x), "returns a tuple; wrap it"),
        (lambda x: x[..., 1:], "not to .B, K, Z, Y, X. of the same size, or by one factor"),
    ):
        with pytest.raises(ConfigError, match=message):
            predicted(given, volume, tmp_path / "e.zarr")
    assert not (tmp_path / "e.zarr.partial").exists()


@pytest.mark.long  # torch.export takes seconds
def test_an_exported_program_gives_what_its_module_gives(tmp_path: Path, volume: Path) -> None:
    net = network().eval()
    torch.export.save(torch.export.export(net, (torch.zeros(1, 1, *PATCH),)), tmp_path / "net.pt2")
    found = predicted(tmp_path / "net.pt2", volume, tmp_path / "o.zarr")
    np.testing.assert_allclose(found, predicted(net, volume, tmp_path / "p.zarr"), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": "sin4"}, "blend 'sin4' does not exist; choose gaussian, linear, constant, crop"),
        ({"mirror": "zt"}, "mirror 'zt' has not only axes among z, y and x"),
        ({"mirror": None}, "mirror None has not only axes"),
        ({"box": ((0, 0, 0), (99, 1, 1))}, "box z 0:99, y 0:1, x 0:1 is not inside"),
        ({"box": ((0, 0, 0), (9.0, 9, 9))}, r"box has \(9.0, 9, 9\) in place of three integers"),
        ({"box": (9, 9, 9)}, r"box \(9, 9, 9\) is not \(\(z, y, x\), \(z, y, x\)\)"),
        ({"workers": 0}, "workers 0 is not an integer of at least 1"),
        ({"mask": ("v.zarr", "v.zarr")}, "mask has 2 arrays; pass one"),
        ({"mask": VOXELS}, r"mask: array.* is not a path or config"),
        ({"resume": "no"}, "resume 'no' is not valid; set it to True or False"),
        ({"channels": range(10**12)}, r"channels range\(0, 10+\) are not channels of the network"),
        ({"channels": 0}, r"channels 0 are not channels of the network \(0 to 1\); list some"),
        ({"normalize": (90, 10)}, "low 90.* is not below high 10"),
        ({"normalize": (5, 5)}, "low 5.* is not below high 5"),
        ({"normalize": (0, float("nan"))}, "high: Input should be a finite number"),
        ({"overlap": "half"}, "overlap half is not at least 0"),
        ({"patch_size": 16}, "patch_size has 16 in place of three integers"),
        ({"workers": 2}, "workers=2 processes cannot share a living network; save it with torch.export.save"),
        ({"cluster": "auto"}, "cluster needs workers"),
        ({"batch_size": 0}, "batch_size"),
        ({"normalize": "auto"}, "normalize 'auto' is not valid"),
        ({"overlap": 1}, "overlap 1 is not at least 0 and below 1"),
        ({"patch_size": (16, 16)}, "patch_size"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, volume: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(network(), volume, tmp_path / "o.zarr", **options)
    with pytest.raises(ConfigError, match=r"does not end in \.zarr"):
        predicted(network(), volume, tmp_path / "o")
    with pytest.raises(ConfigError, match=r"The name of 250 bytes of .* is too long; choose one of at most 247"):
        predicted(network(), volume, tmp_path / f"{'é' * 122}o.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.zarr"]


def test_auto_finds_the_batch_that_a_network_takes(
    tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net(x: Tensor) -> Tensor:
        assert len(x) == 2, "one of a fixed batch size"
        return x

    monkeypatch.setattr(run, "_CPU_BATCHES", (8, 4, 2, 1))
    np.testing.assert_allclose(predicted(net, volume, tmp_path / "o.zarr"), VOXELS / 127.5 - 1, atol=1e-5)
    with pytest.raises(ConfigError, match=r"The network maps \(1, 1, 16, 20, 16\) to"):
        predicted(lambda x: x[0], volume, tmp_path / "p.zarr")
    with pytest.raises(ConfigError, match=r"returns a torch\.complex64; wrap it so that it returns one tensor of real"):
        predicted(lambda x: torch.complex(x, x), volume, tmp_path / "p.zarr")


def test_numbers_of_numpy_and_a_folder_left_meanwhile_change_nothing(
    tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def net(x: Tensor) -> Tensor:
        os.chdir(tmp_path / "elsewhere")
        return torch.cat([x * 0, x], 1)

    options: dict[str, Any] = {
        "patch_size": np.array(PATCH),
        "overlap": np.float32(0.25),
        "normalize": np.array([0, 9]),
        "channels": range(2),
    }
    box = np.array([[1, 2, 3], [20, 21, 22]])
    for number, given in enumerate((box, box.tolist())):
        done = vesuvius.predict_volume(net, "v.zarr", (f"{number}.zarr", b"1.zarr")[number], box=given, **options)
        assert done.path == tmp_path / f"{number}.zarr"
        np.testing.assert_allclose(level(done.path)[1], VOXELS[1:20, 2:21, 3:22] / 4.5 - 1, rtol=1e-6)
        os.chdir(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "all voxels" not in caplog.text, "only those of one channel"


def test_a_prediction_needs_no_working_directory(tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = predicted(lambda x: x, volume, tmp_path / "o.zarr", normalize=False, blend="crop")
    np.testing.assert_array_equal(found, VOXELS)
    with pytest.raises(ConfigError, match="the path is empty"):
        predicted(lambda x: x, "", tmp_path / "p.zarr")


def test_predictions_at_once_leave_the_threads_of_torch_as_they_were(tmp_path: Path, volume: Path) -> None:
    """Also for later threads, whose number is that of the last `set_num_threads` of any thread."""
    before, found = torch.get_num_threads(), list[int]()
    first_is_in, second_is_in, first_has_ended = (threading.Event() for _ in range(3))
    torch.set_num_threads(2)

    def act(name: str, is_in: threading.Event, wait_for: threading.Event) -> None:
        def net(x: Tensor) -> Tensor:
            is_in.set()
            assert not wait_for.wait(20)
            return x

        with pytest.raises(VesuviusError, match="AssertionError"):
            predicted(net, volume, tmp_path / name)

    try:
        each = [
            threading.Thread(target=act, args=("first.zarr", first_is_in, second_is_in)),
            threading.Thread(target=act, args=("second.zarr", second_is_in, first_has_ended)),
        ]
        each[0].start()
        assert first_is_in.wait(20)
        each[1].start()
        each[0].join()
        first_has_ended.set()
        each[1].join()
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert [torch.get_num_threads(), *found] == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_an_error_of_the_network_names_the_tile_and_the_same_call_resumes(tmp_path: Path, volume: Path) -> None:
    def failing(error: Any) -> Any:
        def net(x: Tensor) -> Tensor:
            call = next(calls)  # in one piece: threads call at the same time
            if call == 4 and isinstance(error, BaseException):
                raise error
            return x * np.nan if call == 4 else x

        net.__qualname__ = "net"
        return net

    for error, kind, message in (
        (
            ValueError("odd"),
            VesuviusError,
            r"The network failed on tile z .*: ValueError: odd; finished tiles are kept",
        ),
        (StopIteration(), VesuviusError, "The network failed on tile"),
        (None, NonFiniteError, r"The network returned NaN or infinity for tile z "),
        (KeyboardInterrupt(), KeyboardInterrupt, "prediction stopped .*; run the same command again to resume"),
    ):
        calls = itertools.count(1)
        with pytest.raises(kind, match=message):
            predicted(failing(error), volume, tmp_path / "o.zarr", patch_size=(16, 16, 16))
        assert (tmp_path / "o.zarr.partial").exists()
    found = predicted(failing(None), volume, tmp_path / "o.zarr", patch_size=(16, 16, 16))
    np.testing.assert_allclose(found, VOXELS / 127.5 - 1, atol=1e-5)
    assert next(calls) <= 3 * 4 * 4, "finished tiles were kept"
