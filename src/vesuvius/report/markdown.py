"""A report as Markdown: what the page says in words and tables.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vesuvius.report.content import RunReport, Table


def render_markdown(reports: Sequence[RunReport], made: str, page: str, tables: Sequence[Table] = ()) -> str:
    """The whole text; the curves are in the page, which lies in the same folder."""
    title = " and ".join(report.name for report in reports)
    lines = [f"# Run {_escaped(title)}", "", f"The same with curves: [{page}]({page}).", ""]
    lines += [line for each in tables for line in _table(each)]
    for report in reports:
        lines += [f"# {_escaped(report.name)}", ""] if len(reports) > 1 else []
        lines += [f"**Verdict.** {_escaped(report.verdict)}", ""]
        lines += _table(Table("Result", ("", "value"), tuple(report.facts.items())))
        lines += _table(report.time_table) if report.parts else []
        lines += [
            f"- **{'met' if target.met else 'not met'}**: {_escaped(target.name)} {target.found} of the working time "
            f"(target: {target.wanted})"
            for target in report.targets
        ]
        lines += [""] if report.targets else []
        lines += [line for each in report.tables for line in _table(each)]
    return "\n".join([*lines, _escaped(made), ""])


def _table(table: Table) -> list[str]:
    """The lines of a headed table, with an empty one after it; none where there are no rows."""
    if not table.rows:
        return []
    body = [table.columns, ["---"] * len(table.columns), *(map(_escaped, row) for row in table.rows)]
    note = [_escaped(table.note), ""] if table.note else []
    return [f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in body), "", *note]


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|~]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))", r"\\\1", text)
