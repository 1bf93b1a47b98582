"""The figures of a run for Weights & Biases and MLflow, by their own packages, which are extras of ours.

    run: records -> a thread -> a pipe -> this module as a process: the tracker's package -> its server or folder

In a process of its own, so that a package or a server that hangs, crashes or takes a minute costs the run nothing but
a line in the log.  Where the server stands, and as whom one writes there, is the packages' business: WANDB_MODE,
WANDB_PROJECT, MLFLOW_TRACKING_URI and so on in the environment, or their own files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from vesuvius.errors import ConfigError
from vesuvius.runlog.files.delayed import DelayedWrites
from vesuvius.runlog.listeners.scalars import SystemPace, scalars_of
from vesuvius.runlog.records import Record

log = logging.getLogger(__name__)

Message = dict[str, Any]
Send = Callable[[int, float, dict[str, float]], None]
"""Takes a step, its time in seconds since 1970, and figures by their tags."""

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
_CLOSE_S = 30.0
_GIVES_UP_AFTER = 20  # messages in a row that it could not hand on
_PARAMS_A_CALL = 100  # MLflow takes no more


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError where the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"monitor.trackers {name} needs a package; got none; `pip install {_PACKAGES[name]}`, or leave it out"
            )


class Tracker:
    """One tracker.  A context manager, which gives its process 30 seconds at the end.

    Args:
        name: `wandb` or `mlflow`.
        run: its name.
        directory: of the run; the tracker keeps there by what id it knows the run, and what it writes offline.
        messages: the file for what the process prints.
        settings: of the run, by their keys.
    """

    def __init__(
        self, name: str, run: str, directory: Path, messages: Path, settings: Message, close_s: float = _CLOSE_S
    ) -> None:
        self._name, self._messages, self._close_s = name, messages, close_s
        self._pace = SystemPace()
        self._failed = False
        with messages.open("ab") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, name, run, str(directory)],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the trainer, which closes the pipe
            )
        self._sends = DelayedWrites(name, self._say_failed)
        self._send({"settings": settings})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        until = time.monotonic() + self._close_s
        self._sends.later(self._process.stdin.close)
        self._sends.close(self._close_s)
        try:
            code = self._process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code:
            self._say_failed()

    def take(self, record: Record) -> None:
        """Hand the figures of a record on.  Returns at once and raises nothing."""
        if record["kind"] == "run_end":
            self._send({"exit_code": record.get("exit_code")})
        elif self._pace.takes(record):
            figures = {tag: value for tag, value in scalars_of(record).items() if value is not None}
            if figures:
                self._send({"step": record.get("step") or 0, "time": record["time"], "figures": figures})

    def _send(self, message: Message) -> None:
        line = json.dumps(message).encode() + b"\n"
        if not self._sends.later(lambda: self._write(line)):
            self._say_failed()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _say_failed(self) -> None:
        """Once a session."""
        if not self._failed:
            self._failed = True
            log.warning(
                "monitor.trackers %s does not accept this run's figures, or not fast enough; what it "
                "printed is in %s; the run continues, and metrics.jsonl has them all",
                *(self._name, self._messages),
            )


def serve(name: str, run: str, directory: Path, lines: IO[str]) -> int:
    """The process: hand on what comes, until the pipe ends.  Returns its exit code."""
    settings = json.loads(lines.readline() or "{}").get("settings", {})
    send, finish = (_wandb if name == "wandb" else _mlflow)(run, directory, settings)
    exit_code, failures = 1, 0  # a run that was killed sends no end
    for line in lines:
        message = json.loads(line)
        if "exit_code" in message:
            exit_code = message["exit_code"]
            continue
        try:
            send(message["step"], message["time"], message["figures"])
            failures = 0
        except Exception:
            failures += 1
            traceback.print_exc()
            if failures == _GIVES_UP_AFTER:
                return 1
    finish(exit_code)
    return bool(failures)


def _wandb(run: str, directory: Path, settings: Message) -> tuple[Send, Callable[[int], None]]:
    wandb = importlib.import_module("wandb")
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "vesuvius"),
        name=run,
        id=_kept_id(directory / "wandb_id", lambda: uuid.uuid4().hex[:12]),
        resume="allow",
        dir=str(directory),
        config=settings,
    )
    opened.define_metric("*", step_metric="step")  # its own must not fall, and after a resume ours does

    def send(step: int, time_s: float, figures: dict[str, float]) -> None:
        opened.log({"step": step, **figures})

    return send, lambda exit_code: opened.finish(exit_code=exit_code)


def _mlflow(run: str, directory: Path, settings: Message) -> tuple[Send, Callable[[int], None]]:
    entities, tracking = importlib.import_module("mlflow.entities"), importlib.import_module("mlflow.tracking")
    folder = (directory / "mlruns").resolve().as_uri()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else version 3 refuses a folder
    client = tracking.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder)

    def create() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vesuvius")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        created: str = client.create_run(experiment, tags={"mlflow.runName": run}).info.run_id
        params = [entities.Param(key, str(value)[:500]) for key, value in settings.items()]
        for first in range(0, len(params), _PARAMS_A_CALL):
            client.log_batch(created, params=params[first : first + _PARAMS_A_CALL])
        return created

    run_id = _kept_id(directory / "mlflow_id", create)

    def send(step: int, time_s: float, figures: dict[str, float]) -> None:
        at_ms = int(1000 * time_s)
        client.log_batch(run_id, metrics=[entities.Metric(tag, value, at_ms, step) for tag, value in figures.items()])

    client.update_run(run_id, status="RUNNING")
    return send, lambda exit_code: client.set_terminated(run_id, "FAILED" if exit_code else "FINISHED")


def _kept_id(path: Path, make: Callable[[], str]) -> str:
    """By what the tracker knows this run, in later sessions too."""
    with suppress(FileNotFoundError):
        return path.read_text().strip()
    made = make()
    path.write_text(made + "\n")
    return made


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.stdin))
