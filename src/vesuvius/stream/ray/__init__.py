"""Readers as Ray actors.  In: tasks of regions.  Out: their blocks in order, and the deaths of readers.

Importing it sets Ray's environment variables, which must be set before Ray is imported."""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The trainer reports a reader's error in one line; Ray Data would print its tracebacks first.
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "CRITICAL")
# Ray's C++ core prints its internal errors to the terminal of the trainer, two of them in every healthy run.
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
# gRPC would send calls within the cluster, and to this machine, through the proxy in http_proxy.
os.environ.setdefault("grpc_proxy", "")
# Ray starts its workers at nice 15: on a busy machine the readers would starve.
os.environ.setdefault("RAY_worker_niceness", "0")
