"""The figures of a run for Weights & Biases and MLflow, by their own packages, which are extras of ours.

On a thread, so that a package or a server that hangs costs the run nothing but a line in the log.  Where the server
stands, and as whom one writes there, is the packages' business: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and so
on in the environment, or their own files.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vesuvius.errors import ConfigError, one_line
from vesuvius.runlog.files.delayed import DelayedWrites
from vesuvius.runlog.listeners.scalars import SystemPace, scalars_of
from vesuvius.runlog.records import Record
from vesuvius.runlog.redact import redact

log = logging.getLogger(__name__)

Send = Callable[[int, float, dict[str, float]], None]
"""Takes a step, its time in seconds since 1970, and figures by their tags."""
Finish = Callable[[int], None]
"""Takes the run's exit code."""

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
_CLOSE_S = 30.0
_PARAMS_A_CALL = 100  # MLflow takes no more


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError where the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"monitor.trackers {name} needs a package; got none; `pip install {_PACKAGES[name]}`, or leave it out"
            )


class Tracker:
    """One tracker.  A context manager, which gives it 30 seconds at the end.

    Args:
        name: `wandb` or `mlflow`.
        run: its name.
        directory: of the run; the tracker keeps there by what id it knows the run, and what it writes offline.
        settings: of the run, by their keys.
    """

    def __init__(
        self, name: str, run: str, directory: Path, settings: Mapping[str, Any], close_s: float = _CLOSE_S
    ) -> None:
        self._name, self._close_s = name, close_s
        self._pace = SystemPace()
        self._exit_code = 1  # a run that was killed has no end
        self._failed = False
        self._opened: tuple[Send, Finish] | None = None
        self._calls = DelayedWrites(name, self._say_failed)

        def begin() -> None:
            self._opened = (_wandb if name == "wandb" else _mlflow)(run, directory, settings)

        self._calls.later(begin)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.later(lambda: self._opened and self._opened[1](self._exit_code))
        if not self._calls.close(self._close_s):
            self._say_failed()

    def take(self, record: Record) -> None:
        """Hand the figures of a record on.  Returns at once and raises nothing."""
        if record["kind"] == "run_end":
            self._exit_code = record.get("exit_code", 1)
        elif self._pace.takes(record):
            figures = {tag: value for tag, value in scalars_of(record).items() if value is not None}
            step, time_s = record.get("step") or 0, record["time"]
            if figures and not self._calls.later(lambda: self._opened and self._opened[0](step, time_s, figures)):
                self._say_failed()

    def _say_failed(self) -> None:
        """Once a session."""
        if not self._failed:
            self._failed = True
            error = sys.exception()
            cause = f"{type(error).__name__}: {redact(one_line(str(error), 300))}" if error else "no answer in time"
            log.warning(
                "monitor.trackers %s does not accept this run's figures: %s; the run continues, and metrics.jsonl has "
                "them all",
                *(self._name, cause),
            )


def _wandb(run: str, directory: Path, settings: Mapping[str, Any]) -> tuple[Send, Finish]:
    wandb = importlib.import_module("wandb")
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "vesuvius"),
        name=run,
        id=_kept_id(directory / "wandb_id", lambda: uuid.uuid4().hex[:12]),
        resume="allow",
        dir=str(directory),
        config=dict(settings),
        settings={"console": "off", "silent": True},  # the terminal and the log stay ours
    )
    opened.define_metric("*", step_metric="step")  # its own must not fall, and after a resume ours does

    def send(step: int, time_s: float, figures: dict[str, float]) -> None:
        opened.log({"step": step, **figures})

    return send, lambda exit_code: opened.finish(exit_code=exit_code)


def _mlflow(run: str, directory: Path, settings: Mapping[str, Any]) -> tuple[Send, Finish]:
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
