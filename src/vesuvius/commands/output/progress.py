"""How far sampling is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from vesuvius.runlog.logfile import terminal_lines_through
from vesuvius.runlog.units import format_duration

log = logging.getLogger(__name__)

SECONDS_PER_LINE = 10.0


@contextmanager
def progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar where stderr is a terminal, from the first step on, else a line in the log every 10 s.

    Yields:
        What to call after each of `unit` with the number of those done and of all.
    """
    if not sys.stderr.isatty():
        said, began, first = 0.0, 0.0, 0

        def say_line(done: int, total: int) -> None:
            nonlocal said, began, first
            now = time.monotonic()
            if not began:
                said, began, first = now, now, done
            elif now - said >= SECONDS_PER_LINE:
                said = now
                left = format_duration((now - began) * (total - done) / (done - first))
                log.info("sampling: %d of %d %s, about %s left", done, total, unit, left)

        yield say_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress("sampling", *columns, console=Console(stderr=True), transient=True)
    with ExitStack() as shown:

        def move_bar(done: int, total: int) -> None:
            if not bar.tasks:
                bar.add_task("", total=total)
                shown.enter_context(bar)
                shown.enter_context(terminal_lines_through(lambda line: bar.console.out(line, highlight=False)))
            bar.update(bar.task_ids[0], completed=done)

        yield move_bar
