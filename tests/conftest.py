"""Small real volumes, a tiny config, and one Ray for all tests that need it."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import psutil
import pytest
import yaml
import zarr
from hypothesis import settings

from tests.support import fork_server, forked, orphans, read_once
from tests.support.servers import cache_home, cache_homes, s3, s3_server, server, session_server  # noqa: F401 - fixtures
from tests.support.tiny import TINY_MODEL as TINY_MODEL
from tests.support.tiny import TINY_TRAINING, tiny_sections
from vesuvius.monitor.probes import cgroup
from vesuvius.runlog.logfile import _TerminalHandler
from vesuvius.volume_tools import verify

# Before a test imports torch.  Tiny networks gain nothing from a second thread and lose much if other work runs
# on the machine: each layer then waits for the thread that has no core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `vesuvius train` does

# Both are ignored by what is started in the background or under nohup, and would be in all processes of the tests.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

LONG_TEST_S = 4 * 3600

# `make test-long` takes the full counts.  A loaded machine is no failure, so examples have no deadline.
settings.register_profile("few", max_examples=12, deadline=None)
settings.register_profile("full", max_examples=300, deadline=None)
settings.load_profile("few")

REPOSITORY = Path(__file__).parent.parent
SCROLL_DATA = REPOSITORY.parent / "shared" / "data"

needs_scroll_data = pytest.mark.skipif(
    not SCROLL_DATA.is_dir(),
    reason="real scroll CT is not part of the repository; it lies in ../shared/data where present",
)


def pytest_configure(config: pytest.Config) -> None:
    """A timeout ends the process of a test; trainers that it started must end too."""
    orphans.watch_over_this_process()
    if os.environ.get("SIM_GPU"):
        from tests.support import sim_device  # imports torch

        sim_device.register()
    elif getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        _keep_files_in_memory()
        _fork_test_processes(config)


def _keep_files_in_memory() -> None:
    """Lay the folders of tests into /dev/shm if it has room: a file on a disk takes ten times as much CPU there, and
    each test waits until some are flushed."""
    roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**32
    if roomy and psutil.virtual_memory().available > 2**33:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")  # of pytest; `--basetemp` is stronger


def _fork_test_processes(config: pytest.Config) -> None:
    """Import libraries and tests in one process, from which those of xdist are forked: it takes 10 s of CPU."""
    from execnet import gateway_io

    named = [config.invocation_params.dir / name.partition("::")[0] for name in config.args]
    files = [file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    modules = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in sorted(files)]
    fork_server.start_server(modules)

    class ForkedIO(gateway_io.Popen2IOMaster):  # xdist has no option for it
        def __init__(self, args: Sequence[str], execmodel: Any) -> None:
            self.popen = fork_server.Popen([args[0], *args[-2:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster = ForkedIO


@pytest.hookimpl(tryfirst=True)  # before `-m` picks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a sample leaves out is long; full counts have more time than other tests.

    With a step that shares no factor with the lengths of a grid's axes, a sample has each value of each axis.
    Tests with Ray come first, then those with an S3 server, so that one process has them all.
    """
    items.sort(key=lambda item: (not _needs_ray(item), "s3_server" not in getattr(item, "fixturenames", ())))
    seen = Counter[str]()
    for item in items:
        if sample := item.get_closest_marker("sample"):
            function = item.nodeid.partition("[")[0]
            if seen[function] % sample.args[0]:
                item.add_marker("long")
            seen[function] += 1
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_TEST_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items and not session.config.option.collectonly:
        gc.collect()
        gc.freeze()  # otherwise each later collection walks over all imported modules, which takes a second
        names = (getattr(item, "originalname", "") for item in session.items)
        fork_server.start_server(of_stand_in="test_the_quick_tests_for_a_gpu_pass_on_the_stand_in" in names)


def textured(shape: tuple[int, ...], seed: int = 0, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    """Voxels 1..200, never the fill value 0, varied enough to reveal a misplaced patch."""
    return _textured(shape, seed, dtype).copy()


@functools.lru_cache(maxsize=32)
def _textured(shape: tuple[int, ...], seed: int, dtype: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(1, 200, shape).astype(dtype)


_CODEC = numcodecs.Blosc(cname="zstd", clevel=3, shuffle=0)
_V2: dict[str, Any] = {
    "zarr_format": 2,
    "compressors": _CODEC,
    "chunk_key_encoding": {"name": "v2", "separator": "/"},
    "fill_value": 0,
}


_files: dict[Any, dict[str, bytes]] = {}


def write_array(path: Path, voxels: np.ndarray[Any, Any], chunk: int | tuple[int, ...] = 32, **options: Any) -> Path:
    """Write a bare zarr v2 array in blosc-zstd chunks, like the real scrolls, or as in `options`.

    The files are those that zarr writes, made once for equal voxels: it takes up to ten times as long.
    """
    if options.pop("overwrite", False):
        shutil.rmtree(path, ignore_errors=True)
    settings = ({"fill_value": 0} if options.get("zarr_format") == 3 else _V2) | options
    chunk = (chunk,) * voxels.ndim if isinstance(chunk, int) else chunk
    key = voxels.tobytes(), voxels.shape, voxels.dtype.str, chunk, repr(settings)
    files = _files.pop(key, None) or _encoded(voxels, chunk, settings)
    if voxels.nbytes < 2**21:
        _files[key] = files
        if len(_files) > 32:
            del _files[next(iter(_files))]
    path.mkdir(parents=True, exist_ok=True)
    for folder in {name.rpartition("/")[0] for name in files}:
        os.makedirs(path / folder, exist_ok=True)
    for name, data in files.items():
        with open(f"{path}/{name}", "wb" if "/" in name else "xb") as file:  # metadata are not replaced
            file.write(data)
    return path


def _encoded(voxels: np.ndarray[Any, Any], chunk: tuple[int, ...], settings: dict[str, Any]) -> dict[str, bytes]:
    """The files of an array; chunks as in `_V2` are compressed here, in a quarter of the time."""
    stored = dict[str, Any]()
    array = zarr.create_array(stored, shape=voxels.shape, dtype=voxels.dtype, chunks=chunk, **settings)
    if settings != _V2:
        array[...] = voxels
    files = {name: data.to_bytes() for name, data in stored.items()}
    for index in np.ndindex(array.cdata_shape) if settings == _V2 else ():
        part = voxels[tuple(slice(n * size, (n + 1) * size) for n, size in zip(index, chunk, strict=True))]
        if part.any():
            padded = np.pad(part, [(0, size - there) for size, there in zip(chunk, part.shape, strict=True)])
            files["/".join(map(str, index))] = _CODEC.encode(np.ascontiguousarray(padded))
    return files


def write_ome(
    path: Path,
    levels: dict[str, Any],
    scales: Sequence[Any] | None = None,
    translations: dict[int, Any] | None = None,
    unit: str | None = "micrometer",
    version: str = "0.4",
    chunk: int = 32,
    entry: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write an OME-Zarr: the voxels of each level by its path, or a shape with one stored voxel.

    The scales are 2.4 at the first level and as the shapes at others, unless given; `entry` is added to the metadata.
    """
    zarr_format = options.setdefault("zarr_format", 2 if version == "0.4" else 3)
    group, datasets, finest = zarr.create_group(path, zarr_format=zarr_format), [], None
    for number, (name, voxels) in enumerate(levels.items()):
        shape = voxels if isinstance(voxels, tuple) else voxels.shape
        finest = finest or shape
        scale = scales[number] if scales else [2.4 * round(n / m) for n, m in zip(finest, shape, strict=True)]
        transforms = [{"type": "scale", "scale": np.broadcast_to(scale, 3).astype(float).tolist()}]
        if (shift := (translations or {}).get(number)) is not None:
            transforms.append({"type": "translation", "translation": np.broadcast_to(shift, 3).astype(float).tolist()})
        datasets.append({"path": name, "coordinateTransformations": transforms})
        if isinstance(voxels, tuple):
            group.create_array(name, shape=shape, chunks=(16, 16, 16), dtype="u1")[0, 0, 0] = 1
        else:
            write_array(path / name, voxels, chunk, **options)
    axes = [{"name": axis, "type": "space"} | ({"unit": unit} if unit else {}) for axis in "zyx"]
    image = {"version": version, "axes": axes, "datasets": datasets} | (entry or {})
    group.attrs.update(
        {"multiscales": [image]} if version == "0.4" else {"ome": {"version": version, "multiscales": [image]}}
    )
    return path


STORED_AIR: dict[str, Any] = {"config": {"write_empty_chunks": True}}
"""For `write_array`: store chunks of only the fill value too."""


@pytest.fixture(autouse=True)
def _package_log_as_at_the_start() -> Iterator[None]:
    """A command sends the package's messages to the terminal, or nowhere, for good; the next test is to see them in
    `caplog`."""
    package = logging.getLogger("vesuvius")
    level = package.level
    yield
    package.propagate = True
    package.setLevel(level)
    for handler in list(package.handlers):
        if isinstance(handler, _TerminalHandler):
            package.removeHandler(handler)


@pytest.fixture(autouse=True)
def real_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the probes and psutil read this machine again after a test with a recorded one (`system_trees`)."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc")
    monkeypatch.setattr(cgroup, "SYSFS_PATH", Path("/sys"))


@pytest.fixture(autouse=True, scope="session")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork the readers of `volume verify`, as a new process takes a second to import zarr; read states once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "multiprocessing", forked.STAND_IN)
        read_once.read_states_once(patch)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # of fixtures; tests have their own
        yield


@pytest.fixture(scope="session")
def written_volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of `volume`; a copy takes a sixth of the time of writing it."""
    return write_array(tmp_path_factory.mktemp("written") / "volume.zarr", textured((96, 128, 128)))


@pytest.fixture
def volume(tmp_path: Path, written_volume: Path) -> Path:
    """A bare 96x128x128 uint8 volume in 32^3 chunks."""
    return Path(shutil.copytree(written_volume, tmp_path / "volume.zarr"))


@pytest.fixture
def tiny_config(tmp_path: Path, volume: Path) -> Callable[..., Path]:
    """Write a config that runs for seconds on one core; keyword arguments replace keys of its sections."""

    def write(name: str = "tiny", **sections: dict[str, Any]) -> Path:
        config = tiny_sections(name, volume)
        for section, keys in sections.items():
            config[section] = config.get(section, {}) | keys
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def of_two_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two micro-batches per step, for tests of accumulation; other tests take half the time with one."""
    monkeypatch.setitem(TINY_TRAINING, "accumulate_steps", 2)


_ray: list[Any] = []


@pytest.fixture
def ray_cluster() -> None:
    """A private Ray, shared by consecutive tests: it takes 6 s of CPU to start, and 3 % of a core when idle."""
    from vesuvius.config import ClusterConfig
    from vesuvius.stream.ray.session import Session

    if not _ray:
        with contextlib.chdir(REPOSITORY):  # where its processes find `tests`
            _ray.append(Session(ClusterConfig(), workers=4, ranks=1, store_bytes=2**29))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if _ray and not (nextitem and _needs_ray(nextitem)):
            _end_ray()


def _end_ray() -> None:
    """Shut Ray down, and make sure that none of its processes remain."""
    ours = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if re.search(r"^ray::|/ray/", " ".join(process.cmdline())):
                ours.append(process)
    assert len(ours) > 5, "raylet, head, their agents and readers"
    _ray.pop().close()
    assert wait_until_gone(ours, 30) == []


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that still exist after `seconds`; zombies count as gone."""
    deadline = time.monotonic() + seconds
    while processes and time.monotonic() < deadline:
        time.sleep(0.1)
        processes = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return processes


def _needs_ray(item: pytest.Item) -> bool:
    return "ray_cluster" in getattr(item, "fixturenames", ())


def run_vesuvius(
    *arguments: object, cwd: Path, timeout: float = 240, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python -m vesuvius <command> ...` as a user would."""
    command, *rest = map(str, arguments)
    return fork_server.run(
        [sys.executable, "-m", "vesuvius", command, *rest],
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        **options,
    )
