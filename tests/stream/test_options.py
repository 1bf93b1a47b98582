"""What a library user gets wrong is one line of one family of errors, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stream.test_stream import make_job, open_stream
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.stream.options import StreamOptions

WRONG: list[dict[str, Any]] = [
    {"batch_size": 0},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"batch_size": 4, "workers": -1},
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
