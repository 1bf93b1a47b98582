"""Tables of a report in Markdown.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a headed table, with an empty one after it; none where there are no rows."""
    if not rows:
        return []
    body = [columns, ["---"] * len(columns), *([escaped(cell) for cell in row] for row in rows)]
    return [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in body), ""]


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|~]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))", r"\\\1", text)
