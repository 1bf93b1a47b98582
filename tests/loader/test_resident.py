"""Decoded volumes in memory: bounded by what is there, as asked for, once per machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import vesuvius
from tests.conftest import textured, write_array
from vesuvius.errors import ConfigError

PATCH = (8, 16, 16)


def load(path: Path | vesuvius.DataConfig, **options: Any) -> vesuvius.PatchLoader:
    if not isinstance(path, vesuvius.DataConfig):
        options["patch_size"] = PATCH
    return vesuvius.PatchLoader(
        path, batch_size=4, num_workers=0, device="cpu", normalize=False, batches_per_epoch=4, **options
    )


def huge(path: Path) -> Path:
    """16 TiB, of which a chunk is stored."""
    array = zarr.create_array(path, shape=(2**14, 2**15, 2**15), chunks=(64, 64, 64), dtype="uint8", fill_value=0)
    array[:64, :64, :64] = 1
    return path


def test_more_than_the_memory_is_refused_at_once_and_names_both(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cache_in_memory=True needs 16\S* TiB .*, more than half of the free memory"
    ):
        load(huge(tmp_path / "v.zarr"), cache_in_memory=True)


def test_a_number_in_a_data_section_bounds_the_copy_and_says_if_it_is_too_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_array(tmp_path / "v.zarr", textured((32, 48, 48)))
    volumes = (vesuvius.VolumeConfig(path=str(path)),)
    kept: dict[Any, bool] = {}
    for given in (4.0, 1e-6, 0, "auto"):
        data = vesuvius.DataConfig(volumes=volumes, patch_size=PATCH, resident=given)
        for argument in (None, False, True):
            with load(data, cache_in_memory=argument) as loader, caplog.at_level(logging.WARNING):
                next(iter(loader))
                kept[given, argument] = loader.stream.has_resident
    assert [given for (given, argument), has in kept.items() if argument is None and has] == [4.0]
    assert not any(has for (_, argument), has in kept.items() if argument is False)
    assert all(has for (_, argument), has in kept.items() if argument is True)
    assert caplog.text.count("exceed cache_in_memory=1e-06 (GiB): not kept in memory") == 1


def test_a_number_above_the_memory_is_refused(tmp_path: Path) -> None:
    data = vesuvius.DataConfig(
        volumes=(vesuvius.VolumeConfig(path=str(huge(tmp_path / "v.zarr"))),), patch_size=PATCH, resident=10**6
    )
    with pytest.raises(ConfigError, match="more than the free memory"):
        load(data)


def _rank(rank: int, path: str, address: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    with load(Path(path), cache_in_memory=True) as loader:
        seen = [batch.image.numpy() for batch in loader]
        torch.distributed.barrier()
        mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "resident" in line}
        results.put((rank, np.concatenate(seen), mapped))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_the_ranks_of_a_machine_share_one_copy(tmp_path: Path) -> None:
    """The inode of the mapped memory is the same, and each rank gets its own batches."""
    path = write_array(tmp_path / "v.zarr", textured((32, 48, 48)))
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(n, str(path), str(tmp_path / "store"), results)) for n in (0, 1)]
    for process in ranks:
        process.start()
    found = {rank: rest for rank, *rest in (results.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 1
    with load(path, rank=0, world_size=1) as alone:
        every = np.concatenate([batch.image.numpy() for _ in range(2) for batch in alone])
    np.testing.assert_array_equal(found[0][0], every[0::2])
    np.testing.assert_array_equal(found[1][0], every[1::2])
