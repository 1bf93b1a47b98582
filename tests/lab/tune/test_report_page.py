"""The page in a real browser: it needs nothing from outside, fits a phone, follows the colour scheme, escapes all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.lab.tune.made_up import LEDGER, SPACE, make_report
from vesuvius.lab.tune.report.curves import draw_curves
from vesuvius.lab.tune.report.html import render_html
from vesuvius.lab.tune.report.report import Report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: the Debian package chromium")

HOSTILE = "configs/<script>document.title='owned'</script>&amp;\"'.yaml"
LOOK = """<script>
const box = document.querySelector("table").parentElement, image = document.querySelector("img");
const seen = {
  width: innerWidth, page: document.documentElement.scrollWidth, body: document.body.scrollWidth,
  table: box.scrollWidth, box: box.clientWidth, paper: getComputedStyle(document.body).backgroundColor,
  picture: image.currentSrc.length, natural: image.naturalWidth, title: document.title,
  text: document.body.innerText, loaded: performance.getEntriesByType("resource").map(entry => entry.name),
};
parent.document.body.textContent = "found:" + encodeURIComponent(JSON.stringify(seen)) + ":";
</script>"""


class Names(HTMLParser):
    """Addresses in attributes, and the tags that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "action", "data")]


def page(report: Report) -> str:
    return render_html(report, draw_curves(LEDGER, SPACE), draw_curves(LEDGER, SPACE, dark=True))


def names_of(html: str) -> Names:
    names = Names()
    names.feed(html)
    return names


def look(html: str, directory: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    """What a browser of this width makes of the page: in a frame, as no window of it is narrower than 500 pixels."""
    assert CHROMIUM is not None
    inner = escape(html.replace("</body>", LOOK + "</body>"))
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{inner}"></iframe>'
    (directory / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frame}", encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        f"--user-data-dir={directory / 'profile'}",
        "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        (directory / "page.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"found:(.*?):", done.stdout)
    assert found, done.stderr
    seen: dict[str, Any] = json.loads(unquote(found[1]))
    return seen


def test_nothing_is_fetched_from_anywhere() -> None:
    html = page(make_report())
    names = names_of(html)
    assert len(names.addresses) == 3  # both pictures and the empty icon
    assert all(address.startswith("data:") for address in names.addresses)
    assert not {"script", "iframe", "object", "embed"} & set(names.tags)
    assert "url(" not in html
    assert "@import" not in html


def test_what_the_user_wrote_cannot_become_markup() -> None:
    report = make_report(name="<b>", source=HOSTILE)
    report = replace(report, machine=(HOSTILE,), reason=HOSTILE, changes=(replace(report.changes[0], reason=HOSTILE),))
    names = names_of(page(report))
    assert not {"script", "b"} & set(names.tags)
    assert names_of(page(make_report())).tags.count("table") == names.tags.count("table")


@needs_browser
@pytest.mark.parametrize("width", [1280, 400, 320])
def test_the_page_never_scrolls_sideways_only_its_tables_do(tmp_path: Path, width: int) -> None:
    long = "training.this_is_a_key_that_is_longer_than_any_phone_is_wide_" * 3
    report = replace(make_report(source=f"configs/{'deep/' * 30}{'x' * 120}.yaml"), reason=long, machine=(long,))
    seen = look(page(report), tmp_path, width)
    assert seen["width"] == width
    assert max(seen["page"], seen["body"]) <= width
    assert seen["box"] < width
    if width < 1000:
        assert seen["table"] > seen["box"]


@needs_browser
def test_it_follows_the_colour_scheme_with_its_picture(tmp_path: Path) -> None:
    html = page(make_report())
    light, dark = (look(html, tmp_path, 1280, dark=scheme) for scheme in (False, True))
    assert light["paper"] == "rgb(255, 255, 255)"
    assert dark["paper"] == "rgb(20, 23, 27)"
    assert light["natural"] == dark["natural"] > 1000
    lengths = [len(address) for address in names_of(html).addresses if address.startswith("data:image")]
    assert [dark["picture"], light["picture"]] == lengths


@needs_browser
def test_a_browser_shows_hostile_names_as_text_and_loads_nothing(tmp_path: Path) -> None:
    seen = look(page(make_report(source=HOSTILE)), tmp_path, 1280)
    assert seen["title"] == "Tune of exp001_full"
    assert HOSTILE in seen["text"]
    assert "B: 3.10 times the baseline's samples/s" in seen["text"]
    assert [name for name in seen["loaded"] if not name.startswith("data:")] == []
