"""The pages in a real browser: the first screen holds headline and chart, and a phone does not scroll sideways."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.example_pages import main
from tools.report_shots import DESKTOP, PHONE, browser, measured, problems


@pytest.mark.long
def test_every_page_answers_on_its_first_screen_and_fits_a_phone(tmp_path: Path) -> None:
    program = browser()
    if program is None:
        pytest.skip("needs a browser (Chromium or Chrome)")
    main(tmp_path)
    for page in sorted(tmp_path.glob("*.html")):
        for width in (DESKTOP, PHONE):
            found = measured(program, page, width)
            assert problems(found) == [], f"{page.name} at {width} pixels"
            assert width == PHONE or 100 < float(str(found["lead"])) < 800, page.name
