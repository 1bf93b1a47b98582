"""Small real volumes, a tiny config, and one Ray for all tests that need it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import yaml
import zarr

from tests.servers import cache_home, s3, s3_server, server, session_server  # noqa: F401 - fixtures
from vesuvius.observe.logfile import _TerminalHandler

# Before a test imports torch.  Tiny networks gain nothing by a second thread and lose much where other work runs
# beside them: each layer then waits for the thread that has no core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `vesuvius train` does

# Where the tests are started in the background Ctrl-C is ignored, and would be by all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parent.parent
SCROLL_DATA = REPOSITORY.parent / "shared" / "data"

TINY_MODEL: dict[str, Any] = {
    "channels": [8, 16],
    "blocks_per_level": 1,
    "stem_stride": [1, 2, 2],
    "full_res_channels": 4,
    "attention_heads": 2,
    "norm_groups": 4,
}

needs_scroll_data = pytest.mark.skipif(
    not SCROLL_DATA.is_dir(),
    reason="real scroll CT is not part of the repository; it lies in ../shared/data where present",
)


def textured(shape: tuple[int, ...], seed: int = 0, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    """Voxels that are all different enough for a misplaced patch to show: 1..200, never the fill value 0."""
    return np.random.default_rng(seed).integers(1, 200, shape).astype(dtype)


def write_array(path: Path, voxels: np.ndarray[Any, Any], chunk: int = 32, **options: Any) -> Path:
    """A bare zarr v2 array in blosc-zstd chunks, as the real scrolls have them, or what `options` say."""
    defaults: dict[str, Any] = {
        "zarr_format": 2,
        "compressors": numcodecs.Blosc(cname="zstd", clevel=3, shuffle=0),
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
        "fill_value": 0,
    }
    if options.get("zarr_format") == 3:
        defaults = {"fill_value": 0}
    array = zarr.create_array(
        str(path), shape=voxels.shape, dtype=voxels.dtype, chunks=(chunk,) * voxels.ndim, **(defaults | options)
    )
    array[...] = voxels
    return path


@pytest.fixture(autouse=True)
def _package_log_as_at_the_start() -> Iterator[None]:
    """A command sends the package's messages to the terminal for good; the next test is to see them in `caplog`."""
    yield
    package = logging.getLogger("vesuvius")
    package.propagate = True
    for handler in list(package.handlers):
        if isinstance(handler, _TerminalHandler):
            package.removeHandler(handler)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A bare 96x128x128 uint8 volume in 32^3 chunks."""
    return write_array(tmp_path / "volume.zarr", textured((96, 128, 128)))


@pytest.fixture
def tiny_config(tmp_path: Path, volume: Path) -> Callable[..., Path]:
    """Writes a config of seconds on one core; keyword arguments replace keys of its sections."""

    def write(name: str = "tiny", **sections: dict[str, Any]) -> Path:
        config: dict[str, Any] = {
            "name": name,
            "data": {
                "volumes": [{"path": str(volume)}],
                "patch_size": [8, 16, 16],
                "patches_per_region": 4,
                "regions_per_task": 4,
            },
            "training": {
                "train_batch_size": 2,
                "accumulate_steps": 2,
                "workers": 0,
                "steps_per_epoch": 10,
                "epochs": 2,
                "warmup_steps": 3,
                "lr": 1e-3,
                "ema_decay": 0.9,
                "save_every": 10,
                "validate_every": 0,
            },
            "diffusion": {"sampler_steps": 3},
            "monitor": {"tensorboard": False},
            "model": TINY_MODEL,
        }
        for section, keys in sections.items():
            config[section] = config.get(section, {}) | keys
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One private Ray for all tests: starting it takes seconds."""
    from vesuvius.config import ClusterConfig
    from vesuvius.stream.ray import session as ray_session

    session = ray_session.Session(ClusterConfig(), workers=4, ranks=1, store_bytes=2**29)
    yield
    session.close()


def run_vesuvius(
    *arguments: object, cwd: Path, timeout: float = 240, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python -m vesuvius.<command> ...` as a user would."""
    command, *rest = map(str, arguments)
    return subprocess.run(
        [sys.executable, "-m", f"vesuvius.{command}", *rest],
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        **options,
    )
