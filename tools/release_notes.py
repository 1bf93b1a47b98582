"""Check that a tag, the versions in the checkout and the changelog agree, and print the release notes of that version:
`python tools/release_notes.py v0.1.0`.  Needs no installation.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """Return the version that each file of the checkout names."""

    def found(name: str, pattern: str) -> str:
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.M)
        return match[1] if match else "none"

    return {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        "src/vesuvius/__init__.py": found("src/vesuvius/__init__.py", r'^__version__ = "(.+)"$'),
        "CITATION.cff": found("CITATION.cff", r"^version: (.+)$"),
    }


def notes_of(version: str, changelog: str) -> tuple[str, str]:
    """Return the date and the section of a version.  Raises ValueError: it has none, or lines are unreleased."""
    title = re.search(rf"^## {re.escape(version)} - (\d{{4}}-\d\d-\d\d)$\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if title is None:
        raise ValueError(f'CHANGELOG.md has no "## {version} - YYYY-MM-DD"; give "Unreleased" the version and the date')
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## )", changelog, re.M | re.S)
    if unreleased and unreleased[1].strip():
        raise ValueError('CHANGELOG.md has lines under "Unreleased"; move them to the version')
    return title[1], title[2].strip()


def main(tag: str) -> str:
    """Return the notes.  Raises ValueError with the remedy."""
    for file, version in versions().items():
        if tag != f"v{version}":
            raise ValueError(f"The tag {tag} does not fit {file}, which has version {version}; tag v{version}")
    date, notes = notes_of(tag.removeprefix("v"), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if f"date-released: {date}" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        raise ValueError(f"CITATION.cff has another date than CHANGELOG.md: date-released is to be {date}")
    return notes


if __name__ == "__main__":
    try:
        print(main(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
