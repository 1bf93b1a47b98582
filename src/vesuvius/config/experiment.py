"""`Config`: all sections together, and what must hold between them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vesuvius.config.data import DataConfig
from vesuvius.config.diffusion import DiffusionConfig
from vesuvius.config.model import ModelConfig
from vesuvius.config.section import NonNegativeInt, Section
from vesuvius.config.training import TrainingConfig

Share = Annotated[float, Field(gt=0, lt=1)]


def _check_name(name: str) -> str:
    if not name or name in {".", ".."} or not all(c.isalnum() or c in "._-" for c in name):
        raise ValueError("a name may hold letters, digits, '.', '_' and '-' only, because it names the run directory")
    return name


class MonitorConfig(Section):
    """What is looked at beside the steps, where it goes, and when the guard steps in."""

    sample_every_s: float = Field(
        1.0, ge=0.5, le=10, description="seconds between looks at memory, processors and GPUs"
    )
    write_every_s: float = Field(
        10.0, gt=0, description="seconds between lines of system.jsonl (min, mean, max since the last)"
    )
    tensorboard: bool = Field(True, description="also write the records of metrics.jsonl for TensorBoard, into tb/")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="port on 127.0.0.1 where Prometheus may fetch the figures; null = none"
    )
    verdict_every: NonNegativeInt = Field(
        50, description="optimizer steps between verdicts on what holds the run up; 0 = none"
    )
    data_share_good: Share = Field(0.15, description="waiting for data, copies or the host is fine below this share")
    gpu_share_good: Share = Field(0.80, description="a run whose device computes more of the time is compute-bound")
    stall_minutes: float | None = Field(
        5.0, ge=0, description="minutes without a batch or a step after which the run counts as hung; 0 or null = never"
    )
    guard: Literal["off", "warn", "act"] = Field(
        "act", description="before memory runs out: act = fewer batches ahead, fewer readers, then save and exit 4"
    )
    ram_limit_gib: float | None = Field(
        None, gt=0, description="memory that this run may use, with its readers, GiB; null = the cgroup's or machine's"
    )
    warn_at: Share = Field(0.80, description="share of the memory limit at which the log warns")
    prefetch_at: Share = Field(0.84, description="share at which the guard halves the batches ahead")
    worker_at: Share = Field(0.88, description="share at which the guard drops a reader")
    exit_at: Share = Field(0.92, description="share at which the guard saves and exits; Ray kills readers at 0.95")

    @model_validator(mode="after")
    def _ladder_climbs(self) -> Self:
        ladder = (self.warn_at, self.prefetch_at, self.worker_at, self.exit_at)
        if sorted(ladder) != list(ladder):
            raise ValueError(
                "monitor.warn_at, prefetch_at, worker_at and exit_at must not fall; got "
                f"{', '.join(f'{share:g}' for share in ladder)}; put them in order"
            )
        return self


class ClusterConfig(Section):
    """Where Ray runs."""

    address: str | None = Field(
        None, description="address of a running Ray cluster; null = a private Ray on this machine"
    )
    object_store_gib: float | None = Field(
        None, gt=0, description="size of a private Ray's object store; null = computed need"
    )


class Config(Section):
    """One experiment."""

    name: Annotated[str, AfterValidator(_check_name)] = Field(description="the run directory is runs/<name>")
    seed: NonNegativeInt = Field(
        0, description="everything random follows from it: initial weights, order of samples, noise"
    )
    data: DataConfig = Field(description="where patches come from")
    training: TrainingConfig = Field(TrainingConfig(), description="the loop")
    diffusion: DiffusionConfig = Field(DiffusionConfig(), description="schedule and sampler")
    model: ModelConfig = Field(ModelConfig(), description="the network")
    monitor: MonitorConfig = Field(MonitorConfig(), description="memory figures")
    cluster: ClusterConfig = Field(ClusterConfig(), description="where Ray runs")

    @property
    def global_batch(self) -> int:
        """Samples that one optimizer step consumes, over all micro-batches and ranks."""
        return self.training.train_batch_size * self.training.accumulate_steps

    @property
    def horizon_steps(self) -> int:
        """Optimizer steps of the whole run, and of the LR schedule."""
        return self.training.epochs * self.training.steps_per_epoch

    @property
    def stop_step(self) -> int:
        """The optimizer step after which this run is done."""
        return min(self.horizon_steps, self.training.max_steps or self.horizon_steps)

    @property
    def has_condition(self) -> bool:
        """Whether each patch comes with a second tensor that the network is shown."""
        return self.data.volumes[0].condition is not None

    @property
    def condition_channels(self) -> int:
        """Channels that the network is shown beside x_t: the condition's, and one that says whether it is there."""
        return (self.data.condition_classes or 1) + 1 if self.has_condition else 0

    @property
    def input_channels(self) -> int:
        """Channels of the network's input: x_t, for edm in two parts, and the condition."""
        return (2 if self.diffusion.noise == "edm" else 1) + self.condition_channels

    @model_validator(mode="after")
    def _patch_fits_model(self) -> Self:
        problem = self.model.size_problem(self.data.patch_size)
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _guidance_possible(self) -> Self:
        conditional = self.has_condition or bool(self.model.scalars)
        if self.diffusion.sampler_guidance != 1 and not (conditional and self.diffusion.condition_dropout > 0):
            raise ValueError(
                "diffusion.sampler_guidance other than 1 needs a model trained both with and without a condition; got "
                f"{self.diffusion.sampler_guidance}; add data.volumes[].condition and diffusion.condition_dropout=0.1"
            )
        return self

    @model_validator(mode="after")
    def _checkpointed_levels_exist(self) -> Self:
        if 0 in self.training.checkpoint_levels and self.model.full_res_channels == 0:
            raise ValueError(
                "training.checkpoint_levels 0 is the full-resolution blocks; got it with model.full_res_channels 0; "
                "remove it"
            )
        levels = len(self.model.channels)
        if any(level > levels for level in self.training.checkpoint_levels):
            raise ValueError(
                f"training.checkpoint_levels go from 0, full resolution, to {levels}, the last of model.channels; got "
                f"{list(self.training.checkpoint_levels)}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.training.warmup_steps >= self.horizon_steps:
            raise ValueError(
                f"training.warmup_steps must be below epochs x steps_per_epoch; got {self.training.warmup_steps} of "
                f"{self.horizon_steps}; lower warmup_steps or lengthen the run"
            )
        return self
