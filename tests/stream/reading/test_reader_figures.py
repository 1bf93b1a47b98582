from __future__ import annotations

from pathlib import Path

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream


def test_a_block_is_counted_before_its_first_sample_and_none_too_early(tmp_path: Path) -> None:
    path = write_array(tmp_path / "volume.zarr", textured((96, 128, 128)))
    data = DataConfig(volumes=(VolumeConfig(path=str(path)),), patch_size=(8, 16, 16), patches_per_region=8)
    job = prepare_data(0, data).job
    with PatchStream(job, StreamOptions(batch_size=2, workers=0)) as stream:
        for count in range(1, 100):
            next(stream)
            needed = 1 + max(job.plan.mixing.slot_of(index) for index in range(2 * count))
            ahead = 1 + max(job.plan.mixing.slot_of(index) for index in range(2 * (count + 3)))  # two batches, in hand
            assert needed <= stream.reader_totals.blocks <= ahead
