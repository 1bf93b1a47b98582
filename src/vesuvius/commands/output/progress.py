"""How far a command is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vesuvius.runlog.logfile import terminal_lines_through
from vesuvius.runlog.units import format_duration

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

log = logging.getLogger(__name__)

SECONDS_PER_LINE = 10.0


@contextmanager
def progress(name: str) -> Iterator[Callable[..., None]]:
    """A bar where stderr is a terminal, from the first step on, else a line in the log every 10 s.

    Yields:
        `tell(what, done, total, more="")`: what is counted, the number of those done and of all, and what else there is
        to say.  Another thing that is counted starts another estimate of the time left.
    """
    if not sys.stderr.isatty():
        counted, said, began, first = "", 0.0, 0.0, 0

        def say_line(what: str, done: int, total: int, more: str = "") -> None:
            nonlocal counted, said, began, first
            now = time.monotonic()
            if what != counted:
                counted, began, first = what, now, done
                said = said or now
            elif now - said >= SECONDS_PER_LINE and done > first:
                said = now
                left = format_duration((now - began) * (total - done) / (done - first))
                log.info("%s: %d of %d %s, about %s left", name, done, total, _joined(what, more), left)

        yield say_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with terminal_bar(name, BarColumn(), *columns, transient=True) as move:
        yield lambda what, done, total, more="": move(done, total, _joined(what, more), what)


def _joined(what: str, more: str) -> str:
    return f"{what}, {more}" if more else what


@contextmanager
def terminal_bar(
    name: str, *columns: ProgressColumn, stderr: bool = True, **options: Any
) -> Iterator[Callable[..., None]]:
    """A bar with these columns after its name and the log's lines above it, from the first move on.

    Args:
        stderr: where it is shown, else on standard output.
        options: of rich's `Progress`.

    Yields:
        `move(done, total, text="", counted="")`.  Another thing that is `counted` starts another estimate of the time.
    """
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(name, *columns, console=Console(stderr=stderr), **options)
    shown = ExitStack()

    def move(done: int, total: int, text: str = "", counted: str = "") -> None:
        if not bar.live.is_started:
            with suppress(OSError):  # the terminal has closed
                shown.enter_context(bar)
            # as they are: `print` breaks lines at the width and colours numbers
            shown.enter_context(terminal_lines_through(lambda line: bar.console.out(line, highlight=False)))
        if not bar.tasks or bar.tasks[-1].fields["counted"] != counted:
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(text, total=total, counted=counted)
        bar.update(bar.task_ids[-1], completed=done, total=total, description=text)

    try:
        yield move
    finally:
        with suppress(OSError):
            shown.close()
