"""The report as Markdown: what the page says in words and tables.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vesuvius.report.model import RunReport, Table
from vesuvius.report.share import part_rows
from vesuvius.runlog.markdown import escaped, table
from vesuvius.runlog.units import number


def render_markdown(reports: Sequence[RunReport], tables: Sequence[Table], made: str, page: str) -> str:
    """The whole text; the curves are in the page beside it."""
    title = " and ".join(report.name for report in reports)
    lines = [f"# Run {escaped(title)}", "", f"The same with curves: [{page}]({page}).", ""]
    for each in tables:
        lines += table(each.title, each.columns, each.rows)
    for report in reports:
        lines += [f"# {escaped(report.name)}", ""] if len(reports) > 1 else []
        lines += [f"**Verdict.** {escaped(report.verdict)}", ""]
        lines += table("Result", ("", "value"), list(report.facts.items()))
        if report.parts:
            columns = ("part", "class", "time, s", "share", "p50, ms", "p95, ms")
            lines += table("Where the time went", columns, part_rows(report.parts, number))
            lines += [escaped(report.parts_note), ""]
        lines += [
            f"- **{'met' if target.met else 'not met'}**: {escaped(target.name)} {target.found} of the working time "
            f"(target: {target.wanted})"
            for target in report.targets
        ]
        lines += [""] if report.targets else []
        for each in report.tables:
            lines += table(each.title, each.columns, each.rows)
            lines += [escaped(each.note), ""] if each.note else []
    return "\n".join([*lines, escaped(made), ""])
