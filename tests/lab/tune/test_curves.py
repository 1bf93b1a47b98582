"""The curves show each knob that was turned, with what was measured, predicted and failed."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.lab.tune.made_up import FOUR, LEDGER, SOURCE, SPACE, entry, measured
from tests.lab.tune.test_report import ON_CPU
from vesuvius.lab.tune.report.curves import draw_curves
from vesuvius.lab.tune.terms.trial import Entry

MEASURED, BAD, LIMIT, PAPER = (0x1D, 0x5F, 0xD1), (0xC6, 0x28, 0x28), (0xB2, 0x6A, 0x00), (255, 255, 255)
LEGEND = 40  # pixel rows at the top, in which every mark is explained


def pixels(png: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(png)) as image:
        image.load()
        return np.asarray(image.convert("RGB"))


def count(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    """Pixels of a colour below the legend."""
    return int((picture[LEGEND:] == colour).all(axis=-1).sum())


def test_measured_bad_and_limit_are_drawn() -> None:
    picture = pixels(draw_curves(LEDGER, SPACE))
    assert count(picture, MEASURED) > 1000
    assert count(picture, BAD) > 100
    assert count(picture, LIMIT) > 1000
    assert 0.7 < count(picture, PAPER) / (picture.size / 3) < 1


def test_a_tune_without_deaths_has_no_crosses() -> None:
    good = [done for done in LEDGER if done.outcome.ended == "ok"]
    assert count(pixels(draw_curves(good, SPACE)), BAD) == 0


def test_each_knob_that_was_turned_has_a_column_and_gpu_memory_a_row() -> None:
    three = pixels(draw_curves(LEDGER, SPACE))  # workers, micro-batch, switches
    two = pixels(draw_curves([done for done in LEDGER if done.trial.stage != "switches"], SPACE))
    assert three.shape[1] > two.shape[1]
    assert three.shape[0] > pixels(draw_curves(LEDGER, ON_CPU)).shape[0]


def test_the_dark_picture_differs_in_its_paper() -> None:
    light, dark = pixels(draw_curves(LEDGER, SPACE)), pixels(draw_curves(LEDGER, SPACE, dark=True))
    assert light.shape == dark.shape
    assert light[0, 0].sum() > 700
    assert dark[0, 0].sum() < 100


@pytest.mark.parametrize(
    "ledger",
    [
        LEDGER[:1],
        [entry(0, SOURCE, "baseline", ("failed", "no such volume"), (None, 20.0, 24.0))],
        [*LEDGER[:1], entry(1, FOUR, "workers", ("guard", "RAM"), (26.0, 28.0, 24.0))],
    ],
    ids=["baseline alone", "nothing measured", "one step that failed"],
)
def test_short_ledgers_are_drawn_too(ledger: list[Entry]) -> None:
    picture = pixels(draw_curves(ledger, SPACE))
    bad = any(done.outcome.ended != "ok" for done in ledger)
    assert (count(picture, BAD) > 0) == bad
    assert (count(picture, MEASURED) > 0) == any(done.outcome.measured is not None for done in ledger)


def test_requests_and_prefetch_are_knobs_of_their_own() -> None:
    more = [
        entry(1, replace(SOURCE, requests=32), "requests", measured(15.0, 21, 24), (14, 21, 24)),
        entry(2, replace(SOURCE, prefetch_factor=4), "prefetch", measured(14.0, 21, 24), (14, 21, 24)),
        entry(3, FOUR, "workers", measured(20.0, 21, 24), (14, 21, 24)),
    ]
    two, three = (pixels(draw_curves([LEDGER[0], *more[:n]], SPACE)).shape[1] for n in (2, 3))
    assert three > two
