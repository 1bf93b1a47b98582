"""What each worker of Ray Train runs: `training.run.train`, as torchrun would run it, with an ear for the bulletin.

Only the worker imports what trains: the command and Ray Train's controller, which know this module, start without it.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import ray

from vesuvius.config import Config
from vesuvius.errors import EXIT_ERROR, ConfigError, VesuviusError, one_line
from vesuvius.launch.ray.bulletin import Start
from vesuvius.runlog.logfile import close_logs
from vesuvius.runlog.run_dir import run_dir
from vesuvius.training.request import Request
from vesuvius.training.stop import StopRequest

log = logging.getLogger(__name__)

_POLL_S = 0.5


@dataclass(frozen=True)
class Job:
    """What a worker gets: the request, where relative paths begin, when all began, and the bulletin."""

    request: Request
    directory: str
    began: float
    bulletin: Any

    def stop_request(self) -> StopRequest:
        """For rank 0: `max_hours` count from the start of this command, over all restarts."""
        hours = self.request.config.training.max_hours
        return StopRequest(None if hours is None else max(hours - (time.time() - self.began) / 3600, 1e-3))


def run_rank(arguments: dict[str, Any]) -> tuple[int, str]:
    """What each worker runs.  Returns the exit code, and the error that it stands for.

    Raises:
        RankLostError: another rank is gone; Ray Train then starts all of them anew.
        RuntimeError: of a GPU or its network, which another start may not meet; not twice at the same step.
    """
    from vesuvius.launch.rank import train_as_rank
    from vesuvius.training.ranks.errors import RankLostError, restart_may_help
    from vesuvius.training.ranks.ranks import Restart

    job: Job = arguments["job"]
    logging.getLogger("vesuvius").setLevel(logging.INFO)
    rank, request = int(os.environ["RANK"]), job.request
    start: Start = ray.get(job.bulletin.start.remote(rank))
    if start.ended is not None:
        return start.ended
    restart = None
    if start.again:
        request = replace(request, resume=True)
        restart = Restart(start.restarts, request.config.cluster.max_restarts, start.lost)
    stop = StopRequest(None) if rank else job.stop_request()
    if rank == 0:
        threading.Thread(target=_follow, args=(job.bulletin, stop), name="bulletin", daemon=True).start()

    def on_step(step: int) -> None:
        job.bulletin.reach.remote(step)

    try:
        _enter(job.directory)
        if rank == 0 and start.begun:
            _refuse_missing(request.config)
        exit_code = train_as_rank(request, on_step, stop, restart)
        if rank == 0:
            ray.get(job.bulletin.leave.remote())
        return exit_code, ""
    except RankLostError as error:
        log.error("%s", error)
        raise
    except VesuviusError as error:
        log.error("%s", error)
        ended = error.exit_code, str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        if restart_may_help(error):
            if (step := ray.get(job.bulletin.fail.remote(f"rank {rank}: {text}"))) is None:
                log.exception("a GPU or its network has failed, and all ranks are to be started again")
                raise
            what = f"rank {rank} has failed at step {step} as it did before, so it is not started a third time"
        else:
            what = "a defect of vesuvius, please report it"
        log.exception("%s", what)
        remedy = "; CUDA_LAUNCH_BLOCKING=1 in the environment shows where a kernel fails" if "CUDA" in text else ""
        ended = EXIT_ERROR, f"{what}: {text}{remedy}"
    finally:
        close_logs()
    ray.get(job.bulletin.end.remote(*ended))
    return ended


def _enter(directory: str) -> None:
    """Go where the command was started, where relative paths begin.  Raises ConfigError."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the folder in which the command is started must be there on all nodes; got {error} on "
            f"{platform.node()}; start it in one on a shared file system"
        ) from error


def _refuse_missing(config: Config) -> None:
    """Raises ConfigError where rank 0 would begin a run anew that has made steps: it came to another node."""
    directory = run_dir(config)
    if not directory.log.parent.exists():
        raise ConfigError(
            f"the run directory must be on a path that all nodes share; got {directory.path.absolute()}, which is not "
            f"on {platform.node()}, where rank 0 was started again; put runs/ on a shared file system, or let "
            "VESUVIUS_RUNS name one"
        )


def _follow(bulletin: Any, stop: StopRequest) -> None:
    """Ask the bulletin for a stop until the process that keeps it is gone.

    Also after another stop: the command ends a rank 0 that does not hear of its signal, be it in its last save.
    """
    while True:
        try:
            asked = ray.get(bulletin.stop.remote(), timeout=30)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError:
            return
        if asked is not None:
            stop.adopt(*asked)
        threading.Event().wait(_POLL_S)
