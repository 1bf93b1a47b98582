"""A report as one page that needs nothing else: no network, no script; light or dark as the system is.  Pure."""

from __future__ import annotations

from base64 import b64encode
from html import escape

from vesuvius.lab.tune.report.report import Report
from vesuvius.lab.tune.report.tables import (
    Table,
    changes_table,
    options_table,
    quality_table,
    stages_table,
    trials_table,
)
from vesuvius.lab.tune.report.text import end, headline, option_words, origin, summary, times_note

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f4f6f9; --ink: #1c2128; --faint: #59636e;
  --line: #d5dae0; --accent: #1d5fd1; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --card: #1d2127; --ink: #e3e6ea; --faint: #9aa4af;
  --line: #343b44; --accent: #7db0ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 88rem; margin: 0 auto; padding: 1.25rem 1rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--faint); margin: 0; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .6rem; }
.headline { font-size: 1.6rem; line-height: 1.25; font-weight: 650; margin: .2rem 0 1rem; }
dl { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .4rem 1rem; margin: 0; }
dl div { display: grid; grid-template-columns: 10rem 1fr; gap: .2rem 1rem; padding: .5rem 0; }
dl div + div { border-top: 1px solid var(--line); }
dt { font-weight: 600; }
dd { margin: 0; }
ul { margin: .8rem 0; padding-left: 1.2rem; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; overflow-wrap: normal; }
th, td { padding: .4rem .7rem; text-align: left; vertical-align: top; }
td { border-top: 1px solid var(--line); min-width: 4rem; }
th { background: var(--card); vertical-align: bottom; }
td.words { min-width: 17rem; overflow-wrap: break-word; }
td:first-child { white-space: nowrap; }
.n { text-align: right; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
.chosen td { font-weight: 600; }
.chosen td:first-child { box-shadow: inset .25rem 0 var(--accent); }
.ended-badly td:last-child { color: var(--bad); }
pre { margin: 1rem 0; padding: .7rem 1rem; white-space: pre-wrap; background: var(--card); border-radius: .5rem;
  border: 1px solid var(--line); border-left: .25rem solid var(--accent); font: .9rem/1.4 ui-monospace, monospace; }
.note, footer { color: var(--faint); font-size: .875rem; }
img { display: block; width: 100%; min-width: 44rem; }
@media (max-width: 40rem) { dl div { grid-template-columns: 1fr; } .headline { font-size: 1.3rem; } }
"""
_LONG = ("why", "why it was left", "changes to the source", "changed", "ended")


def render_html(report: Report, light_png: bytes, dark_png: bytes) -> str:
    """The page.

    Args:
        light_png, dark_png: the curves for either scheme.
    """
    points = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{_words(sentence)}</dd></div>" for label, sentence in summary(report)
    )
    chosen = [option.name == report.best.name for option in report.options]
    bad = [trial.ended != "ok" for trial in report.trials]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Tune of {escape(report.name)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Tune of {escape(report.name)}, {escape(report.date)}</h1>
<p class="headline">{escape(headline(report))}</p>
<dl>{points}</dl>
<pre>{escape(report.train_command)}</pre>
{_table(options_table(report), ["chosen" if this else "" for this in chosen])}
<ul>{"".join(f"<li>{_words(words)}</li>" for words in option_words(report))}</ul>
<p class="note">{escape(times_note(report))}</p>
{_table(changes_table(report))}
{_table(stages_table(report))}
<p class="note">The tune ended: {escape(end(report))}.</p>
<h2>Curves</h2>
<div class="box"><picture><source srcset="{_data(dark_png)}" media="(prefers-color-scheme: dark)">
<img src="{_data(light_png)}" alt="samples/s, RAM and VRAM of the trials, for each knob"></picture></div>
{_table(trials_table(report), ["ended-badly" if this else "" for this in bad])}
{_table(quality_table(report))}
<h2>How this was made</h2>
<footer>{"".join(f"<div>{escape(line)}</div>" for line in origin(report))}</footer>
</main>
</body>
</html>
"""


def _table(table: Table, classes: list[str] | None = None) -> str:
    if not table.rows:
        return ""
    marks = [
        "n" if right else "words" if name in _LONG else ""
        for name, right in zip(table.columns, table.numeric, strict=True)
    ]
    head = "".join(f'<th class="{mark}">{escape(name)}</th>' for mark, name in zip(marks, table.columns, strict=True))
    body = "".join(
        f'<tr class="{name}">'
        + "".join(f'<td class="{mark}">{_words(cell)}</td>' for mark, cell in zip(marks, row, strict=True))
        + "</tr>\n"
        for name, row in zip(classes or [""] * len(table.rows), table.rows, strict=True)
    )
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="box"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody>\n</table></div>"
    )


def _words(text: str) -> str:
    """Escaped, with arrows that no line break can split."""
    return escape(text).replace(" -&gt; ", " \N{RIGHTWARDS ARROW} ")


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"
