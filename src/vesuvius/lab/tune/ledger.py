"""`ledger.jsonl`: what a tune has tried, a line for each beginning and end of a trial; it goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from vesuvius import __version__
from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Entry, Outcome, Trial, trial_from_record, trial_record
from vesuvius.observe.records import JsonLines, read_records

_KILLED_TWICE = "the tune was killed twice during this trial; whatever did it strikes again with the same setting"


@dataclass(frozen=True)
class Machine:
    """Where a tune runs: its figures hold there only.  A container that is started anew has another host name."""

    host: str
    cores: float
    ram_gib: float
    gpu: str | None
    gpu_gib: float | None

    def words(self) -> str:
        """In one line."""
        gpu = "no GPU" if self.gpu is None else f"{self.gpu} ({self.gpu_gib:.0f} GiB)"
        return f"{self.host}: {self.cores:g} cores, {self.ram_gib:.0f} GiB of RAM, {gpu}"


class Ledger:
    """The trials of a tune, on disk.  A context manager.

    Attributes:
        config: that is tuned, as plain data.
        space: what may be tried.
        machine: where.
        entries: trials that are over, in order.
    """

    def __init__(self, path: Path, config: dict[str, Any], space: Space, machine: Machine) -> None:
        self.config = config
        self.space = space
        self.machine = machine
        self.entries: list[Entry] = []
        self._path = path
        self._begun: list[Trial] = []
        self._file: JsonLines | None = None

    @classmethod
    def new(cls, path: Path, config: Config, space: Space, machine: Machine) -> Self:
        """Begin one; a ledger that is there already is kept beside it, under a number.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _put_aside(path, path.with_name("trials"))
        ledger = cls.sketch(path, config, space, machine)
        ledger._write("tune", version=__version__, config=ledger.config, space=space.record(), machine=asdict(machine))
        return ledger

    @classmethod
    def sketch(cls, path: Path, config: Config, space: Space, machine: Machine) -> Self:
        """One that is not on disk, for a dry run."""
        return cls(path, config.model_dump(mode="json"), space, machine)

    @classmethod
    def read(cls, path: Path) -> Self:
        """One that is on disk.

        Raises:
            ConfigError: it is not there, or not whole.
        """
        try:
            records = read_records(path)
        except FileNotFoundError:
            raise ConfigError(
                f"--resume goes on with a tune that was begun; got none in {path.parent}; leave --resume away"
            ) from None
        except OSError as error:
            raise ConfigError(f"the ledger must be readable; got {error}; leave --resume away to begin anew") from error
        try:
            header = next(record for record in records if record["kind"] == "tune")
            ledger = cls(path, header["config"], Space.from_record(header["space"]), Machine(**header["machine"]))
            for record in records:
                ledger._take(record)
        except (StopIteration, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"the ledger must be one of this version of vesuvius; got {path}, which lacks {error}; leave --resume "
                "away to begin anew"
            ) from error
        return ledger

    def _take(self, record: dict[str, Any]) -> None:
        fields = {key: value for key, value in record.items() if key not in ("kind", "time")}
        if record["kind"] == "trial":
            self._begun.append(trial_from_record(fields))
        elif record["kind"] == "outcome":
            self._end(Outcome.from_record(fields))
        elif record["kind"] == "interrupted":
            self._begun.clear()

    def _end(self, outcome: Outcome) -> None:
        self.entries.append(Entry(self._begun[-1], outcome))
        self._begun.clear()

    def begin(self, trial: Trial) -> Outcome | None:
        """Note that a trial begins.

        Returns:
            What to take for its end, without running it: None, unless the tune itself has died in it twice.
        """
        died = sum(begun.setting == trial.setting for begun in self._begun)
        self._begun.append(trial)
        self._write("trial", **trial_record(trial))
        return Outcome("killed", _KILLED_TWICE, 0.0, None) if died >= 2 else None

    def end(self, outcome: Outcome) -> None:
        """Note how the trial that was begun last has ended."""
        self._end(outcome)
        self._write("outcome", **outcome.record())

    def interrupted(self) -> None:
        """The trial in hand was broken off by the operator or a full disk, which says nothing against it."""
        self._begun.clear()
        self._write("interrupted")

    def _write(self, kind: str, **figures: Any) -> None:
        self._file = self._file or JsonLines(self._path)
        self._file.write(kind, **figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def check_same(ledger: Ledger, config: Config, machine: Machine, asked: Sequence[tuple[str, Any, Any]] = ()) -> None:
    """Raises ConfigError where a tune would go on with another config, on another machine, or asked for otherwise.

    Args:
        asked: name, value in the ledger and value now of what the command line says.
    """
    now = _flat(config.model_dump(mode="json"))
    before = _flat(ledger.config)
    differing = [(key, before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())]
    machines = [(key, value, getattr(machine, key)) for key, value in asdict(ledger.machine).items() if key != "host"]
    for name, was, becomes in (*asked, *differing, *machines):
        if was != becomes:
            raise ConfigError(
                f"a tune goes on with what it was begun with; got {name} {becomes!r}, which was {was!r}; leave "
                "--resume away to begin anew"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _put_aside(*paths: Path) -> None:
    """Rename what an earlier tune has left: `ledger.jsonl` becomes `ledger-1.jsonl`, `trials` becomes `trials-1`."""
    number = 1
    while any(_numbered(path, number).exists() for path in paths):
        number += 1
    for path in paths:
        if path.exists():
            path.rename(_numbered(path, number))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
