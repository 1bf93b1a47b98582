"""Grey values, and directories that are there when they are whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vesuvius.engine.conditioning import scale_and_offset
from vesuvius.engine.sample_zarr import published_when_whole, to_greys
from vesuvius.errors import StorageError
from vesuvius.stream.prepare import GreyRange


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_greys_are_what_the_normalisation_makes_the_model_values_of(dtype: str) -> None:
    greys = np.array([0, 1, 53, 100, 144, 255], dtype)
    grey = GreyRange(53.0, 144.0)
    scale, offset = scale_and_offset(grey)
    back = to_greys(greys.astype(np.float32) * np.float32(scale) + np.float32(offset), grey, np.dtype(dtype))
    assert back.dtype == dtype
    # float32 model values up to 4 are rounded by up to 2.4e-7, in two operations: 2e-5 of a grey value here
    np.testing.assert_allclose(back, greys, rtol=0, atol=0 if back.dtype.kind == "u" else 3e-5)


def test_integers_are_rounded_and_clipped_to_the_dtype_and_floats_are_not() -> None:
    x_0 = np.array([-9.0, -1.0, 0.006, 0.9, 9.0], np.float32)
    grey = GreyRange(0.0, 200.0)
    assert to_greys(x_0, grey, np.dtype("uint8")).tolist() == [0, 0, 101, 190, 255]
    assert to_greys(x_0, grey, np.dtype("uint16")).tolist() == [0, 0, 101, 190, 1000]
    np.testing.assert_allclose(to_greys(x_0, grey, np.dtype("float32")), [-800, 0, 100.6, 190, 1000], rtol=1e-6)


def test_an_error_leaves_what_was_there_and_nothing_new(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with published_when_whole(out) as staged:
        (staged / "a").write_text("old")
    assert (out / "a").read_text() == "old"
    with pytest.raises(KeyboardInterrupt), published_when_whole(out) as staged:  # noqa: PT012
        (staged / "a").write_text("new")
        raise KeyboardInterrupt
    assert (out / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with published_when_whole(out) as staged:
        (staged / "b").write_text("new")
    assert [path.name for path in out.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_the_system_refuses_comes_with_a_remedy(tmp_path: Path) -> None:
    message = "samples need a writable place with enough room; got .*No space.*; free space or choose another place"
    with pytest.raises(StorageError, match=message), published_when_whole(tmp_path / "out"):
        raise OSError(28, "No space left on device")
