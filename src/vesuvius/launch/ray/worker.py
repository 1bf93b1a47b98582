"""What each worker of Ray Train runs: `training.run.train`, as torchrun would run it, with an ear for the command."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import ray

from vesuvius.errors import EXIT_ERROR, VesuviusError, one_line
from vesuvius.launch.rank import train_as_rank
from vesuvius.runlog.logfile import close_logs
from vesuvius.training.ranks.ranks import RankLostError
from vesuvius.training.request import Request
from vesuvius.training.stop import StopRequest

log = logging.getLogger(__name__)

_POLL_S = 0.5


class Mailbox:
    """An actor by which the command tells rank 0 of a stop, and learns whether there is a rank 0; and a rank all those
    that are started after it of its error, if they would meet that too."""

    def __init__(self) -> None:
        self._starts = 0
        self._stop: tuple[int, str] | None = None
        self._end: tuple[int, str] | None = None
        self._asked_s = time.monotonic()  # when rank 0 last asked

    def start(self, rank: int) -> tuple[bool, tuple[int, str] | None]:
        """Note a start; returns whether rank 0 was started before, and with what the rank is to end at once."""
        self._starts += rank == 0
        return rank == 0 and self._starts > 1, self._end

    def give_up(self, exit_code: int, message: str) -> None:
        """End all ranks that are started from now on."""
        self._end = self._end or (exit_code, message)

    def ask(self, exit_code: int, reason: str) -> None:
        """Ask for a stop."""
        self._stop = (exit_code, reason)

    def stop(self) -> tuple[int, str] | None:
        """The stop that rank 0 is asked for."""
        self._asked_s = time.monotonic()
        return self._stop

    def silent_s(self) -> float:
        """Seconds since rank 0 last asked, or since the beginning."""
        return time.monotonic() - self._asked_s


@dataclass(frozen=True)
class Job:
    """What a worker gets."""

    request: Request
    directory: str  # where relative paths begin
    began: float  # when the command did, in seconds since 1970
    mailbox: Any


def run_rank(arguments: dict[str, Any]) -> tuple[int, str]:
    """What each worker runs.  Returns the exit code, and the error that it stands for.

    Raises:
        RankLostError: another rank is gone; Ray Train then starts all of them again.
        Exception: the same, of a GPU or its network; after any other error they end as soon as they are started.
    """
    job: Job = arguments["job"]
    rank, hours = int(os.environ["RANK"]), job.request.config.training.max_hours
    again, end = ray.get(job.mailbox.start.remote(rank))
    if end:
        return cast(tuple[int, str], end)
    logging.getLogger("vesuvius").setLevel(logging.INFO)
    request = replace(job.request, resume=True) if again else job.request
    # `max_hours` count from the start of the command, over all restarts.
    stop = StopRequest(None if hours is None else max(hours - (time.time() - job.began) / 3600, 1e-3))
    ended = threading.Event()
    if rank == 0:
        threading.Thread(target=_follow, args=(job.mailbox, stop, ended), name="mailbox", daemon=True).start()
    try:
        os.chdir(job.directory)
        return train_as_rank(request, stop=stop), ""
    except RankLostError as error:
        log.error("%s; Ray Train starts all ranks again, from the last checkpoint", error)
        raise
    except VesuviusError as error:
        log.error("%s", error)
        return error.exit_code, str(error)
    except Exception as error:
        if _restart_may_help(error):
            log.exception("Ray Train starts all ranks again, from the last checkpoint")
        else:
            log.exception("the run ends: this error would come again")
            ray.get(job.mailbox.give_up.remote(EXIT_ERROR, f"{type(error).__name__}: {one_line(error)}"))
        raise
    finally:
        ended.set()
        close_logs()


def _restart_may_help(error: BaseException) -> bool:
    """Whether an error without a message for the user is of a GPU or its network, which another start may not meet.

    An assertion in a kernel, such as an index out of range, fails again wherever it runs.  Pure.
    """
    text = str(error)
    return any(word in text for word in ("CUDA", "NCCL")) and "device-side assert" not in text


def _follow(mailbox: Any, stop: StopRequest, ended: threading.Event) -> None:
    """Ask for a stop until the rank has ended, or the process that keeps the mailbox is gone."""
    while not ended.wait(_POLL_S):
        try:
            asked = ray.get(mailbox.stop.remote(), timeout=30)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError:
            return
        if asked is not None:
            stop.ask(*asked)
