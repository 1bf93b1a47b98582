"""Sends the figures of a run to TensorBoard, Weights & Biases and MLflow; the latter two are extras.

Each has a thread of its own, so that a hung disk, package or server costs the run only a log line.  Servers and
credentials are configured as usual for these packages: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and so on in the
environment, or their own files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vesuvius.errors import ConfigError, one_line
from vesuvius.runlog.files import AsyncWriter, write_atomically
from vesuvius.runlog.held import folder_of, where
from vesuvius.runlog.records import Record
from vesuvius.runlog.redact import redact, redacted
from vesuvius.runlog.units import GIB

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

_TIMES = ("step", "data", "h2d", "gpu", "forward", "backward", "optimizer", "other", "step_p95")
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
_CLOSE_S = 30.0
_FLUSH_S = 10


def check_trackers(names: Sequence[str]) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"monitor.trackers: {name} is not installed; `pip install {_PACKAGES[name]}`, or remove {name}"
            )


class Tracker:
    """Passes records to a backend on a thread of its own; waits up to 30 s for it at the end."""

    def __init__(self, name: str, begin: Callable[[], TensorBoard | Wandb | Mlflow]) -> None:
        self._name = name
        self._exit_code = 1  # a killed run records no end
        self._failed = False
        self._board: TensorBoard | Wandb | Mlflow | None = None
        self._calls = AsyncWriter(name, self._warn_failed)

        def open_board() -> None:
            self._board = begin()

        self._calls.submit(open_board)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.submit(lambda: self._board and self._board.close(self._exit_code))
        if not self._calls.close(_CLOSE_S):
            self._warn_failed()

    def take(self, record: Record) -> None:
        """Pass a record on.  Returns at once and raises nothing."""
        if record["kind"] == "run_end":
            self._exit_code = record.get("exit_code", 1)
        if not self._calls.submit(lambda: self._board and self._board.write(record, known_figures(record))):
            self._warn_failed()

    def _warn_failed(self) -> None:
        """Log a failure, once per session."""
        if not self._failed:
            self._failed = True
            error = sys.exception()
            cause = f"{type(error).__name__}: {redact(one_line(str(error), 300))}" if error else "no response in time"
            log.warning(
                "%s rejects the metrics of this run: %s; the run continues, and metrics.jsonl has all metrics",
                *(self._name, cause),
            )


class TensorBoard:
    """The event file of one session, in `directory`; paths of pictures are relative to `run`."""

    def __init__(self, directory: Path, run: Path) -> None:
        self._directory, self._run = directory, run
        self._writer: SummaryWriter | None = None
        self._opened = ExitStack()
        self._purge_step: int | None = None  # events of earlier sessions from this step on are hidden

    def write(self, record: Record, figures: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            if record["kind"] == "run_start":
                self._purge_step = record["step"] + 1
            # Its package opens the file by name for each write, although the run directory may be moved.
            directory = self._opened.enter_context(folder_of(self._directory))
            self._writer = SummaryWriter(directory, purge_step=self._purge_step, flush_secs=_FLUSH_S)
        writer, at = self._writer, {"global_step": record.get("step") or 0, "walltime": record["time"]}
        for tag, value in figures.items():
            writer.add_scalar(tag, value, **at)
        if record["kind"] == "event":
            fields = {key: value for key, value in record.items() if key not in {"kind", "time", "event", "step"}}
            writer.add_text(f"events/{record['event']}", f"    {json.dumps(redacted(fields))}", **at)
        if record["kind"] == "preview":
            import numpy as np
            from PIL import Image

            try:
                with Image.open(where(self._run / record["picture"])) as image:
                    writer.add_image("preview/picture", np.asarray(image.convert("RGB")), dataformats="HWC", **at)
            except OSError as error:
                log.warning("cannot read the picture of a preview: %s; it is missing from TensorBoard", error)

    def close(self, exit_code: int = 0) -> None:
        if self._writer is not None:
            self._writer.close()
        self._opened.close()


class Wandb:
    def __init__(self, run: str, directory: Path, settings: Mapping[str, Any]) -> None:
        kept = directory / "wandb_id"
        if not _read_id(kept):
            write_atomically(kept, uuid.uuid4().hex[:12].encode())
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "vesuvius"),
            name=run,
            id=_read_id(kept),
            resume="allow",
            dir=str(directory),
            config=dict(settings),
            settings={"console": "off", "silent": True},  # keep the terminal and the log to ourselves
        )
        self._run.define_metric("*", step_metric="step")  # wandb's own step must not decrease; after a resume ours does

    def write(self, record: Record, figures: Mapping[str, float]) -> None:
        if figures:
            self._run.log({"step": record.get("step") or 0, **figures})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class Mlflow:
    def __init__(self, run: str, directory: Path, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise version 3 rejects a folder
        os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", "vesuvius")
        self._mlflow = mlflow = importlib.import_module("mlflow")
        folder = (directory / "mlruns").resolve().as_uri()
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or folder)
        kept = directory / "mlflow_id"
        if run_id := _read_id(kept):
            mlflow.start_run(run_id=run_id)
        else:
            write_atomically(kept, mlflow.start_run(run_name=run).info.run_id.encode())
            for first in range(0, len(settings), 100):  # its limit per call
                mlflow.log_params(dict(list(settings.items())[first : first + 100]))

    def write(self, record: Record, figures: Mapping[str, float]) -> None:
        if figures:
            self._mlflow.log_metrics(figures, step=record.get("step") or 0, timestamp=int(1000 * record["time"]))

    def close(self, exit_code: int) -> None:
        self._mlflow.end_run("FAILED" if exit_code else "FINISHED")


TRACKERS: dict[str, Callable[[str, Path, Mapping[str, Any]], Wandb | Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}
"""By the names of `monitor.trackers`.  Arguments: the run's name, its directory, for the id and offline files of its
run there, and its settings by key."""


def _read_id(file: Path) -> str:
    """Return the id in a file; '' if it is missing, or empty after a full disk."""
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def known_figures(record: Record) -> dict[str, float]:
    """The known figures of a record by tag.  Tags are stable, as runs are compared by them."""
    return {tag: value for tag, value in _figures(record) if value is not None}


def _figures(record: Record) -> Iterator[tuple[str, float | None]]:
    get = record.get
    match record["kind"]:
        case "step":
            yield from ((f"train/{name}", get(name)) for name in ("loss", "grad_norm", "lr"))
            yield from ((f"time/{name}_s", get(f"{name}_s")) for name in _TIMES)
            yield "time/comm_s", get("comm_s") or None
            yield "time/samples_per_s", _quotient(get("samples"), get("step_s"))
            yield "time/mfu", get("mfu")
            yield "memory/ram_gib", _gib(get("ram_used_bytes"))
            yield "memory/vram_gib", _gib(get("vram_used_bytes"))
            yield "memory/worker_max_gib", _gib(get("worker_max_bytes"))
        case "validation":
            for name, of_weights in record["weights"].items():
                yield f"validation/loss_{name}", of_weights["loss"]
                yield f"validation/relative_error_{name}", of_weights.get("relative_error")
                yield from ((f"validation/{name}_bin_{n}", loss) for n, loss in enumerate(of_weights["bins"]))
        case "preview":
            for name in ("histogram_distance", "spectrum_distance_db", "correlation_distance"):
                yield f"preview/{name}", get(name)
        case "system":  # maximum of the window for memory, mean for busy shares
            vram = get("vram") or {}
            yield "system/ram_gib", _gib(get("used_bytes"))
            yield "system/trainer_gib", _gib(get("trainer_bytes"))
            yield "system/store_gib", _gib(get("shared_bytes"))
            yield "system/worker_max_gib", _gib(max((get("readers") or {}).values(), default=None))
            yield "system/vram_reserved_gib", _gib(vram.get("reserved_bytes"))
            yield "system/vram_peak_gib", _gib(vram.get("peak_bytes"))
            yield "system/cores_busy", get("cores_busy")
            for gpu in get("gpus") or []:
                yield f"system/gpu_{gpu['index']}_busy", gpu["busy"][1] if gpu.get("busy") else None


def _gib(size: Any) -> float | None:  # or [min, mean, max]
    return _quotient((size[-1] if size else None) if isinstance(size, list) else size, GIB)


def _quotient(value: float | None, divisor: float | None) -> float | None:
    return None if value is None or not divisor else value / divisor
