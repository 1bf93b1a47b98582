"""The synthetic scroll: the same voxels however asked for, laid out like a published one, written whole or not."""

from __future__ import annotations

import hashlib
import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr
from numcodecs import Blosc

from vesuvius import volume
from vesuvius.data import phantom as phantom_module
from vesuvius.data.phantom import Phantom, count_chunks, write_phantom
from vesuvius.errors import ConfigError, DataError

SHAPE = (40, 70, 66)  # every level has an odd axis: 40x70x66, 20x35x33, 10x18x17
CHUNK = 32


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small phantom on disk with its report, shared by the tests that only read it."""
    return write_phantom(tmp_path_factory.mktemp("phantom") / "small.zarr", SHAPE, seed=3, chunk=CHUNK)


@pytest.fixture(scope="module")
def scroll():
    """A phantom of several windings, on demand."""
    return Phantom(0, (96, 160, 160))


def levels_of(path: Path) -> list[np.ndarray]:
    group = zarr.open_group(path, mode="r")
    return [group[str(level)][:] for level in range(3)]


# Content


def test_voxels_do_not_depend_on_the_chunk_size(written, tmp_path):
    other = write_phantom(tmp_path / "other.zarr", SHAPE, seed=3, chunk=18)
    for path, other_path in ((written.path, other.path), (written.labels_path, other.labels_path)):
        for voxels, other_voxels in zip(levels_of(path), levels_of(other_path), strict=True):
            np.testing.assert_array_equal(voxels, other_voxels)


def test_any_box_is_a_crop_of_the_whole():
    phantom = Phantom(5, SHAPE)
    grey, label = phantom.box((0, 0, 0), SHAPE)
    rng = np.random.default_rng((0, 0))
    for _ in range(20):
        start = tuple(int(rng.integers(0, size)) for size in SHAPE)
        stop = tuple(int(rng.integers(low, size)) + 1 for low, size in zip(start, SHAPE, strict=True))
        window = tuple(slice(low, high) for low, high in zip(start, stop, strict=True))
        box_grey, box_label = phantom.box(start, stop)
        np.testing.assert_array_equal(box_grey, grey[window])
        np.testing.assert_array_equal(box_label, label[window])


def test_voxels_are_the_same_on_every_machine_and_in_every_version(scroll):
    """Pinned: a change of these bytes is a change of every published figure that was measured on a phantom."""
    grey, label = scroll.box((10, 30, 40), (34, 94, 104))
    assert hashlib.sha256(grey.tobytes() + label.tobytes()).hexdigest()[:16] == "7e86598016966948"


def test_another_seed_is_another_scroll():
    one, two = (Phantom(seed, SHAPE).box((0, 0, 0), SHAPE)[1] for seed in (0, 1))
    assert (one != two).mean() > 0.2  # papyrus fills about half, so unrelated labels differ in about half the voxels


def test_a_field_of_160_voxels_shows_at_least_six_sheets(scroll):
    """Papyrus to gap and back along rows through the middle; a sheet and its gap take about 12 voxels."""
    _, label = scroll.box((40, 76, 0), (56, 84, 160))
    sheets = (np.diff(label.astype(np.int8), axis=2) == 1).sum(axis=2)
    assert 6 <= np.median(sheets) <= 16


def test_papyrus_is_brighter_than_gaps_and_only_masked_air_is_zero(scroll):
    grey, label = scroll.box((0, 0, 0), (96, 160, 160))
    assert grey[(label == 0) & (grey > 0)].mean() + 40 < grey[label == 1].mean()
    assert grey[label == 1].min() > 0
    assert 0.05 < (grey == 0).mean() < 0.35
    assert grey[:, 0, 0].max() == 0  # a corner


def test_the_sheet_goes_on_where_the_angle_wraps(scroll):
    """Half a turn before and after the cut is one place: the same texture, one winding further."""
    u = np.linspace(1, 300, 4001, dtype=np.float32)[None, None]
    turn, zs = np.float32(0.5), np.array([7])
    before = scroll._sheets(u, np.full_like(u, turn), zs)
    after = scroll._sheets(u + 1, np.full_like(u, -turn), zs)
    for a, b in zip(before, after, strict=True):
        assert (np.abs(a - b) < 0.02).mean() > 0.99  # rounding of u moves a few samples to the next table entry


def test_turns_is_the_angle():
    rng = np.random.default_rng((0, 1))
    dy, dx = (rng.normal(0, 100, 10_000).astype(np.float32) for _ in range(2))
    exact = np.arctan2(dy.astype(np.float64), dx) / (2 * np.pi)
    # 3e-7 from the polynomial and a few float32 roundings; 1e-6 turns are 0.03 voxels at the rim of the largest scroll
    np.testing.assert_allclose(phantom_module._turns(dy, dx), exact, atol=1e-6)


def test_the_two_layers_of_a_sheet_have_crossed_fibres():
    tables = phantom_module._texture_tables(0).reshape(-1, phantom_module.TABLE, phantom_module.TABLE).astype(float)
    for depth in range(phantom_module.DEPTHS):
        rough_s, rough_z = (np.abs(np.diff(tables[depth], axis=axis)).mean() for axis in (0, 1))
        along_z = phantom_module.DEPTHS // 4 <= depth < phantom_module.DEPTHS * 3 // 4
        assert (rough_s > 2 * rough_z) if along_z else (rough_z > 2 * rough_s)


def test_noise_is_correlated_between_neighbours_and_gone_four_voxels_away():
    """In the open core, where there is nothing but noise: weights 1/4 1/2 1/4 give 2/3, 1/6, 0, 0."""
    phantom = Phantom(0, (64, 512, 512))
    phantom._windings = 10**6
    phantom._sheets = lambda u, turn, zs: (np.zeros_like(u), np.zeros_like(u))
    grey, _ = phantom.box((0, 200, 200), (48, 264, 264))
    noise = grey - grey.mean()
    power = (noise**2).mean()
    correlations = [float((noise[:, :, :-lag] * noise[:, :, lag:]).mean() / power) for lag in (1, 2, 4)]
    np.testing.assert_allclose(correlations, [2 / 3, 1 / 6, 0], atol=0.03)  # 200,000 voxels, a few of them independent


@pytest.mark.parametrize("seed", [0, 1])
def test_chunks_compress_like_a_published_scroll(seed):
    """1.3 : 1 under blosc-zstd; one chunk of one seed scatters by 0.05 with the share of gaps in it."""
    grey, _ = Phantom(seed, (256, 512, 512)).box((64, 192, 256), (192, 320, 384))
    stored = Blosc(cname="zstd", clevel=3, shuffle=Blosc.NOSHUFFLE).encode(grey)
    assert 1.24 < grey.nbytes / len(stored) < 1.36


@pytest.mark.parametrize("shape", [(16, 16, 16), (16, 24, 150), (20, 120, 30)])
def test_small_and_flat_fields_are_mostly_scroll(shape):
    grey, _ = Phantom(0, shape).box((0, 0, 0), shape)
    assert grey.shape == shape
    assert (grey > 0).mean() > 0.6


# Layout


def test_array_metadata_equals_the_published_layout(written):
    for path in (written.path, written.labels_path):
        for level, shape in enumerate(([40, 70, 66], [20, 35, 33], [10, 18, 17])):
            assert json.loads((path / str(level) / ".zarray").read_text()) == {
                "zarr_format": 2,
                "shape": shape,
                "chunks": [CHUNK] * 3,
                "dtype": "|u1",
                "fill_value": 0,
                "order": "C",
                "filters": None,
                "dimension_separator": "/",
                "compressor": {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 0, "blocksize": 0},
            }
        assert json.loads((path / ".zgroup").read_text()) == {"zarr_format": 2}


def test_group_metadata_is_ome_zarr_0_4(written):
    assert json.loads((written.path / ".zattrs").read_text()) == {
        "multiscales": [
            {
                "version": "0.4",
                "name": "small",
                "axes": [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"],
                "datasets": [
                    {"path": path, "coordinateTransformations": [{"type": "scale", "scale": [scale] * 3}]}
                    for path, scale in (("0", 7.91), ("1", 15.82), ("2", 31.64))
                ],
            }
        ]
    }


def test_level_0_holds_the_phantom(written):
    grey, label = Phantom(3, SHAPE).box((0, 0, 0), SHAPE)
    np.testing.assert_array_equal(levels_of(written.path)[0], grey)
    np.testing.assert_array_equal(levels_of(written.labels_path)[0], label)


def test_each_level_is_the_rounded_mean_of_the_one_above(written):
    """Of labels 0 and 1 that is the majority, a tie counting as papyrus.  Ragged ends average what exists."""
    for path in (written.path, written.labels_path):
        levels = levels_of(path)
        for above, below in itertools.pairwise(levels):
            padded = np.full([2 * size for size in below.shape], np.nan)
            padded[tuple(slice(size) for size in above.shape)] = above
            z, y, x = below.shape
            mean = np.nanmean(padded.reshape(z, 2, y, 2, x, 2), axis=(1, 3, 5))
            np.testing.assert_array_equal(below, np.floor(mean + 0.5))


def test_chunks_of_air_are_absent_and_all_others_are_there(tmp_path):
    report = write_phantom(tmp_path / "air.zarr", (16, 96, 96), seed=0, chunk=16)
    voxels = levels_of(report.path)[0]
    present = 0
    for y in range(6):
        for x in range(6):
            file = report.path / "0" / "0" / str(y) / str(x)
            assert file.exists() == voxels[:, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16].any()
            present += file.exists()
    assert 0 < present < 36


def test_report_counts_the_bytes_on_disk(written):
    files = [p for root in (written.path, written.labels_path) for p in root.rglob("*") if p.is_file()]
    assert written.stored_bytes == sum(p.stat().st_size for p in files if not p.name.startswith("."))


def test_ratio_is_over_chunks_without_air(tmp_path):
    report = write_phantom(tmp_path / "v.zarr", (32, 128, 128), seed=0, chunk=32)
    raw = stored = 0
    for y in range(4):
        for x in range(4):
            if levels_of(report.path)[0][:, 32 * y : 32 * y + 32, 32 * x : 32 * x + 32].all():
                raw, stored = raw + 32**3, stored + (report.path / "0" / "0" / str(y) / str(x)).stat().st_size
    assert report.ratio == raw / stored
    assert write_phantom(tmp_path / "w.zarr", (32, 128, 128), seed=0, chunk=128).ratio is None  # its one chunk has air


def test_memory_does_not_grow_with_the_volume(tmp_path):
    """Four times the depth: 48 more chunks of grey and label at level 0, less than 4 more in memory."""
    Phantom(0, SHAPE).box((0, 0, 0), (8, 8, 8))
    peaks = []
    for depth in (64, 256):
        tracemalloc.start()
        write_phantom(tmp_path / f"{depth}.zarr", (depth, 64, 64), seed=0, chunk=32)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4 * 32**3


def test_memory_is_a_constant_number_of_chunks(tmp_path):
    """Chunks so big that the texture tables (13 MB while they are made) do not count."""
    tracemalloc.start()
    write_phantom(tmp_path / "v.zarr", (96, 288, 96), seed=0, chunk=96)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 45 * 96**3


def test_on_chunk_is_called_as_often_as_counted(tmp_path):
    calls = []
    write_phantom(tmp_path / "v.zarr", SHAPE, seed=0, chunk=CHUNK, on_chunk=lambda: calls.append(1))
    assert len(calls) == count_chunks(SHAPE, CHUNK, 3) == 2 * 3 * 3 + 1 * 2 * 2 + 1


# All or nothing


def test_existing_volume_is_refused_and_untouched(tmp_path):
    for name in ("v.zarr", "v.labels.zarr"):
        zarr.create_group(tmp_path / name, zarr_format=2, attributes={"mine": 1})
        with pytest.raises(ConfigError, match="--overwrite"):
            write_phantom(tmp_path / "v.zarr", SHAPE, seed=0, chunk=CHUNK)
        assert zarr.open_group(tmp_path / name).attrs["mine"] == 1
        (tmp_path / name).rename(tmp_path / f"aside-{name}")


def test_overwrite_replaces_both_groups(tmp_path):
    write_phantom(tmp_path / "v.zarr", (48, 32, 32), seed=0, chunk=16)
    report = write_phantom(tmp_path / "v.zarr", (16, 32, 32), seed=1, chunk=16, overwrite=True)
    grey, label = Phantom(1, (16, 32, 32)).box((0, 0, 0), (16, 32, 32))
    np.testing.assert_array_equal(levels_of(report.path)[0], grey)
    np.testing.assert_array_equal(levels_of(report.labels_path)[0], label)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.labels.zarr", "v.zarr"]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_overwrite_never_replaces_what_is_not_zarr(tmp_path, kind):
    target = tmp_path / "v.zarr"
    if kind == "directory":
        target.mkdir()
        (target / "thesis.txt").write_text("years of work")
    else:
        target.write_text("years of work")
    with pytest.raises(ConfigError, match="zarr groups and arrays only"):
        write_phantom(target, SHAPE, seed=0, chunk=CHUNK, overwrite=True)
    assert (target / "thesis.txt" if kind == "directory" else target).read_text() == "years of work"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_stops_leaves_what_was_there_and_nothing_else(tmp_path, error):
    report = write_phantom(tmp_path / "v.zarr", (16, 32, 32), seed=0, chunk=16)
    before = levels_of(report.path)[0]
    seen = []

    def stop() -> None:
        seen.extend(p.name for p in tmp_path.iterdir() if p.suffix == ".partial")
        raise error

    with pytest.raises(error):
        write_phantom(report.path, (16, 32, 32), seed=1, chunk=16, overwrite=True, on_chunk=stop)
    assert seen, "the new volume is being written under a temporary name beside the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.labels.zarr", "v.zarr"]
    np.testing.assert_array_equal(levels_of(report.path)[0], before)


def test_a_failed_rename_puts_the_old_volumes_back(tmp_path, monkeypatch):
    report = write_phantom(tmp_path / "v.zarr", (16, 32, 32), seed=0, chunk=16)
    before = levels_of(report.path)[0]
    rename = Path.rename

    def fail_at_the_last(source: Path, target: Path) -> Path:
        if source.name == "v.zarr" and target == report.path and ".partial" in source.parent.name:
            raise OSError(28, "No space left on device")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_last)
    with pytest.raises(DataError, match="No space left"):
        write_phantom(report.path, (16, 32, 32), seed=1, chunk=16, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.labels.zarr", "v.zarr"]
    np.testing.assert_array_equal(levels_of(report.path)[0], before)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"shape_zyx": (16, 15, 16)}, "at least 16 voxels"),
        ({"chunk": 33}, "even number"),
        ({"chunk": 0}, "even number"),
        ({"levels": 0}, "levels must be at least 1"),
        ({"seed": -1}, "seed at least 0"),
        ({"path": Path("scroll")}, r"end in \.zarr"),
    ],
)
def test_wrong_arguments_are_refused_with_the_rule(tmp_path, arguments, rule):
    arguments = {"path": Path("v.zarr"), "shape_zyx": SHAPE, "seed": 0, "chunk": CHUNK} | arguments
    with pytest.raises(ConfigError, match=rule):
        write_phantom(tmp_path / arguments.pop("path"), **arguments)
    assert list(tmp_path.iterdir()) == []


# The door


def test_the_command_writes_both_volumes_and_says_so_in_one_line(tmp_path, capsys):
    out = tmp_path / "made" / "v.zarr"
    assert volume.main(["synth", str(out), "--shape", "16,32,48", "--seed", "2", "--chunk", "16"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert line.startswith(f"{out} (sheets: v.labels.zarr) shape 16,32,48 levels 3 stored_mib ")
    assert " ratio " in line
    assert " seconds " in line
    assert captured.err == ""  # no progress bar where stderr is not a terminal
    np.testing.assert_array_equal(levels_of(out)[0], Phantom(2, (16, 32, 48)).box((0, 0, 0), (16, 32, 48))[0])


def test_the_command_refuses_an_existing_volume_until_told_to_overwrite(tmp_path, capsys):
    command = ["synth", str(tmp_path / "v.zarr"), "--shape", "16,16,16", "--chunk", "16"]
    assert volume.main(command) == 0
    assert volume.main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert volume.main([*command, "--overwrite"]) == 0


@pytest.mark.parametrize("shape", ["256,512", "0,64,64", "64,64,-64", "64,64,15", "a,b,c", "64.5,64,64", "1,2,3,4", ""])
def test_a_wrong_shape_is_a_usage_error(tmp_path, capsys, shape):
    with pytest.raises(SystemExit) as exit_info:
        volume.main(["synth", str(tmp_path / "v.zarr"), f"--shape={shape}"])
    assert exit_info.value.code == 2
    assert "three whole numbers z,y,x of at least 16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
