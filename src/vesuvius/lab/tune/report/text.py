"""A report in words: its sentences, which Markdown and the page share, and the Markdown.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vesuvius.lab.tune.report.options import Option, grown_words
from vesuvius.lab.tune.report.report import NEAR, Report
from vesuvius.lab.tune.report.tables import (
    Table,
    changes_table,
    number,
    options_table,
    quality_table,
    seconds,
    stages_table,
    trials_table,
)
from vesuvius.observe.units import format_duration, format_percent, size_text

_MIND = "What to mind"


def headline(report: Report) -> str:
    """What came of it, in one line."""
    if report.gain is None:
        return "no recommendation: no trial ended well"
    if not report.changes:
        return "the config is as it should be: nothing that was tried is worth a change"
    return f"B: {number(report.gain)} times the baseline's samples/s"


def summary(report: Report) -> list[tuple[str, str]]:
    """What held the baseline up, what to run, what it gives, how sure, what limits it: a label and a sentence each."""
    sentences = [
        ("What held it up", _held_up(report)),
        ("What to run now", _to_run(report)),
        ("What it gives", _gives(report)),
        ("How sure", _how_sure(report)),
        ("What limits it now", _limits(report)),
    ]
    if report.best.global_batch != report.horizon.global_batch:
        sentences.append((_MIND, grown_words(report.best.global_batch, report.horizon)))
    return [(label, sentence) for label, sentence in sentences if sentence]


def end(report: Report) -> str:
    """Why the tune ended; what it says of the stages too stands in their table."""
    stages = "; ".join(f"{stage}: {why}" for stage, why in report.ended.items())
    return report.reason.removesuffix(f": {stages}")


def yaml_header(report: Report) -> list[str]:
    """Lines for the top of the tuned config."""
    return [
        f"{report.date}: {headline(report)}, after {len(report.trials)} trials in {format_duration(report.spent_s)}.",
        f"Command: {report.command}",
        *(f"Measured on: {line}" for line in report.machine),
        *(f"{label}: {sentence}" for label, sentence in summary(report) if label == _MIND),
    ]


def render_markdown(report: Report) -> str:
    """The whole report; the curves lie beside it as curves.png."""
    lines = [f"# Tune of {_escaped(report.name)}", "", f"**{_escaped(headline(report))}.**", ""]
    for label, sentence in summary(report):
        lines += [f"- **{label}:** {_escaped(sentence)}"]
    lines += ["", "```", report.train_command, "```", ""]
    lines += _markdown_table(options_table(report))
    lines += [*(f"- {_escaped(words)}" for words in option_words(report)), "", _escaped(times_note(report)), ""]
    for table in (changes_table(report), stages_table(report)):
        lines += _markdown_table(table)
    lines += [f"The tune ended: {_escaped(end(report))}.", "", "![samples/s, RAM and VRAM per knob](curves.png)", ""]
    for table in (trials_table(report), quality_table(report)):
        lines += _markdown_table(table)
    lines += ["## How this was made", "", *(f"- {_escaped(line)}" for line in origin(report)), ""]
    return "\n".join(lines)


def option_words(report: Report) -> list[str]:
    """Why each option is what it is."""
    return [f"{option.name}: {option.words}" for option in report.options]


def option_line(option: Option) -> str:
    """An option in one line, for a terminal."""
    about = "" if option.measured else "about "
    parts = [f"{about}{number(option.samples_s)} samples/s" if option.samples_s else "samples/s not known"]
    if option.step_s is not None and option.total_s is not None:
        parts += [f"a step in {seconds(option.step_s)}", f"{format_duration(option.total_s)} for the whole run"]
    parts.append(f"{size_text(option.ram_bytes)} of RAM")
    if option.vram_bytes is not None:
        parts.append(f"{size_text(option.vram_bytes)} of VRAM")
    return f"{option.name}: {', '.join(parts)}, memory risk {option.risk} ({option.words})"


def times_note(report: Report) -> str:
    """What the times of the options are of."""
    h = report.horizon
    whole = f"{h.epochs} of them"
    if h.steps < h.steps_per_epoch * h.epochs:
        whole = f"{h.steps} steps, where training.max_steps ends it"
    note = (
        f"An epoch is {h.steps_per_epoch} steps, the whole run {whole}; times are of training steps alone, without "
        "validation, saving and pictures. ~ = predicted, not measured. Memory risk: how near the peak of the whole run "
        "comes to the limits at which trials end: low below 70 % of them, medium below 90 %."
    )
    if report.scale_batch:
        note += " The batch was allowed to grow: the number of steps stays, and a step may hold more samples."
    return note


def origin(report: Report) -> list[str]:
    """How the report came about."""
    limits = f"Limits: {size_text(report.ram_limit_bytes)} of RAM"
    if report.vram_limit_bytes is not None:
        limits += f", {size_text(report.vram_limit_bytes)} of VRAM"
    return [
        f"Command: {report.command}",
        f"Config: {report.source}" + (f" -> {report.tuned}" if report.tuned else ""),
        *(f"Machine: {line}" for line in report.machine),
        f"Goal: {report.goal}; {len(report.trials)} trials took {format_duration(report.spent_s)} of a budget of "
        f"{format_duration(report.budget_s)}",
        f"{limits}; no trial is started that is predicted to pass them",
        f"Date: {report.date}; " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]


def _held_up(report: Report) -> str:
    baseline = report.baseline
    if baseline is None:
        return f"not known: no trial of the baseline ended well ({report.reason})"
    which = "the baseline" if baseline.as_the_source else "the baseline (the config made smaller until it fitted)"
    kind = baseline.bound if baseline.cause is None else f"{baseline.bound} ({baseline.cause})"
    # The run's own words begin with the kind and end in what it would have tried next, which the tune has done.
    verdict = baseline.verdict.partition("; step p50 ")[0]
    own = verdict.removeprefix(f"{kind}: ").removeprefix(f"{baseline.bound}: ")
    if own != verdict:
        return f"{kind}: {which} {own}"
    return f"{kind}, says {which}: {verdict}" if verdict else f"{kind}, says {which}"


def _to_run(report: Report) -> str:
    if report.tuned is None:
        return f"{report.source} as it is"
    if not report.changes:
        return (
            f"{report.tuned}: {report.source} with the overrides of the tune's command line, and nothing else changed"
        )
    changed = ", ".join(f"{change.knob} {change.before} -> {change.after}" for change in report.changes)
    return f"{report.tuned}: {changed}"


def _gives(report: Report) -> str:
    best, baseline = report.best, report.baseline
    if report.gain is None or baseline is None or best.step_s is None or best.total_s is None:
        return "not measured"
    step, total = seconds(best.step_s), format_duration(best.total_s)
    if not report.changes:
        return f"{number(best.samples_s)} samples/s, a step in {step}, {total} for the whole run"
    return (
        f"{number(report.gain)} times the samples/s: {number(best.samples_s)} instead of {number(baseline.samples_s)}; "
        f"a step in {step} instead of {seconds(baseline.step_s)}; {total} for the whole run instead of "
        f"{format_duration(baseline.total_s)}"
    )


def _how_sure(report: Report) -> str:
    sure = report.sureness
    if sure is None:
        return "not at all: the figures are predicted" if report.best.samples_s else "nothing was measured"
    half = (sure.high - sure.low) / (sure.high + sure.low)
    trials = f"{len(sure.trials)} trials" if len(sure.trials) > 1 else "one trial"
    words = [f"samples/s are known to ±{format_percent(half)} (95 %), from {sure.steps} steps in {trials}"]
    words.append(
        "measured again beside its runner-up, in turns" if sure.checked else "not measured again beside a rival"
    )
    if near := [f"{q.within} of {q.trials} ({q.quantity})" for q in report.quality if q.trials]:
        within = f"predictions were within {format_percent(NEAR)} in {', '.join(near)}"
        words.append(f"{within} trials that were the first of their setting")
    words.append("settings whose gain was within the noise were not taken")
    return "; ".join(words)


def _limits(report: Report) -> str:
    """What ended a stage or the tune before nothing more could be gained; '' = nothing did."""
    caps = [f"{stage}: {why.removeprefix('cap: ')}" for stage, why in report.ended.items() if why.startswith("cap: ")]
    spent = [f"{end(report)}; a larger --budget tries more"] if report.reason.startswith("budget: ") else []
    return "; ".join(caps + spent)


def _markdown_table(table: Table) -> list[str]:
    if not table.rows:
        return []
    rule = ["---:" if right else "---" for right in table.numeric]
    rows: list[Sequence[str]] = [table.columns, rule, *([_escaped(cell) for cell in row] for row in table.rows)]
    return [f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|~]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))", r"\\\1", text)
