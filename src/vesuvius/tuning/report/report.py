"""The result of a tune as plain data, from which its text and JSON are made.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vesuvius.config.describe import to_yaml
from vesuvius.tuning.report.options import Horizon, Option, build_options
from vesuvius.tuning.search.pairs import Comparison
from vesuvius.tuning.search.recommendation import Entry, Recommendation, Verdict
from vesuvius.tuning.search.search import Search
from vesuvius.tuning.space import Space


@dataclass(frozen=True)
class Change:
    """A knob that the recommendation changes, with values as in YAML."""

    knob: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class Row:
    """A block, predicted and measured; None where there is no figure."""

    number: int
    stage: str
    kind: str
    changed: str
    why: str
    ended: str
    cause: str
    seconds: float
    samples_s: float | None
    data_share: float | None
    ram_bytes: int | None
    vram_bytes: int | None
    predicted_samples_s: float | None
    predicted_ram_bytes: int
    predicted_vram_bytes: int | None


@dataclass(frozen=True)
class Report:
    """Everything a report says.

    Attributes:
        source, tuned: paths of the configs.
        command, train_command: that made the report, and what to run next.
        held_up: what the baseline was held up by, in words.
        rates: samples/s of the baseline's whole run and of the recommendation's; None where they were not measured.
        gain: from blocks in turn.
        options: A, B, C.
    """

    name: str
    source: str
    tuned: str
    command: str
    train_command: str
    date: str
    versions: Mapping[str, str]
    machine: str
    goal: str
    budget_s: float
    spent_s: float
    ram_limit_bytes: int
    vram_limit_bytes: int | None
    verdict: Verdict
    reason: str
    held_up: str
    rates: tuple[float | None, float | None]
    gain: Comparison | None
    options: tuple[Option, Option, Option]
    changes: tuple[Change, ...]
    ended: Mapping[str, str]
    blocks: tuple[Row, ...]


def build_report(
    *,
    name: str,
    source: str,
    tuned: str,
    command: str,
    train_command: str,
    date: str,
    versions: Mapping[str, str],
    machine: str,
    space: Space,
    search: Search,
    found: Recommendation,
    horizon: Horizon,
) -> Report:
    """Gather the report.  The arguments are explained at `Report`."""
    base, best = (search.rates.of("run", setting) for setting in (found.base, found.best))
    return Report(
        name=name,
        source=source,
        tuned=tuned,
        command=command,
        train_command=train_command,
        date=date,
        versions=dict(versions),
        machine=machine,
        goal=space.goal,
        budget_s=space.budget_s,
        spent_s=search.spent_s,
        ram_limit_bytes=space.ram_limit_bytes,
        vram_limit_bytes=space.vram_limit_bytes,
        verdict=found.verdict,
        reason=found.reason,
        held_up=base[0].text if base else "",
        rates=(search.rates.run(found.base) if base else None, search.rates.run(found.best) if best else None),
        gain=found.gain,
        options=build_options(found, space, search.rates, search.memory, horizon),
        changes=tuple(
            Change(knob, to_yaml(getattr(space.source, knob)), to_yaml(value), found.reasons.get(knob, "measured"))
            for knob, value in found.best.changes(space.source).items()
        ),
        ended={str(stage): why for stage, why in found.ended.items()},
        blocks=_rows(search.entries, space),
    )


def _rows(entries: Sequence[Entry], space: Space) -> tuple[Row, ...]:
    return tuple(
        Row(
            number=entry.step.number,
            stage=entry.step.stage,
            kind=entry.step.kind,
            changed=" ".join(entry.step.setting.overrides(space.source)) or "nothing",
            why=entry.step.why,
            ended=entry.block.ended,
            cause=entry.block.cause,
            seconds=entry.block.seconds,
            samples_s=entry.block.rate or None,
            data_share=entry.block.data_share,
            ram_bytes=entry.block.ram_bytes,
            vram_bytes=entry.block.vram_bytes,
            predicted_samples_s=entry.step.rate,
            predicted_ram_bytes=entry.step.ram_bytes,
            predicted_vram_bytes=entry.step.vram_bytes,
        )
        for entry in entries
    )
