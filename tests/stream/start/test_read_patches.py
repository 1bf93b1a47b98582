"""Patches that are read before a run: those that come next are fetched meanwhile, and none that is not needed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.runlog import progress
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.validation.fixed_patches import read_fixed_patches

SHAPE = (128, 128, 128)


def test_reading_patches_prefetches_and_logs_progress(
    server: ChunkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch touches eight chunks at most: where more are asked for at once, they are those of other patches too."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)
    caplog.set_level(logging.INFO)
    paths = [write_array(tmp_path / f"{name}.zarr", textured(SHAPE), chunk=16) for name in "vc"]
    configs = []
    for addresses in ([str(path) for path in paths], [server.url_of(path) for path in paths]):
        spec = VolumeConfig(path=addresses[0], condition=ArrayConfig(path=addresses[1]))
        configs.append(DataConfig(volumes=(spec,), patch_size=(8, 16, 16)))
    expected = read_fixed_patches(prepare_data(0, configs[0]), configs[0], 12)
    data = prepare_data(0, configs[1])
    server.set_faults([{"path": r"\.zarr/\d", "kind": "delay", "delay_s": 0.2}])
    server.reset()
    caplog.clear()  # the reads from disk may have said something, too
    found = read_fixed_patches(data, configs[1], 12)
    np.testing.assert_array_equal(found.patches, expected.patches)
    stats = server.stats()
    assert stats["max_in_flight"] > 8
    assert sum(count for key, count in stats["paths"].items() if "zarr/." not in key) <= 12 * 8 * 2
    said = [line for line in caplog.messages if line.startswith("reading the patches for validation and previews: ")]
    assert said[0].endswith(": 0 of 12"), "also before anything has come"
    counts = [int(match[1]) for line in said if (match := re.search(r": (\d+) of 12, .*, about .* left$", line))]
    assert len(counts) > 1
    assert counts == sorted(counts)
    assert re.search(r": done, 12, .* in ", said[-1])


def test_damaged_patches_are_excluded_from_the_intensity_range_and_released(
    server: ChunkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), chunk=64)
    (path / "0/0/0").write_bytes(b"torn")
    config = DataConfig(volumes=(VolumeConfig(path=server.url_of(path)),), patch_size=(8, 16, 16))
    data = prepare_data(0, config)
    (intensity,) = data.intensity_ranges(config).volumes
    assert intensity.low < intensity.high
    assert "A patch is excluded from the intensity range: Cannot read chunk" in caplog.text
    staging = data.volumes[0]._staging
    assert staging is not None
    assert not staging._staged, "nothing is held for boxes that are not read"
