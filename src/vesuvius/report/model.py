"""`vesuvius report`: the content of the page of one run, or of several with their differences."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vesuvius.config.describe import flatten
from vesuvius.errors import EXIT_INTERRUPTED, EXIT_NONFINITE, EXIT_OK, EXIT_STOPPED, ConfigError
from vesuvius.monitor.post_mortem import headline
from vesuvius.report import page
from vesuvius.report.charts import build_charts, split_time
from vesuvius.report.curves import Chart
from vesuvius.report.page import NOT_KNOWN, PARTS_NOTE, Bar, Bars, RunReport, Table, filled
from vesuvius.report.records import GONE, Column, RunRecords, figure, read_run
from vesuvius.runlog.records import Record, naming_wrong_values
from vesuvius.runlog.run_dir import RunDir
from vesuvius.runlog.units import format_duration, format_number, format_percent, format_size, format_time, quantile

_OVERLAID = ("loss", "relative_error", "relative_error_all", "step_s", "ram", "vram")
_BEST = "best validation error"
_HIGHLIGHTS = ("samples/s", "step, p50", "running time", "last checkpoint", _BEST, "peak RAM", "peak VRAM")
_LAST_STEPS = 100
_UNTESTED = "Runs at different times differ for many reasons: vesuvius bench tests which setting is faster."
_MOST_EVENTS = 200
_ENDED_ITSELF = ("guard", "gpu")  # causes of deaths
_NO_EVENTS = ("step", "ranks", "run_start", "run_end", "verdict", "validation", "preview", "checkpoint", "trial")


def write_report(runs: Sequence[Path], out: Path | None, command: str) -> Path:
    """Write report.html of one or several runs; return its folder: `out`, or a new one in `reports/` of the first run.

    Raises StorageError: the folder cannot be written.  Raises ConfigError: its report.html is not one of vesuvius.
    """
    if out and (there := out / "report.html").is_file() and b"<footer>Made " not in there.read_bytes():
        raise ConfigError(f"{there} was not written by vesuvius and would be replaced; choose another --out")
    html = page_of([*map(read_report, runs)], command)
    folder = out or page.new_folder(runs[0] / page.FOLDER, create=True)
    page.write_page(folder, "report", html)
    return folder


def read_report(run: Path) -> RunReport:
    """Raises VesuviusError: a record has a value of the wrong type."""
    with naming_wrong_values(run):
        return build(read_run(run))


def page_of(reports: Sequence[RunReport], command: str, refresh_s: int = 0) -> str:
    names = [report.name for report in reports]
    reports = [replace(r, name=f"{r.name} ({r.directory})") if names.count(r.name) > 1 else r for r in reports]
    return page.render_html(
        reports, page.made_by(command), (), comparison(reports) if len(reports) > 1 else None, refresh_s
    )


def comparison(reports: Sequence[RunReport]) -> RunReport:
    """Compare two or more runs: speed, differences in results and config, and a curve of each run in one chart."""
    names = tuple(report.name for report in reports)
    facts = [(label, *(report.facts.get(label, NOT_KNOWN) for report in reports)) for label in reports[0].facts]
    keys = dict.fromkeys(key for report in reports for key in report.config)
    config = [(key, *(report.config.get(key, NOT_KNOWN) for report in reports)) for key in keys]
    rates = {r.name: float(r.facts["samples/s"]) for r in reports if r.facts["samples/s"] != NOT_KNOWN}
    bars = tuple(Bar(name, rate, format_number(rate)) for name, rate in rates.items())
    slowest, fastest = (format_number(of(rates.values(), default=None)) for of in (min, max))
    speed = f"{slowest} to {fastest} samples/s" if rates else "speed unknown"
    differences = Table("Differences in results", ("", *names), _different(facts))
    return RunReport(
        name=f"Comparison of {' and '.join(names)}",
        directory="",
        headline=f"{len(reports)} runs; {speed}",
        facts={},
        bars=Bars("Samples/s", bars, _UNTESTED) if bars else None,
        charts=_overlaid(reports),
        tables=filled(differences, Table("Differences in config", ("key", *names), _different(config))),
    )


def _different(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(row for row in rows if len(set(row[1:])) > 1)


def _overlaid(reports: Sequence[RunReport]) -> tuple[Chart, ...]:
    """The first curve of each chart, named by its run."""
    made = []
    for key in _OVERLAID:
        charts = [(r.name, chart) for r in reports for chart in r.charts if chart.key == key]
        if charts:
            series = tuple(replace(chart.series[0], label=name) for name, chart in charts)
            log = all(chart.log for _, chart in charts)
            made.append(replace(charts[0][1], series=series, limits=(), log=log))
    return tuple(made)


def build(records: RunRecords) -> RunReport:
    headline, tone, commands = _headline(records)
    return RunReport(
        name=str(records.config.get("name") or records.path.name),
        directory=str(records.path),
        headline=headline,
        tone=tone,
        commands=commands,
        facts=_facts(records),
        highlights=_HIGHLIGHTS,
        parts=split_time(records),
        charts=tuple(build_charts(records)),
        tables=filled(ranks_table(records), _sessions(records), _events(records)),
        previews=tuple((r["step"], r["picture"]) for r in records.of_kind("preview") if r.get("picture")),
        config={key: "null" if value is None else str(value) for key, value in flatten(records.config).items()},
        config_text=records.config_text,
        parts_note=f"{PARTS_NOTE}  Times: {_timed_steps(records)}." if records.changed else PARTS_NOTE,
    )


def _headline(records: RunRecords) -> tuple[str, Literal["good", "bad", ""], tuple[str, ...]]:
    """State, progress and bottleneck in words; their tone; and the commands to type next."""
    state, code, steps, run = records.state, records.exit_code, _steps(records.columns), RunDir(records.path)
    resume = shlex.join(["vesuvius", "train", "--config", str(records.path / "config.resolved.yaml"), "--resume"])
    verdicts = records.of_kind("verdict")
    bottleneck = "No verdict yet: too few steps, or monitor.verdict_every=0"
    if verdicts:
        bottleneck = verdict_words(verdicts[-1], has_gpu=bool(records.environment.get("gpus")))
    tune = (run.tune_command,) if verdicts and verdicts[-1].get("overrides") else ()
    if state == GONE:
        return f"The directory {records.path} no longer exists: the run was {GONE}", "bad", ()
    if state.startswith("died"):
        return f"Died at step {steps} ({state[6:]}). Last verdict: {bottleneck}", "bad", (resume,)
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        return f"Stopped early at step {steps} ({state}). Last verdict: {bottleneck}", "bad", (resume,)
    if code == EXIT_OK:
        return f"Finished at step {steps}. {bottleneck}", "good", tune
    if code is not None:
        commands = () if code == EXIT_NONFINITE else (resume,)  # a resume would only repeat non-finite steps
        return f"Failed at step {steps} ({state}). Last verdict: {bottleneck}", "bad", commands
    left = _time_left(records.columns, state)
    begin = "State unknown" if state == NOT_KNOWN else f"{state[0].upper()}{state[1:]}"
    return f"{begin}: step {steps}{'' if left == NOT_KNOWN else f', time left {left}'}. {bottleneck}", "", tune


def verdict_words(verdict: Record, has_gpu: bool) -> str:
    kind, cause, evidence, advice = (str(verdict.get(key) or "") for key in ("bound", "cause", "evidence", "advice"))
    if kind == "compute-bound" and not has_gpu and not advice.startswith("try"):
        return "Compute-bound on the CPU: no data-path setting will help."
    words = f"{kind} ({cause})" if cause else kind
    return f"{words.capitalize()}: {evidence}" + (f"; {advice}." if advice else ".")


def _timed_steps(records: RunRecords) -> str:
    numbers = records.columns["step"][records.timed]
    if not len(numbers):
        return NOT_KNOWN
    why = f", since {', '.join(records.changed[:3])} changed" if records.changed else ""
    return f"steps {numbers[0]:.0f} to {numbers[-1]:.0f}{why}"


def _facts(records: RunRecords) -> dict[str, str]:
    steps, env = records.columns, records.environment
    work = steps["work_s"]
    later = records.timed & ~records.first if (records.timed & ~records.first).any() else records.timed
    packages = env.get("packages") or {}
    known = later & np.isfinite(work) & np.isfinite(steps["samples"])
    work_s, samples = np.sum(work[known]), np.sum(steps["samples"][known])
    # The monitor samples memory more often than steps do, but may not have recorded.
    used = [each.bands["used_bytes"][2] for each in records.system if "used_bytes" in each.bands]
    verdicts = [str(verdict.get("bound")) for verdict in records.of_kind("verdict")]
    facts = {
        "state": records.state,
        "steps": _steps(steps),
        "time left": _time_left(steps, records.state),
        "last checkpoint": _last_checkpoint(records),
        "sessions": str(sum(record["kind"] == "run_start" for record in records.sessions)),
        "running time": _or_unknown(_last(steps["total_s"]), format_duration),
        "times are from": f"{_timed_steps(records)}; without pauses and the first step of each session",
        "samples/s": _or_unknown(float(samples / work_s) if work_s else None, format_number),
        "step, p50": _quantile(work[later], 0.5),
        "step, p95": _quantile(work[later], 0.95),
        f"loss, mean of the last {_LAST_STEPS} steps": _or_unknown(_mean(steps["loss"][-_LAST_STEPS:]), format_number),
        _BEST: _best(records.validations),
        "verdicts": ", ".join(f"{kind} {verdicts.count(kind)}" for kind in dict.fromkeys(verdicts)) or "none",
        "non-finite steps": str(sum(event.get("event") == "nonfinite" for event in records.of_kind("event"))),
        "processes that died": str(sum(death.cause not in _ENDED_ITSELF for death in records.deaths)),
        "peak RAM": of_limit(records.peak("ram_used_bytes", *used), largest(steps["ram_limit_bytes"])),
        "largest worker": _or_unknown(records.peak("worker_max_bytes"), format_size),
    }
    if gpus := [str(gpu) for gpu in env.get("gpus") or []]:
        facts |= {
            "peak VRAM": of_limit(records.peak("vram_used_bytes"), largest(steps["vram_limit_bytes"])),
            "model FLOPs utilization": _or_unknown(_mean(steps["mfu"]), format_percent),
            "GPU": ", ".join(gpus),
        }
    return facts | {
        "cores": str(env.get("cpus") or NOT_KNOWN),
        "torch / vesuvius": f"{packages.get('torch') or NOT_KNOWN} / {packages.get('vesuvius-diffusion') or NOT_KNOWN}",
        "commit": commit_text(env),
    }


def ranks_table(records: RunRecords) -> Table:
    """A row for each rank, from the steps that all ranks reported; empty for one rank."""
    rows = tuple(
        (
            str(rank),
            of.node or NOT_KNOWN,
            _or_unknown(of.largest_bytes or None, format_size),
            _quantile(np.array(of.work_s), 0.5),
            _or_unknown(_mean(np.array(of.comm_s)), format_number),
            f"{of.slowest_in} of {len(of.work_s)}",
        )
        for rank, of in enumerate(records.ranks)
    )
    columns = ("rank", "node", "trainer, private RAM", "step without waits, p50", "wait, mean, s", "slowest rank in")
    return Table("Ranks", columns, rows)


def _sessions(records: RunRecords) -> Table:
    rows = []
    for index, start in enumerate(records.sessions):
        if start["kind"] != "run_start":
            continue
        after = records.sessions[index + 1] if index + 1 < len(records.sessions) else None
        reached, how = NOT_KNOWN, records.state if after is None else "died: no end was recorded"
        if after is not None and after["kind"] == "run_end":
            reached = str(after.get("step", NOT_KNOWN))
            how = f"exit code {after.get('exit_code')}: {after.get('cause')}"
        began = _or_unknown(figure(start.get("time")), format_time)
        rows.append((str(start.get("session", NOT_KNOWN)), began, str(start["step"]), reached, how))
    return Table("Sessions", ("#", "start", "from step", "to step", "end"), tuple(rows))


def _events(records: RunRecords) -> Table:
    rows = [
        (figure(r.get("time")), str(r.get("step", "")), str(r.get("event", r["kind"])), _event_text(r))
        for r in records.others
        if r["kind"] not in _NO_EVENTS
    ]
    rows += [(d.time, str(d.step), "end" if d.cause in _ENDED_ITSELF else "death", headline(d)) for d in records.deaths]
    rows.sort(key=lambda row: row[0])
    note = f"the last {_MOST_EVENTS} of {len(rows)}" if len(rows) > _MOST_EVENTS else ""
    shown = tuple((format_time(at) if np.isfinite(at) else NOT_KNOWN, *rest) for at, *rest in rows[-_MOST_EVENTS:])
    return Table("Events", ("time", "step", "event", "description"), shown, note)


def _event_text(record: Record) -> str:
    if record.get("text"):
        return str(record["text"])
    fields = {k: v for k, v in record.items() if k not in ("kind", "time", "step", "event")}
    return ", ".join(f"{name} {value}" for name, value in fields.items() if isinstance(value, str | int | float))


def commit_text(environment: Mapping[str, Any]) -> str:
    """Shortened commit of `env.json`; '+' = the work tree had changes."""
    if commit := str(environment.get("commit") or ""):
        return commit[:12] + commit[40:]
    version = (environment.get("packages") or {}).get("vesuvius-diffusion")
    return f"{NOT_KNOWN}, version {version}" if version else NOT_KNOWN


def _best(validations: Sequence[Record]) -> str:
    known = [(error, r.get("step")) for r in validations if np.isfinite(error := figure(r.get("relative_error")))]
    error, step = min(known, key=lambda each: each[0], default=(np.nan, None))
    return NOT_KNOWN if np.isnan(error) else f"{format_number(error)} of the stationary Wiener filter's (step {step})"


def _steps(steps: Mapping[str, Column]) -> str:
    done, asked = _last(steps["step"]), _last(steps["steps"])
    return NOT_KNOWN if done is None else f"{done:.0f}" + (f" of {asked:.0f}" if asked else "")


def _time_left(steps: Mapping[str, Column], state: str) -> str:
    """As estimated at the last step; `none` once the run is over."""
    done, asked = _last(steps["step"]), _last(steps["steps"])
    if done is not None and asked is not None and done >= asked:
        return "none"
    if state.startswith(("ended", "died")):
        left = "" if done is None or asked is None else f", {asked - done:.0f} steps early"
        return f"none: the run is over{left}"
    return _or_unknown(float(steps["eta_s"][-1]) if len(steps["eta_s"]) else None, format_duration)


def _last_checkpoint(records: RunRecords) -> str:
    """The last one saved, except those that the last session found to be damaged or gone."""
    start = next((each for each in reversed(records.sessions) if each["kind"] == "run_start"), {})
    from_step, began = figure(start.get("step")), figure(start.get("time"))
    saved = records.of_kind("checkpoint")
    saved = [r for r in saved if not (figure(r.get("step")) > from_step and figure(r.get("time")) < began)]
    if not saved:
        return "none was recorded"
    return f"step {saved[-1].get('step')}, {_or_unknown(figure(saved[-1].get('saved_time')), format_time)}"


def of_limit(value: float | None, limit: float | None) -> str:
    """`3.20 GiB of 8.00 GiB`."""
    if value is None or not np.isfinite(value):
        return NOT_KNOWN
    return format_size(value) + (f" of {format_size(limit)}" if limit else "")


def _or_unknown(value: float | None, words: Any) -> str:
    return NOT_KNOWN if value is None or not np.isfinite(value) else str(words(value))


def largest(values: Column) -> float | None:
    return _of_known(values, np.max)


def _mean(values: Column) -> float | None:
    return _of_known(values, np.mean)


def _last(values: Column) -> float | None:
    return _of_known(values, lambda known: known[-1])


def _quantile(values: Column, share: float) -> str:
    seconds = _of_known(values, lambda known: quantile(known.tolist(), share))
    return NOT_KNOWN if seconds is None else format_duration(seconds)


def _of_known(values: Column, figure_of: Callable[[Column], Any]) -> float | None:
    known = values[np.isfinite(values)]
    return float(figure_of(known)) if len(known) else None
