"""`ledger.jsonl`: a line for each block; `--resume` continues from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, Self

from vesuvius import __version__
from vesuvius.config import Config
from vesuvius.config.describe import flatten
from vesuvius.errors import ConfigError
from vesuvius.runlog.plain import from_plain
from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.trials.machine import MachineFacts
from vesuvius.tuning.measurement import Block, SearchSpace


class TuneLedger:
    """The blocks of a tune, on disk.  A context manager.

    Attributes:
        config: the config to tune, as plain data.
        space: caps and limits.
        machine: where the tune runs.
        blocks: finished ones, in order.
    """

    def __init__(self, path: Path, config: dict[str, Any], space: SearchSpace, machine: MachineFacts) -> None:
        self.config = config
        self.space = space
        self.machine = machine
        self.blocks: list[Block] = []
        self._path = path
        self._file: JsonLines | None = None

    def begin(self) -> None:
        """Write its header; an existing ledger is renamed to a numbered file.

        Raises:
            OSError: it cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _put_aside(self._path, self._path.with_name("trials"))
        space, machine = asdict(self.space), asdict(self.machine)
        self._write("tune", version=__version__, config=self.config, space=space, machine=machine)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a ledger from disk.

        Raises:
            ConfigError: the ledger is missing or incomplete.
        """
        try:
            records = read_records(path)
        except FileNotFoundError:
            raise ConfigError(
                f"--resume needs the ledger of an earlier tune; got none in {path.parent}; drop --resume"
            ) from None
        except OSError as error:
            raise ConfigError(f"the ledger must be readable; got {error}; drop --resume to start over") from error
        try:
            header = next(record for record in records if record["kind"] == "tune")
            space, machine = from_plain(SearchSpace, header["space"]), from_plain(MachineFacts, header["machine"])
            ledger = cls(path, header["config"], space, machine)
            ledger.blocks += [from_plain(Block, record["block"]) for record in records if record["kind"] == "block"]
        except (StopIteration, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"the ledger must be from this version of vesuvius; got {path}, which lacks {error}; drop --resume to "
                "start over"
            ) from error
        return ledger

    def end(self, number: int, block: Block) -> None:
        """Record a finished block, unless it is there from an earlier session."""
        if number < len(self.blocks):
            return
        self.blocks.append(block)
        self._write("block", block=asdict(block))

    def _write(self, kind: str, **figures: Any) -> None:
        self._file = self._file or JsonLines(self._path)
        self._file.write(kind, **figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def check_same(
    ledger: TuneLedger, config: Config, machine: MachineFacts, asked: Sequence[tuple[str, Any, Any]] = ()
) -> None:
    """Raise ConfigError if a resumed tune has another config, machine or options.

    Args:
        asked: name, value in the ledger and current value of each command-line option.
    """
    now = flatten(config.model_dump(mode="json"))
    before = flatten(ledger.config)
    differing = [(key, before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())]
    machines = [(key, value, getattr(machine, key)) for key, value in asdict(ledger.machine).items() if key != "host"]
    for name, was, becomes in (*asked, *differing, *machines):
        if was != becomes:
            raise ConfigError(
                f"a resumed tune must keep its config, machine and options; got {name} {becomes!r}, which was {was!r}; "
                "drop --resume to start over"
            )


def _put_aside(*paths: Path) -> None:
    """Rename the files of an earlier tune: `ledger.jsonl` to `ledger-1.jsonl`, `trials` to `trials-1`."""

    def numbered(path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}-{number}{path.suffix}")

    free = next(number for number in count(1) if not any(numbered(path, number).exists() for path in paths))
    for path in paths:
        if path.exists():
            path.rename(numbered(path, free))
