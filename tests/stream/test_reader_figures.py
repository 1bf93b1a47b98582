from __future__ import annotations

from pathlib import Path

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.prepare import prepare_data
from vesuvius.stream.stream import PatchStream


def test_all_blocks_of_a_task_are_counted_before_its_first_sample_and_none_of_the_next(tmp_path: Path) -> None:
    path = write_array(tmp_path / "volume.zarr", textured((96, 128, 128)))
    data = DataConfig(
        volumes=(VolumeConfig(path=str(path)),), patch_size=(8, 16, 16), patches_per_region=50, regions_per_task=4
    )
    with PatchStream(prepare_data(0, data).job, StreamOptions(batch_size=2, workers=0)) as stream:
        next(stream)
        first = stream.reader_totals.blocks
        for _ in range(100):
            next(stream)
        assert (first, stream.reader_totals.blocks) == (4, 8)
