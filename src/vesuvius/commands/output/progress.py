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
def progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar where stderr is a terminal, from the first step on, else a line in the log every 10 s.

    Yields:
        What to call with what is counted, the number of those done and of all.  Another thing that is counted starts
        another estimate of the time left.
    """
    if not sys.stderr.isatty():
        counted, said, began, first = "", 0.0, 0.0, 0

        def say_line(what: str, done: int, total: int) -> None:
            nonlocal counted, said, began, first
            now = time.monotonic()
            if what != counted:
                counted, began, first = what, now, done
                said = said or now
            elif now - said >= SECONDS_PER_LINE and done > first:
                said = now
                left = format_duration((now - began) * (total - done) / (done - first))
                log.info("%s: %d of %d %s, about %s left", name, done, total, what, left)

        yield say_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(name, BarColumn(), *columns, console=Console(stderr=True), transient=True)
    with ExitStack() as shown:

        def move_bar(what: str, done: int, total: int) -> None:
            if not bar.tasks:
                shown.enter_context(bar)
                shown.enter_context(terminal_lines_through(lambda line: bar.console.out(line, highlight=False)))
            if not bar.tasks or bar.tasks[-1].description != what:
                for task in bar.tasks:
                    bar.remove_task(task.id)
                bar.add_task(what, total=total)
            bar.update(bar.task_ids[-1], completed=done)

        yield move_bar
