"""Renders pages of `vesuvius` with a headless Chromium: on a phone, in dark mode, on paper, without a network.

    python tools/report_shots.py runs/demo/reports/*/report.html --out shots
    python tools/report_shots.py runs/demo/reports/*/report.html --picture docs/report.png --height 1420

Writes NAME-phone.png (390 pixels wide), NAME-dark.png and NAME.pdf of each page, and reports problems: it scrolls
sideways, requests anything from outside, or has a picture that cannot be decoded; then the exit code is 1.  Needs
`chromium` (apt-get install chromium), `chromium-browser` or `google-chrome`, and no Python packages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import unescape
from pathlib import Path

WIDTHS = (390, 1280)
# A frame as wide as a phone: a window cannot be narrower than 500 pixels.  The page tells its frame what it measures.
_FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark">
<style>body{{margin:0}}iframe{{border:0}}</style>
<iframe src="{page}" width="{width}" height="{height}"></iframe><pre id="found"></pre>
<script>onmessage = event => {{ document.getElementById("found").textContent = event.data; }}</script>"""
_MEASURE = """<script>addEventListener("load", () => {
const all = [...document.querySelectorAll("body *")], page = document.documentElement;
parent.postMessage(JSON.stringify({
  sideways: page.scrollWidth - page.clientWidth,
  wide: all.filter(e => !e.closest(".scroll,pre") && e.getBoundingClientRect().right > page.clientWidth + 1)
    .map(e => e.tagName),
  asked: performance.getEntriesByType("resource").map(e => e.name).filter(name => !name.startsWith("data:")),
  broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.alt),
  pictures: document.images.length, height: page.scrollHeight}), "*"); });</script>"""


_ONLY = """<script>addEventListener("load", () => {{
const pieces = [...document.querySelectorAll("figure, main > :not(.charts)")];
const kept = pieces.filter(e => {texts}.some(text => e.textContent.includes(text)));
for (const e of pieces) if (!kept.some(k => k.contains(e))) e.style.display = "none"; }});</script>"""


def browser() -> str | None:
    """The program; None where there is none."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


def measured(program: str, page: Path, width: int) -> dict[str, object]:
    """What the page looks like in a frame of so many pixels: see `_MEASURE`."""
    with tempfile.TemporaryDirectory() as folder:
        frame = _framed(page, Path(folder), width, 2000, _MEASURE)
        dom = _run(program, Path(folder), "--dump-dom", "--virtual-time-budget=5000", frame.as_uri())
    found = re.search(r'<pre id="found">(.+?)</pre>', dom, re.DOTALL)
    if found is None:
        raise RuntimeError(f"{page} told nothing of itself: {dom[-500:]}")
    plain: dict[str, object] = json.loads(unescape(found[1]))
    return plain


def problems(found: dict[str, object]) -> list[str]:
    """What is wrong, in words."""
    words = [f"scrolls {found['sideways']} pixels sideways"] if found["sideways"] else []
    return words + [f"{name}: {found[name]}" for name in ("wide", "asked", "broken") if found[name]]


def shoot(
    program: str, page: Path, out: Path, width: int, height: int, dark: bool = False, only: Sequence[str] = ()
) -> None:
    """A PNG of the page from its top, or of the figures and sections alone that hold one of some texts."""
    with tempfile.TemporaryDirectory() as folder:
        script = _ONLY.format(texts=json.dumps([*only])) if only else ""
        frame = _framed(page, Path(folder), width, height, script)
        scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        size = f"--window-size={max(width, 500)},{height}"
        _run(program, Path(folder), size, "--hide-scrollbars", f"--screenshot={out}", *scheme, frame.as_uri())


def print_out(program: str, page: Path, out: Path) -> None:
    """A PDF, as a printer gets it."""
    with tempfile.TemporaryDirectory() as folder:
        _run(program, Path(folder), f"--print-to-pdf={out}", "--no-pdf-header-footer", page.resolve().as_uri())


def _framed(page: Path, folder: Path, width: int, height: int, script: str = "") -> Path:
    copy, frame = folder / "page.html", folder / "frame.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{script}</body>"), encoding="utf-8")
    frame.write_text(_FRAME.format(page=copy.name, width=width, height=height), encoding="utf-8")
    return frame


def _run(program: str, folder: Path, *arguments: str) -> str:
    """Without a network, in a profile that is thrown away; standard output."""
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="check all pages")
    where.add_argument("--picture", type=Path, metavar="FILE", help="of the last page, 1024 pixels wide, for the docs")
    parser.add_argument("--height", type=int, default=1090, help="of that picture")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="its figures and sections")
    args = parser.parse_args()
    program = browser()
    if program is None:
        sys.exit("there must be a chromium; got none; apt-get install chromium")
    if args.picture:
        shoot(program, args.pages[-1], args.picture.resolve(), 1024, args.height, only=args.only)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    wrong = False
    for page in args.pages:
        name = f"{page.parent.parent.parent.name}-{page.stem}"
        for width in WIDTHS:
            found = measured(program, page, width)
            wrong = wrong or bool(problems(found))
            print(f"{page} at {width} pixels: {'; '.join(problems(found)) or 'fine'}, {found['pictures']} pictures")
            look = "phone" if width == WIDTHS[0] else "dark"
            height = min(int(str(found["height"])), 12_000)
            shoot(program, page, (args.out / f"{name}-{look}.png").resolve(), width, height, look == "dark")
        print_out(program, page, (args.out / f"{name}.pdf").resolve())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
