"""`ledger.jsonl` of a bench: what is measured, and a line for each begin and end of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from vesuvius.errors import ConfigError
from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.tuning.measurement import Ended

_KILLED_TWICE = "the bench was killed twice during this measurement, so it is not repeated"


@dataclass(frozen=True)
class Measurement:
    """A cell in one round, and how that ended.

    Attributes:
        cause: one line; '' where it ended ok.
        run: name of its run directory below `cells/`; '' = none.
        session: of the bench, counted from 1: rates of different sessions are not compared within a round.
        samples_s: at the steady pace; 0 unless ok.
        start_s: from the start of the process, beyond what the steps until the steady pace took at that pace.
        figures: others, by name; None = not known.
    """

    cell: int
    round: int
    ended: Ended
    cause: str = ""
    run: str = ""
    session: int = 1
    seconds: float = 0.0
    samples_s: float = 0.0
    start_s: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)


class Ledger:
    """The measurements of a bench, on disk.  A context manager.

    Attributes:
        asked: what the bench was asked for, as plain data.
        measurements: finished ones, in order.
        session: this one.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.asked = asked
        self.measurements: list[Measurement] = []
        self.session = 0
        self._path = path
        self._begun: list[tuple[int, int]] = []
        self._file: JsonLines | None = None

    @classmethod
    def open(cls, path: Path, asked: Mapping[str, Any]) -> Self:
        """Begin a ledger, or go on with one that was asked for the same.

        Raises:
            ConfigError: it was asked for something else.
            OSError: it cannot be written.
        """
        ledger = cls(path, asked)
        for record in read_records(path) if path.exists() else []:
            ledger._take(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger._file = JsonLines(path)
        ledger.session += 1
        ledger._file.write("bench", asked=asked)
        return ledger

    def _take(self, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "bench":
                self.session += 1
                differ = [key for key, value in record["asked"].items() if value != self.asked.get(key)]
                if differ:
                    raise ConfigError(
                        f"a resumed bench must keep what it was asked for; got another {', '.join(differ)} than "
                        f"{self._path.parent}; drop --resume to start over"
                    )
            case "begin":
                self._begun.append((record["cell"], record["round"]))
            case "measurement":
                self.measurements.append(Measurement(**record["measurement"]))
            case "interrupted":
                self._begun = self._begun[:-1]

    def needs(self, cell: int, round: int) -> bool:
        """Whether this is not measured yet; a cell that failed is not measured again."""
        return not any(m.cell == cell and (m.round == round or m.ended != "ok") for m in self.measurements)

    def begin(self, cell: int, round: int) -> Measurement | None:
        """Record the begin; returns what takes its place where the bench itself was killed in it twice."""
        killed = self._begun.count((cell, round))
        self._begun.append((cell, round))
        self._write("begin", cell=cell, round=round)
        return Measurement(cell, round, "killed", _KILLED_TWICE) if killed >= 2 else None

    def end(self, measurement: Measurement) -> None:
        """Record a finished measurement."""
        self.measurements.append(measurement)
        self._write("measurement", measurement=asdict(measurement))

    def interrupted(self) -> None:
        """Record that the operator or a full disk ended the current measurement; it will be repeated."""
        self._begun.pop()
        self._write("interrupted")

    def _write(self, kind: str, **fields: Any) -> None:
        assert self._file is not None, "it was opened"
        self._file.write(kind, **fields)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
