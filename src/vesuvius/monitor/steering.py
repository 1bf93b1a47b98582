"""Between two verdicts of a run: more or fewer readers, more or fewer batches ahead, or as it is.  Pure.

One change at a time.  Batches ahead double where they had been full and yet ran empty, and halve where they stayed full
for some windows, never down to a number that once ran empty.  Readers are added where the verdict says that they are
too few, until the last ones added gained too little: those are taken back, once, and it stays at that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vesuvius.monitor.verdict import Verdict
from vesuvius.monitor.window import Window
from vesuvius.runlog.units import size_text

Action = Literal["more_prefetch", "less_prefetch", "more_workers", "fewer_workers"]

# Readers that gain less are not worth their memory.
_KNEE = 0.03
# Full for this share of the time, and never empty, in so many windows in a row: smaller will do.
_FULL, _FULL_WINDOWS = 0.5, 3
# Less than this is not worth the seconds in which readers restart.
_WORTH_BYTES = 16e6


@dataclass(frozen=True)
class ReaderSetup:
    """What brings the data."""

    workers: int  # reader processes; 0 = the trainer reads
    ahead: int  # batches put together ahead of the trainer, all of them


@dataclass(frozen=True)
class Headroom:
    """What a change may use."""

    left_bytes: int  # memory that may be taken before the first rung of the memory guard
    batch_bytes: int  # memory that one more batch ahead takes
    # memory that one more reader takes, with its part of the object store; None = not known
    reader_bytes: int | None
    most_ahead: int | None = None  # batches ahead that the config allows; None = no limit
    memory_is_short: bool = False  # a warning stands, or the guard has acted in this session: nothing may be raised


@dataclass(frozen=True)
class Decision:
    """A change, or one that would help and is not made."""

    action: Action
    # before, after: what there is, and what there should be
    before: ReaderSetup
    after: ReaderSetup
    override: str  # what a new session would start with for the same
    reason: str  # the figures that call for it
    refused: str = ""  # why it is not made all the same; '' = it is to be made


@dataclass(frozen=True)
class Raised:
    """Readers that were added and whose gain has not been measured."""

    # before, workers: readers before and since
    before: int
    workers: int
    steps_s: float  # steps a second before


@dataclass(frozen=True)
class Learned:
    """What the windows of this session have shown."""

    full_windows: int = 0  # windows in a row, up to now, in which the batches ahead stayed full
    ran_empty_ahead: int = 0  # the most batches ahead that had been full and ran empty; so few are never gone back to
    raised: Raised | None = None  # to be judged by the next window
    at_knee: bool = False  # more readers were tried and gained too little


def decide(verdict: Verdict, now: ReaderSetup, headroom: Headroom, learned: Learned) -> tuple[Decision | None, Learned]:
    """What the verdict on the last window calls for.

    Returns:
        The decision, None where it stays as it is; and what is known now, without the decision, which may not be
        carried out (`carried_out` adds it).
    """
    window, raised = verdict.window, learned.raised
    learned = replace(learned, full_windows=learned.full_windows + 1 if _stayed_full(window) else 0, raised=None)
    if raised is not None and raised.workers == now.workers:  # else the memory guard has taken some away
        gain = _steps_s(window) / raised.steps_s - 1
        if gain < _KNEE:
            return _fewer_workers(now, raised, gain), learned
    match verdict.cause:
        case "prefetch too small":
            return _more_prefetch(verdict, now, headroom), learned
        case "workers too few":
            return _more_workers(verdict, now, headroom, learned), learned
        case _:
            return _less_prefetch(now, headroom, learned), learned


def carried_out(decision: Decision, window: Window, learned: Learned) -> Learned:
    """What is known once a decision, made on `window`, was carried out."""
    learned = replace(learned, full_windows=0)
    match decision.action:
        case "more_prefetch":
            return replace(learned, ran_empty_ahead=max(learned.ran_empty_ahead, decision.before.ahead))
        case "more_workers":
            raised = Raised(decision.before.workers, decision.after.workers, _steps_s(window))
            return replace(learned, raised=raised)
        case "fewer_workers":
            return replace(learned, at_knee=True)
        case "less_prefetch":
            return learned


def _stayed_full(window: Window) -> bool:
    return window.ran_empty == 0 and window.held_up_s >= _FULL * window.working_s


def _steps_s(window: Window) -> float:
    """All steps have as many samples."""
    return window.steps / window.working_s


def _more_prefetch(verdict: Verdict, now: ReaderSetup, headroom: Headroom) -> Decision:
    ahead = 2 * now.ahead
    if headroom.most_ahead is not None:
        ahead = max(min(ahead, headroom.most_ahead), now.ahead)
    need_bytes = (ahead - now.ahead) * headroom.batch_bytes
    refused = ""
    if headroom.memory_is_short:
        refused = "memory is short"
    elif ahead == now.ahead:
        refused = "training.prefetch_mib allows no more"
    elif need_bytes > headroom.left_bytes:
        refused = _too_much(f"{ahead} batches ahead", need_bytes, headroom)
    override = verdict.overrides[0] if verdict.overrides else _prefetch_override(now.workers, ahead)
    return Decision("more_prefetch", now, ReaderSetup(now.workers, ahead), override, verdict.evidence, refused)


def _less_prefetch(now: ReaderSetup, headroom: Headroom, learned: Learned) -> Decision | None:
    ahead = max(now.ahead // 2, now.workers, 1)
    freed_bytes = (now.ahead - ahead) * headroom.batch_bytes
    if learned.full_windows < _FULL_WINDOWS or ahead <= learned.ran_empty_ahead or freed_bytes < _WORTH_BYTES:
        return None
    reason = (
        f"the batches ahead stayed full for {learned.full_windows} verdicts in a row; halving them frees "
        f"{size_text(freed_bytes)}"
    )
    return Decision(
        "less_prefetch", now, ReaderSetup(now.workers, ahead), _prefetch_override(now.workers, ahead), reason
    )


def _more_workers(verdict: Verdict, now: ReaderSetup, headroom: Headroom, learned: Learned) -> Decision | None:
    """As many as the verdict asks for and as processors and memory allow."""
    if learned.at_knee:
        return None
    cores = verdict.window.cores
    asked = min(_asked_workers(verdict) or now.workers + 1, int(cores))
    workers, refused = asked, ""
    if headroom.memory_is_short:
        refused = "memory is short"
    elif now.workers == 0:
        refused = "separate readers start with a new session, by --resume"
    elif asked <= now.workers:
        refused = f"this process may use {cores:g} processors"
    elif headroom.reader_bytes is None:
        refused = "what a reader takes is unknown"
    else:
        workers = min(asked, now.workers + max(headroom.left_bytes, 0) // max(headroom.reader_bytes, 1))
        if workers <= now.workers:
            refused = _too_much("one more reader", headroom.reader_bytes, headroom)
    workers = max(workers, now.workers + 1) if refused else workers
    after = ReaderSetup(workers, now.ahead)
    return Decision("more_workers", now, after, f"training.workers={workers}", verdict.evidence, refused)


def _fewer_workers(now: ReaderSetup, raised: Raised, gain: float) -> Decision:
    reason = f"{raised.workers} readers gave {gain:+.1%} samples a second over {raised.before}, less than {_KNEE:.0%}"
    after = ReaderSetup(raised.before, now.ahead)
    return Decision("fewer_workers", now, after, f"training.workers={raised.before}", reason)


def _asked_workers(verdict: Verdict) -> int | None:
    words = (override.partition("=") for override in verdict.overrides)
    return next((int(value) for key, _, value in words if key == "training.workers"), None)


def _prefetch_override(workers: int, ahead: int) -> str:
    return f"training.prefetch_factor={-(-ahead // max(workers, 1))}"


def _too_much(what: str, need_bytes: int, headroom: Headroom) -> str:
    return (
        f"{what} would take {size_text(need_bytes)} more, but only {size_text(max(headroom.left_bytes, 0))} are left "
        "below monitor.prefetch_at"
    )
