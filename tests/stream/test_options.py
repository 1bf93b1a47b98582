"""What a library user gets wrong is one line of one family of errors, before anything is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.stream.test_stream import make_job, open_stream
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.ray.blocks import RayBlocks
from vesuvius.stream.ray.segment import Segment
from vesuvius.stream.stream import PatchStream

WRONG: list[dict[str, Any]] = [
    {"batch_size": 0},
    {"batch_size": -4},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"batch_size": 4, "workers": -1},
    {"batch_size": 4, "workers": None},
    {"batch_size": 4, "prefetch_factor": 0},
    {"batch_size": 4, "requests": 0},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    assert StreamOptions(np.int64(4), np.int32(0)).batch_size == 4  # type: ignore[arg-type]
    *_, (name, value) = options.items()
    with pytest.raises(ConfigError, match=rf"^{name} must be an integer of at least \d; got {value!r}; change it$"):
        StreamOptions(**options)


@pytest.mark.parametrize(("first", "stop"), [(-1, None), (1, None), (8, 6)])
def test_a_stream_that_begins_nowhere_is_refused(volume: Path, first: int, stop: int | None) -> None:
    job = make_job(volume)
    two_ranks = type(job)(**{**vars(job), "world": 2})
    with pytest.raises(ConfigError, match=f"got first {first} and stop {stop}; change one of them"):
        open_stream(two_ranks, first=first, stop=stop)


def test_a_config_made_in_python_fails_with_one_line_of_ours() -> None:
    with pytest.raises(ConfigError) as raised:
        DataConfig(volumes=(VolumeConfig(path="v.zarr"),), patch_size=(1, 2, 0), level=3)  # type: ignore[call-arg]
    assert str(raised.value).startswith("DataConfig is not valid: patch_size: ")
    assert "level: Extra inputs are not permitted" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("left", "working"), [(100, 8), (8, 8), (2, 2), (0, 0)])
def test_readers_with_work_are_those_that_a_task_is_left_for(left: int, working: int) -> None:
    """A task counts until all its blocks have been handed over."""
    stream: Any = SimpleNamespace(_source=SimpleNamespace(tasks_left=left), options=SimpleNamespace(workers=8))
    assert PatchStream.readers_with_work.fget(stream) == working  # type: ignore[attr-defined]


def test_tasks_are_left_of_both_segments_until_their_blocks_have_been_handed_over() -> None:
    segments: list[Any] = [Segment.__new__(Segment) for _ in range(2)]
    for segment, handed_over in zip(segments, (5, 0), strict=True):
        segment._ends, segment._blocks = [1, 5, 7], handed_over  # tasks of 1, 4 and 2 blocks
    blocks: Any = RayBlocks.__new__(RayBlocks)
    blocks._segments = segments
    assert blocks.tasks_left == 1 + 3
    segments[1]._blocks = 7
    blocks._segments = segments[1:]
    assert blocks.tasks_left == 0
    blocks._segments = []
    assert blocks.tasks_left == 0
