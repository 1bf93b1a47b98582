"""The log of a run, printed while another process writes it."""

from __future__ import annotations

from pathlib import Path

_LAST_CHARACTERS = 100_000


class LogLines:
    """Prints what is appended to the log of rank 0.

    Attributes:
        last: the end of what was printed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.exists() else 0
        self.last = ""

    def print_new(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
        except OSError:  # not there yet
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        printed = whole.decode("utf-8", errors="replace")
        self.last = (self.last + printed)[-_LAST_CHARACTERS:]
        print(printed, end="", flush=True)
