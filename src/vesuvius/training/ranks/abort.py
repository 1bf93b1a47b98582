"""How a rank ends after a failure, its own or another's.

The ranks that live have sums queued that never complete, and NCCL waits for them wherever the host waits for the
device, and in `destroy_process_group`.  So each rank, the failed one included, gives its process group up, and a thread
ends the process where it does not end by itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from vesuvius.threads import BoundedCall, on_thread
from vesuvius.training.ranks.failure import RankError

log = logging.getLogger(__name__)

_POLL_S = 0.5
# After a failure, for the main thread: until what it waits for is given up, then until it has noticed.
_GIVE_UP_S = 5.0
_UNWIND_S = 15.0
_SAVE_S = 1800.0  # then to save, or to wait for that; timeout_s where that is more
_CLOSE_S = 10.0  # and to end the connections
_LAST_WORDS_S = 3.0  # to record why, where the disk may not answer


@dataclass(eq=False)
class Abort:
    """The end of this process after a failure.

    Attributes:
        saves: rank 0 saves a checkpoint before it ends; the others wait for it.
        on_kill: records why this process is ended where it hangs; called in another thread.
        unwinding: the main thread has noticed the failure.
        closing: it ends the connections.
        ended: it has.
        given_up: the group was, so a sum may be none.
    """

    saves: bool = True
    on_kill: Callable[[RankError], None] | None = None
    unwinding: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)

    def end_after(self, failure: RankError, rank: int, timeout_s: float) -> None:
        """End this process where its main thread hangs, in a collective or in a save on a disk that does not answer."""
        stage, began = "", time.monotonic()
        while not self.ended.wait(_POLL_S):
            before, (stage, limit_s) = stage, self._stage(timeout_s)
            if stage != before:
                began = time.monotonic()
            waited_s = time.monotonic() - began
            if waited_s > _GIVE_UP_S and not self.unwinding.is_set():
                self.give_up()
            if waited_s > limit_s:
                log.error("%s; rank %d %s and is ended", failure, rank, stage)
                if self.on_kill is not None:
                    with suppress(Exception):
                        BoundedCall(partial(self.on_kill, failure), _LAST_WORDS_S)()
                os._exit(failure.exit_code)

    def give_up(self) -> None:
        """End the collectives that never complete, with an error where the host waits for them."""
        if not self.given_up.is_set():
            self.given_up.set()
            on_thread(_abort_group, name="rank-abort")  # it may hang itself

    def close_group(self) -> None:
        """End the process group; after a failure without waiting for sums that never complete."""
        if self.unwinding.is_set():
            dist.distributed_c10d._abort_process_group()  # what Ray Train then finds gone, and leaves alone
        else:
            dist.destroy_process_group()

    def _stage(self, timeout_s: float) -> tuple[str, float]:
        """Where the main thread is after a failure, and for how many seconds it may be there."""
        if self.closing.is_set():
            return "has not closed its connections", _CLOSE_S
        if self.unwinding.is_set():
            return "has not ended since", max(_SAVE_S, timeout_s) if self.saves else _UNWIND_S
        return "hangs in a collective", _UNWIND_S


def _abort_group() -> None:
    """Does nothing under gloo, whose collectives end with the connections."""
    with suppress(RuntimeError):
        if (group := dist.group.WORLD) is not None:
            group.abort()
