"""Renders pages of `vesuvius` with a headless Chromium: on a phone, in dark mode, on paper, without a network.

    python tools/report_shots.py runs/demo/reports/*/report.html --out shots
    PYTHONPATH=. python tools/example_pages.py pages
    python tools/report_shots.py pages/{report,tune,bench,profile,evaluation}.html --docs docs

`--out` writes NAME-phone.png (400 pixels wide), NAME-light.png, NAME-dark.png and NAME.pdf of each page, and reports
problems: it scrolls sideways, requests anything from outside, or has a picture that cannot be decoded; then the exit
code is 1.  `--docs` writes NAME.png of the first screen, in 64 colors.  Needs `chromium` (apt-get install chromium),
`chromium-browser` or `google-chrome`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

PHONE, DESKTOP = 400, 1280
_SCREEN = 800
# A frame as wide as a phone: a window cannot be narrower than 500 pixels.  The page reports its measurements to it.
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
  lead: (document.querySelector(".bars") || document.body).getBoundingClientRect().bottom,
  height: page.scrollHeight}), "*"); });</script>"""


def browser() -> str | None:
    """Path of the browser; None if none is installed."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


def measured(program: str, page: Path, width: int) -> dict[str, object]:
    """Measurements of the page in a frame of `width` pixels: see `_MEASURE`."""
    with tempfile.TemporaryDirectory() as folder:
        frame = _framed(page, Path(folder), width, _SCREEN, _MEASURE)
        dom = _run(program, Path(folder), "--dump-dom", "--virtual-time-budget=5000", frame.as_uri())
    found = re.search(r'<pre id="found">(.+?)</pre>', dom, re.DOTALL)
    if found is None:
        raise RuntimeError(f"{page} reported no measurements: {dom[-500:]}")
    plain: dict[str, object] = json.loads(unescape(found[1]))
    return plain


def problems(found: dict[str, object]) -> list[str]:
    """The problems of a measured page, in words."""
    words = [f"scrolls {found['sideways']} pixels sideways"] if found["sideways"] else []
    return words + [f"{name}: {found[name]}" for name in ("wide", "asked", "broken") if found[name]]


def shoot(program: str, page: Path, out: Path, width: int, height: int, dark: bool = False) -> None:
    """Write a PNG of the page from its top."""
    with tempfile.TemporaryDirectory() as folder:
        frame = _framed(page, Path(folder), width, height)
        scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        size = f"--window-size={max(width, 500)},{height}"
        _run(program, Path(folder), size, "--hide-scrollbars", f"--screenshot={out.resolve()}", *scheme, frame.as_uri())


def print_out(program: str, page: Path, out: Path) -> None:
    """Write a PDF, as printed."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--print-to-pdf={out.resolve()}", "--no-pdf-header-footer", page.resolve().as_uri()]
        _run(program, Path(folder), *arguments)


def _framed(page: Path, folder: Path, width: int, height: int, script: str = "") -> Path:
    copy, frame = folder / "page.html", folder / "frame.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{script}</body>"), encoding="utf-8")
    frame.write_text(_FRAME.format(page=copy.name, width=width, height=height), encoding="utf-8")
    return frame


def _run(program: str, folder: Path, *arguments: str) -> str:
    """Run the browser without a network, with a temporary profile; returns its standard output."""
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="check all pages")
    where.add_argument("--docs", type=Path, metavar="DIR", help="write the first screen of each page")
    args = parser.parse_args()
    program = browser()
    if program is None:
        sys.exit("No chromium was found; install it: apt-get install chromium")
    (args.out or args.docs).mkdir(parents=True, exist_ok=True)
    wrong = False
    for page in args.pages:
        if args.docs:
            _first_screen(program, page, args.docs / f"{page.stem}.png")
            continue
        for width, looks in ((PHONE, ("phone",)), (DESKTOP, ("light", "dark"))):
            found = measured(program, page, width)
            wrong = wrong or bool(problems(found))
            print(f"{page} at {width} pixels: {'; '.join(problems(found)) or 'fine'}")
            for look in looks:
                height = min(int(str(found["height"])), 12_000)
                shoot(program, page, args.out / f"{page.stem}-{look}.png", width, height, look == "dark")
        print_out(program, page, args.out / f"{page.stem}.pdf")
    return int(wrong)


def _first_screen(program: str, page: Path, out: Path) -> None:
    from PIL import Image

    shoot(program, page, out, DESKTOP, _SCREEN)
    with Image.open(out) as image:
        small = image.convert("RGB").crop((0, 0, DESKTOP, _SCREEN)).quantize(64)
    small.save(out, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
