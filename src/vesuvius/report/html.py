"""The report as one HTML page that needs nothing else: style, pictures and curves are in it.  Pure.

All text comes from files that users write, so all of it is escaped; the page has no script.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from vesuvius.report.curves import Chart
from vesuvius.report.model import RunReport, Table
from vesuvius.report.pictures import Picture
from vesuvius.report.share import part_rows
from vesuvius.report.style import STYLE
from vesuvius.report.svg import draw, legend, off_scale
from vesuvius.runlog.units import format_duration, number

_FIGURE = re.compile(r"(-?[\d.,]+[\w+-]*( [%\w/]+)?|-|not known|)")


def render_html(
    reports: Sequence[RunReport],
    tables: Sequence[Table],
    charts: Sequence[Chart],
    pictures: Sequence[Picture],
    made: str,
) -> str:
    """The page.

    Args:
        tables, charts: of the comparison of several runs.
        made: when and by which command.
    """
    title = "Run " + " and ".join(report.name for report in reports)
    several = len(reports) > 1
    body = [f"<h1>{_text(title)}</h1>"]
    if several:
        body += [*map(_table, tables), _charts(charts)]
    for report in reports:
        body.append(f"<h2>{_text(report.name)}</h2>" if several else "")
        body += _run(report, folded=several)
    body.append(_pictures(pictures))
    body += [_config(report, several) for report in reports if report.config_text]
    body.append(f"<footer>{_text(made)}</footer>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _run(report: RunReport, folded: bool) -> list[str]:
    verdict = f'<p class="verdict"><b>Verdict.</b> {_text(report.verdict)}</p>'
    facts = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in report.facts.items())
    parts = [verdict, f'<dl class="facts">{facts}</dl>']
    if report.parts:
        parts.append(_parts(report))
    charts = _charts(report.charts)
    parts.append(f"<details><summary>Curves of {_text(report.name)}</summary>{charts}</details>" if folded else charts)
    return [*parts, *map(_table, report.tables)]


def _parts(report: RunReport) -> str:
    """A bar of the parts, the table of them, and the targets."""
    bar = "".join(
        f'<span class="b{index}" style="width:{100 * part.share:.3f}%" title="{_text(part.name)}"></span>'
        for index, part in enumerate(report.parts)
    )
    *parts, total = part_rows(report.parts, _seconds)
    rows = [(f'<i class="b{index}"></i>{_text(name)}', *map(_text, rest)) for index, (name, *rest) in enumerate(parts)]
    rows.append((f"<b>{total[0]}</b>", *total[1:]))
    met = "".join(
        f'<li class="{"met" if target.met else "missed"}"><b>{"met" if target.met else "not met"}</b> '
        f"{_text(target.name)} {_text(target.found)} of the working time (target: {_text(target.wanted)})</li>"
        for target in report.targets
    )
    columns = ("part", "class", "time", "share", "p50, ms", "p95, ms")
    return (
        f'<section><h2>Where the time went</h2><div class="bar">{bar}</div>{_grid(columns, rows)}'
        f"<p>{_text(report.parts_note)}</p><ul>{met}</ul></section>"
    )


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of escaped cells that scrolls where the page is narrow; columns of figures stand to the right."""
    kinds = [
        ' class="n"' if all(_FIGURE.fullmatch(row[place]) for row in rows) else "" for place in range(len(columns))
    ]
    head = "".join(f"<th{kind}>{cell}</th>" for kind, cell in zip(kinds, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _seconds(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 60 else f"{number(seconds)} s"


def _charts(charts: Sequence[Chart]) -> str:
    return f'<section class="charts">{"".join(map(_chart, charts))}</section>' if charts else ""


def _chart(chart: Chart) -> str:
    names = [f'<li><i class="b{colour}"></i>{_text(name)}: {_text(came)}</li>' for colour, name, came in legend(chart)]
    for name, value in chart.limits:
        names.append(f'<li><i class="dash"></i>{_text(name)}: {number(value)} {_text(chart.unit)}</li>')
    beyond = off_scale(chart)
    notes = [chart.note] if chart.note else []
    if beyond is not None:
        notes.append(f"beyond the axis: up to {number(beyond)} {chart.unit}")
    note = f"<p>{_text('; '.join(notes))}</p>" if notes else ""
    return (
        f"<figure><figcaption>{_text(chart.title)} <small>{_text(chart.unit)}{', logarithmic' if chart.log else ''}"
        f"</small></figcaption>{draw(chart)}<ul>{''.join(names)}</ul>{note}</figure>"
    )


def _table(table: Table) -> str:
    rows = [[*map(_text, row)] for row in table.rows]
    if table.bars:
        longest = max(table.bars) or 1.0
        rows = [
            [*row, f'<span class="meter b2" style="width:{100 * value / longest:.1f}%"></span>']
            for row, value in zip(rows, table.bars, strict=True)
        ]
    grid = _grid([*map(_text, table.columns), *([""] if table.bars else [])], rows)
    note = f"<p>{_text(table.note)}</p>" if table.note else ""
    return f"<section><h2>{_text(table.title)}</h2>{grid}{note}</section>"


def _pictures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    figures = []
    for picture in pictures:
        shown = "<p>the picture cannot be read, or the page has no room for it</p>"
        if picture.data is not None:
            data = base64.b64encode(picture.data).decode("ascii")
            shown = f'<img alt="{_text(picture.caption)}" src="data:image/jpeg;base64,{data}">'
        figures.append(f"<figure><figcaption>{_text(picture.caption)}</figcaption>{shown}</figure>")
    return f'<section><h2>Pictures</h2><div class="pictures">{"".join(figures)}</div></section>'


def _config(report: RunReport, several: bool) -> str:
    whose = f" of {report.name}" if several else ""
    return (
        f"<details><summary>Config{_text(whose)}, every key with the value used</summary>"
        f"<pre>{_text(report.config_text)}</pre></details>"
    )


def _text(text: str) -> str:
    """Escaped; what XML does not allow becomes a question mark."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "?" for c in text), quote=True)
