"""What is changed between two verdicts, on plain figures: when, how far, and never to and fro."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vesuvius.monitor.steering import Decision, Headroom, Learned, ReaderSetup, carried_out, decide
from vesuvius.monitor.verdict import Cause, Verdict
from vesuvius.monitor.window import Window

MIB = 2**20
PLENTY = Headroom(left_bytes=100_000 * MIB, batch_bytes=64 * MIB, reader_bytes=500 * MIB)


def window(**changes: Any) -> Window:
    """Ten steps of a second, of which nothing else is said."""
    zero = dict.fromkeys(Window.__dataclass_fields__, 0)
    figures = {"steps": 10, "step_s": 10.0, "read_s": None, "batches": 20, "cores": 16.0}
    return Window(
        **zero | {"idle_cores": None, "reader_cores": None, "gpu_busy": None, "vram_share": None} | figures | changes
    )


def says(cause: Cause | None, *overrides: str, **figures: Any) -> Verdict:
    kind = "data-bound" if cause else "compute-bound"
    return Verdict(kind, cause, f"because of {cause}", overrides, "", window(**figures))  # type: ignore[arg-type]


TOO_SMALL = says("prefetch too small", "training.prefetch_factor=4", ran_empty=7, full_s=6.0)
FEW_WORKERS = says("workers too few", "training.workers=4", ran_empty=18)
FULL = says(None, full_s=9.0)
FINE = says(None, full_s=3.0, ran_empty=1)


class Session:
    """A run in which each decision is carried out."""

    def __init__(self, workers: int, ahead: int, means: Headroom = PLENTY) -> None:
        self.now, self.means, self.learned = ReaderSetup(workers, ahead), means, Learned()

    def hears(self, verdict: Verdict) -> Decision | None:
        decision, self.learned = decide(verdict, self.now, self.means, self.learned)
        if decision is not None and not decision.refused:
            self.learned = carried_out(decision, verdict.window, self.learned)
            self.now = decision.after
        return decision


def only(decision: Decision | None) -> Decision:
    assert decision is not None
    return decision


def test_batches_ahead_double_only_where_they_had_been_full_and_ran_empty() -> None:
    run = Session(2, 4)
    assert run.hears(FINE) is None
    assert run.hears(says("store latency", "data.store.requests=8", ran_empty=20)) is None
    decision = only(run.hears(TOO_SMALL))
    assert (decision.action, decision.before, decision.after) == ("more_prefetch", ReaderSetup(2, 4), ReaderSetup(2, 8))
    assert decision.reason == "because of prefetch too small"
    assert decision.override == "training.prefetch_factor=4", "what the verdict advises for a new session"
    assert only(run.hears(TOO_SMALL)).after.ahead == 16


def test_batches_ahead_halve_when_they_stayed_full_three_times_down_to_one_a_reader() -> None:
    run = Session(3, 10)
    assert [run.hears(FULL), run.hears(FULL)] == [None, None]
    decision = only(run.hears(FULL))
    assert (decision.action, decision.after, decision.override) == (
        "less_prefetch",
        ReaderSetup(3, 5),
        "training.prefetch_factor=2",
    )
    assert "320 MiB" not in decision.reason, "that is more than a tenth of a GiB"
    assert "0.31 GiB" in decision.reason
    assert [run.hears(FULL) for _ in range(2)] == [None, None], "it is counted anew"
    assert only(run.hears(FULL)).after == ReaderSetup(3, 3)
    assert [run.hears(FULL) for _ in range(10)] == [None] * 10


@pytest.mark.parametrize("between", [FINE, says(None, full_s=9.0, ran_empty=1), says(None, full_s=4.9)])
def test_full_means_never_empty_and_full_for_most_of_each_window(between: Verdict) -> None:
    run = Session(1, 8)
    assert [run.hears(verdict) for verdict in (FULL, FULL, between, FULL, FULL)] == [None] * 5
    assert run.hears(FULL) is not None


def test_the_time_of_a_validation_does_not_count_as_full() -> None:
    run = Session(1, 8)
    validated = says(None, step_s=30.0, pause_s=20.0, full_s=20.0)
    assert [run.hears(validated) for _ in range(9)] == [None] * 9


def test_what_frees_next_to_nothing_is_not_worth_a_new_start_of_the_readers() -> None:
    run = Session(1, 8, replace(PLENTY, batch_bytes=MIB))
    assert [run.hears(FULL) for _ in range(9)] == [None] * 9


def test_it_never_swings_between_a_size_that_runs_empty_and_one_that_stays_full() -> None:
    """Whatever comes after, no size that ran empty is gone back to: 4 and 8 did."""
    run = Session(1, 4)
    run.hears(TOO_SMALL)
    run.hears(TOO_SMALL)
    assert run.now.ahead == 16
    assert [run.hears(FULL) for _ in range(20)] == [None] * 20
    run.hears(TOO_SMALL)
    run.hears(TOO_SMALL)
    assert run.now.ahead == 64
    assert [d.after.ahead for _ in range(20) if (d := run.hears(FULL)) is not None] == []
    calm = Session(1, 64)
    sizes = [calm.now.ahead for _ in range(6) if calm.hears(FULL)]
    assert sizes == [32, 16]
    calm.hears(TOO_SMALL)
    assert [calm.hears(FULL) for _ in range(20)] == [None] * 20
    assert calm.now.ahead == 32


def test_a_limit_of_the_config_on_the_batches_ahead_is_kept() -> None:
    run = Session(2, 4, replace(PLENTY, most_ahead=6))
    assert only(run.hears(TOO_SMALL)).after.ahead == 6
    refused = only(run.hears(TOO_SMALL))
    assert refused.refused == "training.prefetch_mib allows no more"
    assert run.now.ahead == 6
    above = Session(2, 8, replace(PLENTY, most_ahead=6))
    assert only(above.hears(TOO_SMALL)).refused, "a limit that it already stands above takes nothing away"
    assert above.now.ahead == 8


def test_readers_are_added_as_the_verdict_says_while_they_gain() -> None:
    run = Session(2, 4)
    decision = only(run.hears(FEW_WORKERS))
    assert (decision.action, decision.after, decision.override) == (
        "more_workers",
        ReaderSetup(4, 4),
        "training.workers=4",
    )
    faster = says("workers too few", "training.workers=8", step_s=9.0)
    assert only(run.hears(faster)).after.workers == 8
    assert run.hears(says(None, step_s=8.0)) is None
    assert run.now.workers == 8


def test_readers_that_gain_less_than_three_percent_are_taken_back_once_for_all() -> None:
    run = Session(2, 4)
    run.hears(FEW_WORKERS)
    decision = only(run.hears(says("workers too few", "training.workers=8", step_s=9.8)))
    assert (decision.action, decision.before, decision.after) == ("fewer_workers", ReaderSetup(4, 4), ReaderSetup(2, 4))
    assert "4 readers gave +2.0% samples a second over 2" in decision.reason
    assert [run.hears(FEW_WORKERS) for _ in range(5)] == [None] * 5
    assert run.now == ReaderSetup(2, 4)
    assert only(run.hears(TOO_SMALL)).after.ahead == 8, "batches ahead are another matter"


def test_pauses_are_no_part_of_what_readers_gained() -> None:
    run = Session(2, 4)
    run.hears(FEW_WORKERS)
    assert run.hears(says(None, step_s=39.0, pause_s=30.0)) is None
    assert run.now.workers == 4


def test_readers_that_the_memory_guard_took_away_are_not_judged() -> None:
    run = Session(2, 4)
    run.hears(FEW_WORKERS)
    run.now = ReaderSetup(3, 4)
    assert run.hears(says(None, step_s=20.0)) is None
    run.now = ReaderSetup(4, 4)
    assert run.hears(says(None, step_s=20.0)) is None, "nor later"


@pytest.mark.parametrize(("cores", "workers"), [(16.0, 4), (3.5, 3)])
def test_there_are_never_more_readers_than_processors(cores: float, workers: int) -> None:
    run = Session(2, 4)
    verdict = says("workers too few", "training.workers=4", cores=cores)
    assert only(run.hears(verdict)).after.workers == workers


def test_at_the_last_processor_it_says_why_there_are_no_more_readers() -> None:
    run = Session(2, 4)
    decision = only(run.hears(says("workers too few", "training.workers=4", cores=2.5)))
    assert decision.refused == "this process may use 2.5 processors"
    assert run.now.workers == 2


def test_only_as_many_readers_are_added_as_memory_is_left_for() -> None:
    run = Session(2, 4, replace(PLENTY, left_bytes=700 * MIB))
    assert only(run.hears(FEW_WORKERS)).after.workers == 3
    run = Session(2, 4, replace(PLENTY, left_bytes=400 * MIB))
    decision = only(run.hears(FEW_WORKERS))
    assert decision.refused == (
        "one more reader would take 0.49 GiB more, but only 0.39 GiB are left below monitor.prefetch_at"
    )
    assert decision.override == "training.workers=3"
    assert run.now.workers == 2


def test_batches_that_memory_is_not_left_for_are_not_put_together() -> None:
    run = Session(2, 4, replace(PLENTY, left_bytes=255 * MIB))
    decision = only(run.hears(TOO_SMALL))
    assert decision.refused.startswith("8 batches ahead would take 0.25 GiB more, but only 0.25 GiB are left")
    assert run.now.ahead == 4
    enough = Session(2, 4, replace(PLENTY, left_bytes=256 * MIB))
    enough.hears(TOO_SMALL)
    assert enough.now.ahead == 8
    beyond = Session(2, 4, replace(PLENTY, left_bytes=-5 * MIB))
    assert only(beyond.hears(TOO_SMALL)).refused


def test_nothing_is_raised_while_memory_is_short_and_what_frees_memory_still_is_done() -> None:
    run = Session(2, 8, replace(PLENTY, memory_is_short=True))
    short_of_it = says("prefetch too small", ran_empty=7, full_s=6.0)
    refused = [only(run.hears(short_of_it)), only(run.hears(says("workers too few")))]
    assert [each.refused for each in refused] == ["memory is short", "memory is short"]
    assert refused[0].override == "training.prefetch_factor=8"
    assert run.now == ReaderSetup(2, 8)
    assert [run.hears(FULL) is None for _ in range(3)] == [True, True, False]
    assert run.now == ReaderSetup(2, 4)


def test_ray_is_not_started_for_a_run_that_began_without() -> None:
    run = Session(0, 2, replace(PLENTY, reader_bytes=None))
    decision = only(run.hears(says("workers too few", "training.workers=2")))
    assert decision.override == "training.workers=2"
    assert "new session" in decision.refused
    assert run.now.workers == 0
    assert only(run.hears(TOO_SMALL)).after == ReaderSetup(0, 4)


def test_readers_of_unknown_size_are_not_added() -> None:
    run = Session(2, 4, replace(PLENTY, reader_bytes=None))
    assert only(run.hears(FEW_WORKERS)).refused == "what a reader takes is unknown"


def test_what_is_only_advised_teaches_nothing() -> None:
    """As in `training.autotune: advise`: decisions are not carried out, and come again."""
    learned, now = Learned(), ReaderSetup(2, 4)
    for _ in range(3):
        decision, learned = decide(FEW_WORKERS, now, PLENTY, learned)
        assert only(decision).action == "more_workers"
    assert learned == Learned()
