"""Readers as Ray actors.  In: tasks of regions.  Out: their blocks in order, and what became of the readers.

Importing it sets Ray's environment, which has to be there before Ray is imported."""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A reader's error reaches the trainer and is reported there in one line; Ray Data would print its tracebacks first.
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "CRITICAL")
# Ray's C++ core prints its internal errors to the terminal of the trainer, two of them in every healthy run.
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
# gRPC would send its calls to machines of the cluster, and to this one, through the proxy that http_proxy names.
os.environ.setdefault("grpc_proxy", "")
# Ray starts its workers at nice 15: on a machine that is busy with anything else the readers would starve.
os.environ.setdefault("RAY_worker_niceness", "0")
