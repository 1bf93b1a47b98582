"""The order of measurements: every cell once a round, each round in the reverse order of the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vesuvius.bench.ledger import Ledger, Measurement
from vesuvius.errors import StorageError
from vesuvius.tuning.measurement import TuneInterrupted

Measure = Callable[[int, int], Measurement]
"""Measure a cell in a round."""


def order_of(cells: int, round: int) -> list[int]:
    """The cells of a round, in order."""
    return list(range(cells))[:: -1 if round % 2 else 1]


def measure_rounds(
    ledger: Ledger, cells: int, rounds: int, measure: Measure, on_done: Callable[[Measurement], None]
) -> None:
    """Measure what the ledger does not hold yet.  A cell that failed is left out of later rounds.

    Raises:
        TuneInterrupted, StorageError, OSError: as `measure`; the ledger can be gone on with.
    """
    for round in range(rounds):
        for cell in order_of(cells, round):
            if not ledger.needs(cell, round):
                continue
            done = ledger.begin(cell, round)
            try:
                done = done or measure(cell, round)
            except (TuneInterrupted, StorageError, OSError):
                ledger.interrupted()
                raise
            ledger.end(replace(done, session=ledger.session))
            on_done(done)
