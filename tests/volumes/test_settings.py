"""A volume is read with settings of its own: those of the process stay the user's."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from numcodecs import blosc

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import ArrayConfig
from vesuvius.volumes.volume import open_volume


@pytest.mark.parametrize(("layout", "where"), [("v2", "disk"), ("v3-sharded", "http")])
def test_opening_and_reading_a_volume_changes_no_setting_of_the_process(
    server: ChunkServer, tmp_path: Path, layout: str, where: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured((64, 64, 64)), **LAYOUTS[layout])
    mine = {"threading.max_workers": 7, "async.concurrency": 13, "codec_pipeline.batch_size": 3}
    threads = blosc.set_nthreads(3)
    try:
        with zarr.config.set(mine):
            settings, environment = copy.deepcopy(zarr.config.config), dict(os.environ)
            volume = open_volume(ArrayConfig(path=str(path) if where == "disk" else server.url_of(path)))
            assert zarr.config.config == settings
            np.testing.assert_array_equal(volume.read(((0, 0, 0), (32, 64, 64))), textured((64, 64, 64))[:32])
            volume.close()
            assert zarr.config.config == settings
            assert dict(os.environ) == environment
    finally:
        assert blosc.set_nthreads(threads) == 3
