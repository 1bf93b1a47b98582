"""A measurement holds whole cycles of the readers, and counts what it took from their buffers."""

from __future__ import annotations

import pytest

from vesuvius.trials.cycles import is_enough, sustained_s


@pytest.mark.parametrize(
    ("samples", "elapsed_s", "enough"),
    [
        (0, 100.0, False),  # nothing has come
        (90, 9.0, False),  # 10 s would be one cycle
        (100, 10.0, True),
        (100, 7.0, True),  # nearer to 10 s than two cycles
        (100, 6.0, False),  # two cycles take 12 s
        (199, 11.9, False),
        (200, 12.0, True),
        (108, 12.0, False),  # slower than it seemed at first: to the end of the cycle
        (108, 20.0, True),  # within bounds
        (40, 9.9, False),  # no cycle fits
        (40, 10.0, True),
    ],
)
def test_a_measurement_is_whole_cycles_near_the_time(samples: int, elapsed_s: float, enough: bool) -> None:
    assert is_enough(samples, 4, elapsed_s, cycle=100, seconds=10.0) is enough


def test_samples_read_ahead_count_with_the_time_of_their_readers() -> None:
    """Two readers of 0.1 s a sample deliver 20 a second."""
    assert sustained_s(100, 5.0, 0.1, 2) == 5.0
    assert sustained_s(100, 4.8, 0.1, 2) == 4.8, "within what is tolerated"
    assert sustained_s(100, 1.0, 0.1, 2) == pytest.approx(5.0)
    assert sustained_s(100, 1.0, 0.1, 0) == 1.0, "the trainer reads"
    assert sustained_s(100, 1.0, None, 2) == 1.0
