"""Writes the run's log to `logs/train_full.log` and the terminal, and formats the line of a step."""

import logging
import os
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

from vesuvius.runlog.files import AppendFile
from vesuvius.runlog.records import Record
from vesuvius.runlog.redact import redact
from vesuvius.runlog.units import DATE_FORMAT, GIB, format_duration, format_number

log = logging.getLogger(__name__)

_CLEAR = "\r\x1b[K"  # back to the first column, and erase the line
_REDRAW_S = 0.1  # least time between two status lines


def step_line(record: Record) -> str:
    """Format a step's record as the line for `grep 'Train step'`.  Its field names are stable: scripts read them."""
    f = SimpleNamespace(**record)
    vram = "-" if f.vram_used_bytes is None else f"{f.vram_used_bytes / GIB:.1f}/{f.vram_limit_bytes / GIB:.1f}"
    eta = "-" if f.eta_s is None else format_duration(round(f.eta_s)).replace(" ", "")
    pause = f" pause_s {f.pause_s:.3f}" if f.pause_s >= 0.0005 else ""  # part of other_s
    slowest = "-" if f.slowest_rank is None else f.slowest_rank
    ranks = "" if f.ranks == 1 else f" comm_s {f.comm_s:.3f} ranks {f.ranks} slowest {slowest}"
    mfu = "" if f.mfu is None else f" mfu_pct {100 * f.mfu:.1f}"
    worker_max = "-" if f.worker_max_bytes is None else f"{f.worker_max_bytes / GIB:.1f}"
    workers = "-" if f.workers is None else f.workers
    idle = "" if None in (f.working, f.workers) or f.working >= f.workers else f" ({f.working} with work)"
    return (
        f"Train step {f.step}/{f.steps} epoch {f.epoch}/{f.epochs} loss {f.loss:.5f} lr {f.lr:.1e} "
        f"step_s {f.step_s:.3f} data_s {f.data_s:.3f} h2d_s {f.h2d_s:.3f} gpu_s {f.gpu_s:.3f} other_s {f.other_s:.3f} "
        f"data_pct {100 * f.data_s / f.step_s:.1f} samples_s {f.samples / f.step_s:.2f}{mfu} "
        f"vram_gib {vram} ram_gib {f.ram_used_bytes / GIB:.1f}/{f.ram_limit_bytes / GIB:.1f} "
        f"workers {workers}{idle} worker_max_gib {worker_max} eta {eta}{ranks}{pause}"
    )


def status_line(record: Record, bottleneck: str) -> str:
    """Return the status line that a terminal shows in place of `step_line`; `bottleneck` is "" until it is known."""
    f = SimpleNamespace(**record)
    parts = (
        f"step {f.step}/{f.steps} ({100 * f.step / f.steps:.0f} %)",
        "" if f.eta_s is None else f"{format_duration(f.eta_s)} left",
        f"loss {f.loss:.4f}",
        f"{format_number(f.samples / (f.step_p50_s or f.step_s))} samples/s",
        bottleneck,
    )
    return " | ".join(filter(None, parts))


def open_log(path: Path) -> None:
    """Also send this package's messages to a file, until `close_logs`.  Raises OSError: it cannot be opened."""
    _add(_LogFile(path))


def log_to_terminal() -> None:
    """Send this package's messages to the terminal: warnings and errors to stderr, which may not be redirected."""
    package = logging.getLogger("vesuvius")
    package.setLevel(logging.INFO)
    package.propagate = False
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _log_thread_end
    if not any(isinstance(handler, _TerminalHandler) for handler in package.handlers):
        _add(_TerminalHandler())


def _log_thread_end(failed: threading.ExceptHookArgs) -> None:
    """Log one line instead of a traceback if a full disk ends a thread of a library, such as TensorBoard's writer."""
    if isinstance(failed.exc_value, OSError):
        log.warning("thread %s ended: %s", failed.thread and failed.thread.name, failed.exc_value)
    else:
        threading.__excepthook__(failed)


def close_logs() -> None:
    """Close the files opened by `open_log`, and clear the status line of the terminal."""
    _close(_LogFile)
    for handler in logging.getLogger("vesuvius").handlers:
        handler.flush()


def close_terminal() -> None:
    _close(_TerminalHandler)


def _add(handler: logging.Handler) -> None:
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", DATE_FORMAT))
    logging.getLogger("vesuvius").addHandler(handler)


def _close(kind: type[logging.Handler]) -> None:
    package = logging.getLogger("vesuvius")
    for handler in [handler for handler in package.handlers if isinstance(handler, kind)]:
        package.removeHandler(handler)
        handler.flush()
        handler.close()


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _LogFile(logging.Handler):
    """Writes to a file and survives a full disk, for which logging's own handler prints a traceback per line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def handle(self, record: logging.LogRecord) -> bool:
        """Write without logging's lock: a thread waiting for a hung disk would block the guard and the watchdog."""
        try:
            self._file.write_line(self.format(record))
        except Exception:  # a line that cannot be formatted must not end the run
            self.handleError(record)
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def silence(stream: TextIO) -> None:
    """Redirect a stream without a reader to the null device, including Python's flush on exit (see `signal`)."""
    with suppress(OSError):  # no descriptor: output is captured
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def silence_lost_terminal() -> None:
    """Silence stdout and stderr if their terminal has closed; otherwise every write would raise."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and is_lost_terminal(stream):
            silence(stream)


def is_lost_terminal(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
        return stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
    except (OSError, ValueError):  # ValueError: closed
        return False


class _TerminalHandler(logging.Handler):
    """On a terminal, shows the `status` (`extra=`) of a message in its place: the last line, rewritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self._status, self._drawn_s = "", 0.0

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO | None = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        if stream is None or stream.closed:  # None: closed when the process started
            return
        status = getattr(record, "status", "")
        try:
            line = self.format(record) + "\n"
            if status and stream.isatty() and os.environ.get("TERM") != "dumb":
                if time.monotonic() >= self._drawn_s + _REDRAW_S:
                    self._draw(status)
                return
            status = "" if record.levelno >= logging.ERROR else self._status  # the process may be about to end
            self._draw("")
            stream.write(line)
            stream.flush()
            self._draw(status)
        except OSError:  # `| head` has exited or the terminal is gone: the run continues with its log file
            silence(stream)
        except RuntimeError:  # "reentrant call": a signal handler logs while its thread writes to this stream
            with suppress(OSError, ValueError):
                line = f"{_CLEAR}{line}" if stream.isatty() else line
                os.write(stream.fileno(), line.encode(errors="backslashreplace"))
        except Exception:  # a line that cannot be printed must not end the run
            self.handleError(record)

    def flush(self) -> None:
        with suppress(OSError, ValueError, RuntimeError):
            self._draw("")

    def _draw(self, status: str) -> None:
        """Replace the status line, cut to the width of the terminal; "" clears it."""
        if status or self._status:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80
            self._status, self._drawn_s = status, time.monotonic()
            sys.stdout.write(f"{_CLEAR}{status[: columns - 1]}")
            sys.stdout.flush()
