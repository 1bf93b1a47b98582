"""Checks before a stream reads: the state it continues from, and the process it runs in."""

from __future__ import annotations

import os
import sys
from typing import Any

from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.reading.quarantine import parse_damaged_box
from vesuvius.stream.reading.reader import ReaderJob


def check_state(state: Any, job: ReaderJob) -> None:
    """Raise ConfigError unless `state` comes from `state_dict` of a stream over the same plan."""
    types = {"seed": int, "sample_index": int, "plan_hash": str, "quarantined": list}
    if not isinstance(state, dict) or any(type(state.get(key)) is not kind for key, kind in types.items()):
        raise ConfigError(
            f"{one_line(repr(state))} was not returned by state_dict() of a stream; pass such a state unchanged"
        )
    if state["plan_hash"] != job.plan.hash:
        raise ConfigError(
            f"The state belongs to plan {state['plan_hash']}, but the stream has plan {job.plan.hash}; use the same "
            "seed, data section and volumes"
        )
    for record in state["quarantined"]:
        parse_damaged_box(record, len(job.data.volumes))
    if state["sample_index"] < 0 or state["sample_index"] % job.world:
        raise ConfigError(
            f"The state is at sample {state['sample_index']}, not at a multiple of the number of ranks ({job.world}); "
            "continue with a number of ranks that divides it"
        )


def check_process(what: str, pid: int) -> None:
    """Raise ConfigError in a DataLoader's worker, and in any other process than `pid`."""
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)() is not None
    if worker or os.getpid() != pid:
        raise ConfigError(
            f"A {what} does not work in {'a worker of a DataLoader' if worker else 'a forked process'}: each would "
            "read the same samples; make and iterate it in one process; for a DataLoader, wrap a PatchLoader in a "
            "PatchDataset and set num_workers=0 and PatchLoader(workers=...)"
        )
