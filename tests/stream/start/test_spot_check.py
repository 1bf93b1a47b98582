"""Chunks that a dry run reads: broken ones are found among them, and what was not read is not called whole."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig
from vesuvius.stream.start import spot_check
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.stream.start.spot_check import SpotCheck
from vesuvius.volumes.listing import chunk_occupancy
from vesuvius.volumes.missing import StoredChunks


def opened(path: Path, **keys: Any) -> tuple[DataConfig, PreparedData]:
    config = DataConfig.model_validate(
        {"volumes": ({"path": str(path)},), "patch_size": (16, 32, 32), "regions_in_flight": 4} | keys
    )
    return config, prepare_data(0, config)


def checked(path: Path, **keys: Any) -> SpotCheck:
    config, data = opened(path, **keys)
    (found,) = spot_check.spot_check(data, config, data.read)
    return found


def test_three_torn_chunks_of_eight_are_all_found(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((128, 128, 128)), chunk=64)
    for key in ("0/0/1", "0/1/0", "1/1/1"):
        (path / key).write_bytes((path / key).read_bytes()[:-50])
    found = checked(path)
    assert {error.chunk for error in found.broken} == {(0, 0, 1), (0, 1, 0), (1, 1, 1)}
    assert (found.read, found.chunks) == (8, 8)
    assert found.line() == f"8 of 8 of {path} read: 3 BROKEN"
    problem = found.problem(32)
    assert problem is not None
    for part in ("got 3 broken of 8", "chunk [0, 0, 1]", f"`vesuvius volume verify {path}`", "max_quarantined=32"):
        assert part in problem


def test_of_a_large_volume_as_many_as_were_read_are_told_and_damage_is_seen(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((128, 256, 256)), chunk=32)
    whole = checked(path)
    assert (whole.read, whole.chunks, whole.problem(0)) == (spot_check.MOST_CHUNKS, 4 * 8 * 8, None)
    assert whole.line() == f"64 of 256 of {path} read: all intact"
    for chunk in path.glob("*/*/[0246]"):
        chunk.write_bytes(b"torn")
    assert 20 <= len(checked(path).broken) <= 44, "half of 64, with three standard deviations"


def test_absent_chunks_are_air_unless_a_listing_has_them(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((128, 128, 128)), chunk=64)
    config, data = opened(path)
    occupancy = chunk_occupancy(data.volumes[0])
    (path / "0/1/1").unlink()
    (found,) = spot_check.spot_check(data, config, data.read)
    assert (found.absent, found.broken) == (1, [])
    data.volumes[0].missing.stored = StoredChunks.of(occupancy)
    (found,) = spot_check.spot_check(data, config, lambda kind, number, box: np.zeros((64, 64, 64), "uint8"))
    assert [error.chunk for error in found.broken] == [(0, 1, 1)]
    assert found.absent == 0, "the others are stored, though they come as zeros"


def test_the_time_is_bounded_and_each_volume_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_array(tmp_path / "v.zarr", textured((128, 128, 128)), chunk=32)
    config, data = opened(path, volumes=({"path": str(path)}, {"path": str(path)}))
    clock = iter(range(100))
    monkeypatch.setattr(spot_check, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    assert [found.read for found in spot_check.spot_check(data, config, data.read)] == [6, 5]
    clock = itertools.chain([0], itertools.repeat(1000))
    assert [found.read for found in spot_check.spot_check(data, config, data.read)] == [1, 1]


def test_what_is_in_quarantine_is_not_told_again(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((128, 128, 128)), chunk=64)
    (path / "1/0/0").write_bytes(b"torn")
    config, data = opened(path)
    known = frozenset({(0, ((64, 0, 0), (128, 64, 64)))})
    (found,) = spot_check.spot_check(data, config, data.read, known)
    assert (found.read, found.quarantined, found.broken) == (7, 1, [])
