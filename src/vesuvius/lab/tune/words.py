"""What a tune says while it goes on, and its plan."""

from __future__ import annotations

from collections.abc import Sequence

from vesuvius.lab.tune.ledger import Ledger
from vesuvius.lab.tune.terms.trial import Measured, Outcome, Prediction, Trial
from vesuvius.observe.units import format_duration, size_text


def trial_line(trial: Trial) -> str:
    """A trial that begins."""
    changed = "" if trial.changed == "nothing" else f"{trial.changed}; "
    return f"Trial {trial.number} {trial.stage}: {changed}{trial.why}; expected {_expected(trial.prediction)}"


def outcome_line(trial: Trial, outcome: Outcome) -> str:
    """What came of it."""
    begin = f"Trial {trial.number} took {format_duration(outcome.seconds)}: "
    if outcome.measured is None:
        return f"{begin}{outcome.ended}: {outcome.cause}"
    return begin + _figures(outcome.measured)


def plan_lines(ledger: Ledger, coming: Sequence[Trial]) -> list[str]:
    """`--dry-run`: the limits, what was tried, and each trial to come with its prediction, risk and duration."""
    space = ledger.space
    spent_s = sum(entry.outcome.seconds for entry in ledger.entries)
    vram = "" if space.vram_limit_bytes is None else f", {size_text(space.vram_limit_bytes)} of GPU memory"
    measured = any(entry.outcome.measured for entry in ledger.entries)
    lines = [
        f"machine  {ledger.machine.words()}",
        f"limits   no trial beyond {size_text(space.ram_limit_bytes)} of RAM{vram}; up to {space.most_workers} "
        f"workers, prefetch_factor {space.most_prefetch}, train_batch_size {space.most_batch}",
        f"budget   {format_duration(space.budget_s)}, {format_duration(spent_s)} of it spent on {len(ledger.entries)} "
        "trials",
    ]
    if not measured:
        lines.append(
            "samples/s is predicted once the baseline was measured; the way it goes if nearly each change gains:"
        )
    lines += [
        f"trial {trial.number:<3}{trial.stage:9} {trial.changed}; {_expected(trial.prediction)}" for trial in coming
    ]
    total_s = sum(trial.prediction.seconds for trial in coming)
    return [*lines, f"dry run: about {len(coming)} trials, {format_duration(total_s)}; nothing was written"]


def _expected(prediction: Prediction) -> str:
    rate = "" if prediction.samples_s is None else f"{prediction.samples_s:.3g} samples/s, "
    memory = _memory(prediction.ram_bytes, prediction.vram_bytes)
    return f"{rate}{memory}, risk {prediction.risk}, {format_duration(prediction.seconds)}"


def _figures(measured: Measured) -> str:
    narrow = "" if measured.narrow else ", its interval still wide"
    cause = "" if measured.cause is None else f" ({measured.cause})"
    interval = f"{measured.low:.3g} to {measured.high:.3g}, {measured.steps} steps{narrow}"
    return (
        f"{measured.samples_s:.3g} samples/s ({interval}), "
        f"waited for data {100 * measured.data_share:.1f} %, {measured.bound}{cause}, "
        f"{_memory(measured.ram_bytes, measured.vram_bytes)}"
    )


def _memory(ram_bytes: int, vram_bytes: int | None) -> str:
    vram = "" if vram_bytes is None else f", VRAM {size_text(vram_bytes)}"
    return f"RAM {size_text(ram_bytes)}{vram}"
