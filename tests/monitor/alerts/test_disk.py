"""A disk that will be full is announced by a forecast that comes true, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_disk import fill, small_disk
from vesuvius.monitor.alerts.disk import DiskUse, DiskWatch, Retention, forecast
from vesuvius.monitor.alerts.notices import Notice

GIB = 2**30
HOUR = 3600.0
STEP_S = 10.0  # of a step in the simulated runs
SIZE = 5 * GIB  # of their checkpoints
ROLLING = Retention(save_every=100, keep_last=3)


def used_at(time_s: float, others: Callable[[float], float], retention: Retention) -> tuple[int, dict[int, int]]:
    """Bytes outside checkpoints, and the checkpoints, as `save_checkpoint` leaves them."""
    saves = int(time_s / STEP_S) // retention.save_every
    steps = [n * retention.save_every for n in range(1, saves + 1)]
    kept = [step for step in steps[: -retention.keep_last] if retention.keep_every and step % retention.keep_every == 0]
    return int(others(time_s)), dict.fromkeys([*kept, *steps[-retention.keep_last :]], SIZE)


def seen(
    hours: float, disk_bytes: float, others: Callable[[float], float], retention: Retention = ROLLING
) -> list[DiskUse]:
    uses = []
    for time_s in np.arange(0.0, hours * HOUR + 1, 300.0):
        beside, checkpoints = used_at(time_s, others, retention)
        taken = sum(checkpoints.values())
        free = int(disk_bytes) - beside - taken
        uses.append(DiskUse(time_s, int(time_s / STEP_S), free, 0, checkpoints, taken))
    return uses


def full_at(disk_bytes: float, others: Callable[[float], float], retention: Retention) -> float:
    """When the simulated disk is full, the partial checkpoint of a save included."""
    for time_s in np.arange(0.0, 40 * 24 * HOUR, 20.0):
        beside, checkpoints = used_at(time_s, others, retention)
        saves, since = divmod(int(time_s / STEP_S), retention.save_every)
        writing = SIZE if saves > retention.keep_last and since == 0 else 0  # beside the one that goes then
        if beside + sum(checkpoints.values()) + writing > disk_bytes:
            return float(time_s)
    raise AssertionError("never full")


@pytest.mark.parametrize(
    ("disk", "others", "retention"),
    [
        (100 * GIB, lambda t: 2 * GIB * t / HOUR, ROLLING),
        (100 * GIB, lambda t: 2 * GIB * t / HOUR + 20e6 * np.sin(t), ROLLING),  # noise
        (200 * GIB, lambda t: 0, Retention(100, 3, keep_every=500)),  # 5 GiB for good every 83 minutes
        (200 * GIB, lambda t: 0, Retention(100, 3, keep_every=250)),  # as only multiples of both are saved
        (60 * GIB, lambda t: GIB * t / HOUR, Retention(500, 9)),  # nine more checkpoints before it is steady
    ],
)
def test_the_forecast_comes_true(disk: float, others: Callable[[float], float], retention: Retention) -> None:
    last_s = 2.45 * HOUR  # between two saves
    found = forecast(seen(2.45, disk, others, retention), retention)
    assert found is not None
    expected_s = full_at(disk, others, retention) - last_s
    assert expected_s > 5 * HOUR
    # A kept checkpoint takes its bytes at once where the forecast spreads them.
    step_of_bytes = (retention.kept_every or retention.save_every) * STEP_S
    assert found.seconds == pytest.approx(expected_s, abs=1.1 * step_of_bytes + 0.02 * expected_s)
    assert found.latest_s >= found.seconds


@pytest.mark.parametrize(
    "others",
    [
        lambda t: 0.0,  # checkpoints come and go
        lambda t: 50 * GIB * (t > 1.2 * HOUR),  # somebody's file
        lambda t: 50 * GIB * (t > 2.2 * HOUR),
        lambda t: 20 * GIB * min(t / HOUR, 1.0),  # growth that is over
        lambda t: -10 * GIB * t / HOUR,  # it empties
        lambda t: 5 * GIB * np.sin(t / 300),  # a scratch directory of others
    ],
)
def test_what_does_not_grow_on_is_no_reason_for_a_forecast(others: Callable[[float], float]) -> None:
    assert forecast(seen(3, 200 * GIB, others), ROLLING) is None


def test_checkpoints_that_are_kept_for_good_take_no_place_of_those_to_come() -> None:
    """A run that was resumed with a larger `keep_last`, beside twenty that stay."""
    retention = Retention(100, 5, keep_every=1000)

    def forecast_with(steps: list[int]) -> float:
        uses = seen(2.45, 300 * GIB, lambda t: 2 * GIB * t / HOUR, retention)
        checkpoints = dict.fromkeys(steps, SIZE)
        found = forecast([*uses[:-1], replace(uses[-1], checkpoints=checkpoints)], retention)
        assert found is not None
        return found.seconds

    alone = forecast_with([20_600])
    assert forecast_with([*range(1000, 21_000, 1000), 20_600]) == alone
    assert forecast_with([20_500, 20_600]) > alone
    assert forecast_with([*range(1000, 21_000, 1000), *range(20_100, 20_700, 100)]) > forecast_with([20_500, 20_600])


def test_a_disk_that_is_full_only_after_the_end_of_the_run_is_no_trouble_of_it() -> None:
    others = lambda t: 2 * GIB * t / HOUR  # noqa: E731
    uses = seen(2.45, 100 * GIB, others)
    found = forecast(uses, ROLLING)
    assert found is not None
    end = uses[-1].step + int(found.seconds / STEP_S)
    assert forecast(uses, replace(ROLLING, stop_step=end - 100)) is None
    assert forecast(uses, replace(ROLLING, stop_step=end + 100)) == found


def test_less_than_an_hour_and_a_checkpoint_of_unknown_size_say_nothing() -> None:
    assert forecast(seen(0.8, 100 * GIB, lambda t: 30 * GIB * t / HOUR), ROLLING) is None
    assert forecast(seen(3, 100 * GIB, lambda t: 3 * GIB * t / HOUR, Retention(5000, 3)), ROLLING) is None


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_a_disk_that_fills_is_said_once_with_the_hours_left_and_again_after_it_was_emptied(tmp_path: Path) -> None:
    clock, free = Clock(), [30.0 * GIB]
    (tmp_path / "checkpoints" / "step_00000100").mkdir(parents=True)
    watch = DiskWatch(tmp_path, tmp_path / "checkpoints", ROLLING, lambda path: int(free[0]), clock)

    def hours(count: float, gib_an_hour: float) -> list[Notice]:
        said = []
        for _ in range(int(count * 12)):
            clock.s += 300.0
            free[0] -= gib_an_hour * GIB / 12
            said += watch.look(step=0)
        return said

    (notice,) = hours(3, gib_an_hour=1.5)
    assert notice.event == "disk_full_soon"
    free_then = notice.fields["free_bytes"] / GIB
    assert notice.fields["hours"] == pytest.approx(free_then / 1.5, rel=0.02)
    assert "1.50 GiB an hour" in notice.text
    free[0] = 300.0 * GIB
    assert hours(8, gib_an_hour=1.5) == [], "ten days left"
    free[0] = 20.0 * GIB
    assert [notice.event for notice in hours(8, gib_an_hour=1.5)] == ["disk_full_soon"]


def test_a_slow_disk_is_not_walked_more_than_once_a_minute(tmp_path: Path) -> None:
    clock, asked = Clock(), []
    watch = DiskWatch(tmp_path, tmp_path, ROLLING, lambda path: asked.append(path) or GIB, clock)  # type: ignore[func-returns-value]
    for clock.s in range(0, 121, 10):
        watch.look(0)
    assert len(asked) == 3


def test_on_a_real_disk_a_checkpoint_that_will_not_fit_is_said_before_the_save_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with small_disk(tmp_path / "mount", kib=1024) as disk:
        clock, checkpoint = Clock(), disk / "checkpoints" / "step_00000100"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.pt").write_bytes(bytes(400_000))
        (disk / "checkpoints" / "best").symlink_to(checkpoint.name)  # counted once
        watch = DiskWatch(disk, disk / "checkpoints", ROLLING, now=clock)
        assert watch.look(100) == []
        assert watch.use is not None
        assert 400_000 <= watch.use.run_bytes < 401_000
        ballast = fill(disk)
        clock.s += 60
        (notice,) = watch.look(110)
        assert (notice.event, notice.fields) == ("disk_no_room", {"needed": 400_000, "free_bytes": 0})
        clock.s += 60
        assert watch.look(120) == [], "once"
        ballast.unlink()
        clock.s += 60
        assert watch.look(130) == []


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    watch = DiskWatch(tmp_path / "gone", tmp_path / "gone" / "checkpoints", ROLLING)
    assert watch.look(0) == []
    assert watch.use is None
