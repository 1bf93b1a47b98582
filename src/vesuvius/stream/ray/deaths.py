"""Why a reader has died, by Ray's own account."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass

import ray

from vesuvius.errors import one_line
from vesuvius.stream.ray import private

log = logging.getLogger(__name__)

_ASK_S = 2.0


@dataclass(frozen=True)
class RayCause:
    """Why a process of Ray ended, by Ray's own account.

    Attributes:
        exit_type: `NODE_OUT_OF_MEMORY` where Ray's memory monitor has killed it; `SYSTEM_ERROR` where it was gone
            without a word (SIGKILL, a crash, the kernel); `USER_ERROR`, `INTENDED_SYSTEM_EXIT` or `INTENDED_USER_EXIT`.
        detail: one line, in Ray's words.
        time: when Ray noticed, seconds since 1970; a few tenths of a second late.
    """

    exit_type: str
    detail: str
    time: float

    def __str__(self) -> str:
        by = "out of memory: Ray's memory monitor" if self.exit_type == "NODE_OUT_OF_MEMORY" else self.exit_type
        return f"{by}: {self.detail}"


def reader_death_cause(pid: int, node: str) -> RayCause | None:
    """Why a reader that has died did; None where Ray does not tell, or does not yet.

    Takes a few milliseconds, at most two seconds; never raises.

    Args:
        pid: of the dead process.
        node: host name of its machine.
    """
    answers: list[RayCause | None] = []
    # On a thread of its own: Ray waits for ever for a cluster whose head is gone.
    asking = threading.Thread(target=lambda: answers.append(_ask_for_cause(pid, node)), daemon=True)
    asking.start()
    asking.join(_ASK_S)
    return answers[0] if answers else None


def _ask_for_cause(pid: int, node: str) -> RayCause | None:
    try:
        known = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = {bytes.fromhex(found["NodeID"]) for found in known if found["NodeManagerHostname"] == node}
        table = private.worker_rows()
    except Exception as error:  # only one line of a report depends on it
        log.debug("Ray does not say how reader %d ended: %s", pid, one_line(error))
        return None
    dead = [row for row in table if row.pid == pid and not row.is_alive and row.node_id in nodes]
    if not dead:
        return None
    last = max(dead, key=lambda row: row.end_time)
    return RayCause(last.exit_type, exit_detail(last.exit_detail, pid), last.end_time)


def exit_detail(text: str, pid: int) -> str:
    """What Ray says of the end of a process, in one line, without advice, guesses and other processes.  Pure."""
    reason = re.search(r"OOM kill reason: (.*)", text)
    if reason is None:
        return one_line(text.split(" Some common causes include")[0])
    used = re.search(rf"\bpid={pid}, actual memory used=([\d.]+)GB", text)
    figures = re.sub(r"(\d+)B\b", lambda found: f"{int(found[1]) / 2**30:.2f} GiB", reason[1])
    return one_line(figures + (f"; the reader held {used[1]} GiB" if used else ""))
