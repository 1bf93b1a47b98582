"""`ledger.json` of a bench: in which order is measured, and what has been measured so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vesuvius.errors import ConfigError, StorageError
from vesuvius.runlog.files.whole_file import write_whole
from vesuvius.runlog.plain import from_plain
from vesuvius.runlog.records import make_record, parsed
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


class BenchLedger:
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
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._asked = path, asked
        before = parsed(path.read_bytes()) if path.exists() else {}
        if before is None:
            raise _unreadable(path)
        if differ := [key for key, value in before.get("asked", {}).items() if value != asked.get(key)]:
            raise ConfigError(
                f"a resumed bench must repeat the earlier request; got a different {', '.join(differ)} than in "
                f"{path.parent}; drop --resume to start over"
            )
        try:
            measured = [from_plain(Measurement, each) for each in before.get("measurements", ())]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _unreadable(path) from None
        self.measurements = [each for each in measured if each.ended == "ok" or not retry_failed]
        self.session: int = before.get("session", 0) + 1
        # How often the measurement that comes next was begun and not ended, as the bench was killed in it.
        self._begun: int = 0 if retry_failed else before.get("begun", 0)
        self._write()

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
                if self._begun < 2:
                    self._begun += 1
                    self._write()
                    try:
                        done = measure(cell, round)
                    except (TrialInterrupted, StorageError, OSError):
                        self._begun -= 1
                        with suppress(OSError):  # a full disk, which is what is raised
                            self._write()
                        raise
                done = replace(done, session=self.session)
                self.measurements.append(done)
                self._begun = 0
                self._write()
                on_done(done)

    def _write(self) -> None:
        state = {"session": self.session, "asked": self._asked, "begun": self._begun}
        record = make_record("bench", **state, measurements=[asdict(each) for each in self.measurements])
        write_whole(self._path, json.dumps(record).encode())


def _unreadable(path: Path) -> ConfigError:
    return ConfigError(
        f"--resume needs a ledger of this version of vesuvius; got {path}, which cannot be read; drop --resume to "
        "start over"
    )
