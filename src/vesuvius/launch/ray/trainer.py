"""What Ray Train is asked for: so many workers, how often to start them again, and what its controller tells us."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.callback import ControllerCallback  # private: tests/launch/test_ray_train.py

from vesuvius.config import Config
from vesuvius.errors import one_line
from vesuvius.launch.ray.bulletin import answer
from vesuvius.launch.ray.room import needs_of_rank
from vesuvius.launch.ray.worker import Job, run_rank
from vesuvius.runlog.run_dir import run_dir

_GROW_EVERY_S = 600.0
_SAVE_S = 300.0
_POLL_S = 0.5
_LONGEST_CAUSE = 300


def make_trainer(job: Job, ranks: int, on_gpu: bool) -> TorchTrainer:
    cluster = job.request.config.cluster
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    rank: Any = run_rank  # Ray's hints know no function that returns something
    scaling: Any = ScalingConfig  # nor those of version 2
    callbacks: list[Any] = [_Losses(job.bulletin), _Resizes(job.bulletin)]
    return TorchTrainer(
        rank,
        train_loop_config={"job": job},
        torch_config=TorchConfig(
            backend="cuda:nccl,cpu:gloo" if on_gpu else "gloo", timeout_s=int(60 * cluster.rank_timeout_minutes)
        ),
        # Without their readers' processors Ray would put more ranks on a node than it can feed.
        scaling_config=scaling(
            num_workers=ranks if cluster.min_ranks in (None, ranks) else (cluster.min_ranks, ranks),
            use_gpu=on_gpu,
            resources_per_worker=needs_of_rank(job.request.config, on_gpu),
            elastic_resize_monitor_interval_s=_GROW_EVERY_S,
        ),
        run_config=RunConfig(
            name=job.request.config.name,
            storage_path=str(storage_of(job.request.config)),
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
            callbacks=callbacks,
        ),
    )


def storage_of(config: Config) -> Path:
    """Where Ray Train keeps what it knows of its workers; our checkpoints are not in it."""
    return run_dir(config).path.absolute().parent / ".ray_train" / f"{config.name}-{os.getpid()}"


class _Losses(UserCallback):
    """Tells the bulletin which ranks failed; in the process of Ray Train's controller."""

    def __init__(self, bulletin: Any) -> None:
        self._bulletin = bulletin

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        said = {rank: f"{type(error).__name__} {one_line(error)}" for rank, error in worker_exceptions.items()}
        first = {rank: text for rank, text in said.items() if "RankLostError" not in text}
        lost = {rank: _cause(text) for rank, text in (first or said).items()}
        answer(self._bulletin.lose.remote(lost))


def _cause(text: str) -> str:
    """Why a rank was lost, from Ray Train's error."""
    if "HealthCheckFailed" in text or "health check failed" in text:
        return "its process or its node is gone, or does not answer"
    return text if len(text) < _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}..."


class _Resizes(ControllerCallback):
    """Lets the ranks save before Ray Train ends them to start another number; in the process of its controller."""

    def __init__(self, bulletin: Any) -> None:
        self._bulletin = bulletin

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        if not answer(self._bulletin.resize.remote(f"Ray Train continues with {resize_decision.num_workers} ranks")):
            return  # none are at work
        deadline = time.monotonic() + _SAVE_S
        while answer(self._bulletin.resizing.remote()) is not False and time.monotonic() < deadline:
            time.sleep(_POLL_S)
