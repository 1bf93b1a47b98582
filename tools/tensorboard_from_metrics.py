"""Makes TensorBoard's event files again from the metrics and system figures of a run; nothing of the run is changed.

    python tools/tensorboard_from_metrics.py runs/exp001_full                # into runs/exp001_full/tb_rebuilt
    python tools/tensorboard_from_metrics.py runs/exp001_full elsewhere/tb

What a session did beyond the step that a later one went on from is left out.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import sys
from pathlib import Path

from vesuvius.runlog.listeners.tensorboard import TensorBoard
from vesuvius.runlog.records import current_records, iter_records, run_starts
from vesuvius.runlog.rotated import iter_rotated


def main() -> int:
    """Returns the exit code: 1 where there are no metrics, the directory exists or it cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("directory", type=Path, nargs="?", help="a new directory; RUN/tb_rebuilt if not given")
    arguments = parser.parse_args()
    directory = arguments.directory or arguments.run / "tb_rebuilt"
    logging.basicConfig(format="%(levelname)s %(message)s")
    if directory.exists():
        print(f"the directory must be new; got {directory}, which exists; name another one", file=sys.stderr)
        return 1
    metrics, count = arguments.run / "metrics.jsonl", 0
    try:
        starts = run_starts(metrics)
    except OSError as error:
        print(f"a run has a metrics.jsonl; got {error}; name the directory of a run", file=sys.stderr)
        return 1
    system = iter_rotated(arguments.run / "system.jsonl")
    merged = heapq.merge(iter_records(metrics), system, key=lambda record: record["time"])
    tensorboard = TensorBoard(directory, arguments.run)
    for record in current_records(merged, starts):
        tensorboard.write(record)
        count += 1
    tensorboard.close()
    if tensorboard.failed:  # it has said why
        return 1
    print(f"{directory}: {count} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
