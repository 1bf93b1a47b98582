"""One rank of a run: the only one, or one in a process that torchrun or Ray Train has started."""

from __future__ import annotations

import torch

from vesuvius.errors import EXIT_ERROR, VesuviusError
from vesuvius.training.ranks.part import launched_ranks
from vesuvius.training.ranks.ranks import open_ranks
from vesuvius.training.request import Request
from vesuvius.training.run import train
from vesuvius.training.stop import StopRequest


def train_as_rank(request: Request, stop: StopRequest | None = None) -> int:
    """Train as the rank that the environment says this process is, the only one without it, and return its exit code.

    Args:
        stop: a request that this process already listens to.
    """
    several = launched_ranks() not in (None, 1)  # a single one asks later, when Ctrl-C ends a driver that hangs
    device_type = "cuda" if several and torch.cuda.is_available() else "cpu"
    with open_ranks(device_type, 60 * request.config.cluster.rank_timeout_minutes) as ranks:
        try:
            exit_code = train(request, ranks=ranks, stop=stop)
        except Exception as error:
            cause = ranks.explain(error)  # also of the first collectives, and of those of the last checkpoint
            ranks.fail(cause)
            ranks.finish(cause.exit_code if isinstance(cause, VesuviusError) else EXIT_ERROR)
            if cause is error:
                raise
            raise cause from error
        ranks.finish(exit_code)
    return exit_code
