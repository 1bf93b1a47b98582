"""`ledger.jsonl` of a bench: in which order is measured, and a line for each begin and end of a measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vesuvius.errors import ConfigError, StorageError
from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.trials.ended import Ended, TrialInterrupted

_KILLED_TWICE = "the bench was killed twice during this measurement, so it is not repeated"


@dataclass(frozen=True)
class Measurement:
    """A cell in one round, and how that ended."""

    cell: int
    round: int
    ended: Ended
    cause: str = ""  # one line; '' where it ended ok
    run: str = ""  # name of its run directory below `cells/`; '' = none
    session: int = 1  # of the bench, counted from 1: rates of different sessions are not compared within a round
    seconds: float = 0.0
    samples_s: float = 0.0  # at the steady pace; 0 unless ok
    # seconds from the start of the process to the steady pace, less what the steps until then take at that pace
    start_s: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)  # others, by name; None = not known


class BenchLedger(AbstractContextManager["BenchLedger"]):
    """The measurements of a bench, on disk: new, or continued.

    Args:
        asked: what the bench was asked for, as plain data.
        retry_failed: what failed before is measured again.

    Attributes:
        measurements: finished ones, in order.
        session: this one.

    Raises:
        ConfigError: the bench on disk was asked for something else.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any], retry_failed: bool = False) -> None:
        self.measurements: list[Measurement] = []
        self.session = 0
        self._begun: Counter[tuple[int, int]] = Counter()
        self._last_begun = (-1, -1)
        path.parent.mkdir(parents=True, exist_ok=True)
        for record in read_records(path) if path.exists() else []:
            self._take(record, asked, path.parent)
        self._file = JsonLines(path)
        self._file.write("bench", asked=asked, retry_failed=retry_failed)
        self._begin_session(retry_failed)

    def _take(self, record: Mapping[str, Any], asked: Mapping[str, Any], folder: Path) -> None:
        match record["kind"]:
            case "bench":
                if differ := [key for key, value in record["asked"].items() if value != asked.get(key)]:
                    raise ConfigError(
                        f"a resumed bench must repeat the earlier request; got a different {', '.join(differ)} than in "
                        f"{folder}; drop --resume to start over"
                    )
                self._begin_session(record.get("retry_failed", False))
            case "begin":
                self._last_begun = (record["cell"], record["round"])
                self._begun[self._last_begun] += 1
            case "measurement":
                self.measurements.append(Measurement(**record["measurement"]))
            case "interrupted":
                cell, round = self._last_begun  # earlier versions did not write down which
                self._begun[record.get("cell", cell), record.get("round", round)] -= 1

    def _begin_session(self, retry_failed: bool) -> None:
        self.session += 1
        if retry_failed:
            self.measurements = [each for each in self.measurements if each.ended == "ok"]
            self._begun.clear()

    def measure_rounds(
        self,
        cells: int,
        rounds: int,
        measure: Callable[[int, int], Measurement],
        on_done: Callable[[Measurement], None],
    ) -> None:
        """Measure what is missing: every cell once a round, each round in the reverse order of the one before.

        A cell that failed is left out of later rounds; so is one in which the bench itself was killed twice.

        Args:
            measure: takes a cell and a round.

        Raises:
            TrialInterrupted, StorageError, OSError: as `measure`; the ledger can be continued.
        """
        for round in range(rounds):
            for cell in list(range(cells))[:: -1 if round % 2 else 1]:
                if any(m.cell == cell and (m.round == round or m.ended != "ok") for m in self.measurements):
                    continue
                done = Measurement(cell, round, "killed", _KILLED_TWICE)
                if self._begun[cell, round] < 2:
                    self._file.write("begin", cell=cell, round=round)
                    try:
                        done = measure(cell, round)
                    except (TrialInterrupted, StorageError, OSError):
                        self._file.write("interrupted", cell=cell, round=round)
                        raise
                done = replace(done, session=self.session)
                self.measurements.append(done)
                self._file.write("measurement", measurement=asdict(done))
                on_done(done)

    def __exit__(self, *_: object) -> None:
        self._file.close()
