"""Pages in a real browser: no sideways scroll on a phone or a desk, no request, every picture decoded, all on paper."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.recorded_runs import run_start, step, system, validation, verdict, write_preview, write_run
from vesuvius.commands import runs as command
from vesuvius.errors import EXIT_OK

_SPEC = importlib.util.spec_from_file_location("report_shots", REPOSITORY / "tools" / "report_shots.py")
assert _SPEC is not None
assert _SPEC.loader is not None
shots = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(shots)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shots.browser() is None, reason="there is no chromium: no page is looked at in a browser"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs, whose curves are folded, with long names and a long verdict."""
    folder, runs = tmp_path_factory.mktemp("pages"), []
    for name in ("a" * 70, "b"):
        run = folder / name
        steps = [step(n, loss=1 / n) for n in range(1, 40)]
        metrics = [run_start(), *steps, validation(9, 0.5), verdict(9, text="word " * 90), write_preview(run, 9)]
        runs.append(str(write_run(run, metrics, [system(n) for n in range(1, 40)])))
    assert command.report([*runs, "--out", str(folder / "out")]) == EXIT_OK
    return folder / "out" / "report.html"


@pytest.mark.parametrize("width", shots.WIDTHS)
def test_a_page_fits_its_width_asks_for_nothing_and_shows_its_pictures(page: Path, width: int) -> None:
    found = shots.measured(shots.browser(), page, width)
    assert shots.problems(found) == []
    assert found["pictures"] == 2


def test_what_is_wrong_with_a_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    wide = "<p style='width:999px'>x</p><img alt='torn' src='data:image/jpeg;base64,AAAA'><img src='http://nowhere.test/a'>"
    page.write_text(f"<!DOCTYPE html><html><body>{wide}</body></html>")
    found = [problem.partition(":")[0] for problem in shots.problems(shots.measured(shots.browser(), page, 390))]
    assert found[1:] == ["wide", "asked", "broken"]
    assert found[0].startswith("scrolls ")


def test_what_is_folded_on_a_screen_is_printed(page: Path, tmp_path: Path) -> None:
    shots.print_out(shots.browser(), page, tmp_path / "page.pdf")
    printed = len(re.findall(rb"/Type /Page\b", (tmp_path / "page.pdf").read_bytes()))
    style = page.read_text().replace("details::details-content", "nothing::before")
    (tmp_path / "folded.html").write_text(style)
    shots.print_out(shots.browser(), tmp_path / "folded.html", tmp_path / "folded.pdf")
    assert printed > len(re.findall(rb"/Type /Page\b", (tmp_path / "folded.pdf").read_bytes()))
