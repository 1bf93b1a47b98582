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
    {"batch_size": 4, "prefetch_bytes": -1},
    {"batch_size": 4, "requests": 0},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    *_, (name, value) = options.items()
    with pytest.raises(ConfigError, match=rf"^{name} must be an integer of at least \d; got {value!r}; change it$"):
        StreamOptions(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    assert StreamOptions(np.int64(4), np.int32(0)).batch_size == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "stop"), [(-1, None), (1, None), (8, 6)])
def test_a_stream_that_begins_nowhere_is_refused(volume: Path, first: int, stop: int | None) -> None:
    job = make_job(volume)
    two_ranks = type(job)(**{**vars(job), "world": 2})
    with pytest.raises(ConfigError, match=f"got first {first} and stop {stop}; change one of them"):
        open_stream(two_ranks, first=first, stop=stop)


def test_a_stream_of_no_samples_is_empty(volume: Path) -> None:
    with open_stream(make_job(volume), first=8, stop=8) as stream:
        assert list(stream) == []


STATES: list[Any] = [{}, None, [], {"seed": 0}, {"sample_index": -1}, {"sample_index": "4"}, {"quarantined": None}]


@pytest.mark.parametrize("changes", STATES, ids=str)
def test_a_state_that_is_none_is_refused_and_the_stream_goes_on(volume: Path, changes: Any) -> None:
    with open_stream(make_job(volume)) as stream:
        next(stream)
        partial = isinstance(changes, dict) and len(changes) == 1 and "seed" not in changes
        state = {**stream.state_dict(), **changes} if partial else changes
        with pytest.raises(ConfigError, match=r"a stream's state must be what state_dict\(\) returned; got"):
            stream.load_state_dict(state)
        assert next(stream).indices.tolist() == [4, 5, 6, 7]


def test_a_config_made_in_python_fails_with_one_line_of_ours() -> None:
    with pytest.raises(ConfigError) as raised:
        DataConfig(volumes=(VolumeConfig(path="v.zarr"),), patch_size=(1, 2, 0), level=3)  # type: ignore[call-arg]
    assert str(raised.value).startswith("DataConfig must be valid: patch_size: ")
    assert "level: Extra inputs are not permitted; got 3" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("left", "working"), [(100.0, 8), (8.0, 8), (1.5, 2), (0.25, 1), (0.0, 0)])
def test_readers_with_work_are_those_that_a_task_is_left_for(left: float, working: int) -> None:
    """A task counts until all its blocks have been handed over."""
    stream: Any = SimpleNamespace(_source=SimpleNamespace(tasks_left=left), _options=SimpleNamespace(workers=8))
    assert PatchStream.readers_with_work.fget(stream) == working  # type: ignore[attr-defined]
    reading_here: Any = SimpleNamespace(_source=None, _options=SimpleNamespace(workers=0))
    assert PatchStream.readers_with_work.fget(reading_here) == 0  # type: ignore[attr-defined]


def test_tasks_are_left_of_both_segments_until_their_blocks_have_been_handed_over() -> None:
    segments: list[Any] = [Segment.__new__(Segment) for _ in range(2)]
    for segment, handed_over in zip(segments, (10, 0), strict=True):
        segment._ends, segment._blocks = [4, 8, 12], handed_over
    blocks: Any = RayBlocks.__new__(RayBlocks)
    blocks._segment, blocks._upcoming = segments
    assert blocks.tasks_left == 0.5 + 3
    blocks._segment, blocks._upcoming = segments[1], None
    assert blocks.tasks_left == 3
    blocks._segment = None
    assert blocks.tasks_left == 0


def test_no_task_is_left_once_all_blocks_of_short_tasks_have_been_handed_over() -> None:
    segment: Any = Segment.__new__(Segment)
    segment._ends, left = [1, 5, 7], []  # tasks of 1, 4 and 2 blocks
    for segment._blocks in range(8):
        left.append(segment.tasks_left)
    assert left == [3, 2, 1.75, 1.5, 1.25, 1, 0.5, 0]
