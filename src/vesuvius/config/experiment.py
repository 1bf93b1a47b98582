"""`Config`: all sections together, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from vesuvius.config.data import DataConfig
from vesuvius.config.section import NonNegativeInt, PositiveInt, Section
from vesuvius.config.training import DiffusionConfig, ModelConfig, TrainingConfig

_LONGEST_NAME = 200  # bytes; a file's name has 255, some of them for an ending
NEVER = 10**9  # more steps than a run ever has; a period of them never comes round
Share = Annotated[float, Field(gt=0, lt=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
HostAndPort = Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]


def _check_name(name: str) -> str:
    if not name or name in {".", ".."} or not all(c.isalnum() or c in "._-" for c in name):
        raise ValueError(f"{name!r} cannot name a run directory; use letters, digits, '.', '_' and '-' only")
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"a name of {len(name.encode())} bytes is too long for file names; choose one of at most {_LONGEST_NAME}"
        )
    return name


class MonitorConfig(Section):
    """What is looked at beside the steps, where it goes, and when the guard steps in."""

    sample_every_s: float = Field(1.0, ge=0.5, le=10, description="seconds between samples of memory, CPUs and GPUs")
    tensorboard: bool = Field(True, description="also write the records of metrics.jsonl for TensorBoard, into tb/")
    trackers: tuple[Literal["wandb", "mlflow"], ...] = Field(
        (), description="also hand the figures to Weights & Biases or MLflow, whose package must be installed"
    )
    prometheus_port: Port | HostAndPort | None = Field(
        None,
        description="port of this machine where Prometheus may fetch the figures, or HOST:PORT (0.0.0.0:9400 = on all "
        "interfaces, readable by anyone); null = none",
    )
    verdict_every: NonNegativeInt = Field(50, description="steps between verdicts on the bottleneck; 0 = none")
    stall_minutes: float | None = Field(
        5.0, ge=0, description="minutes without a batch or a step after which the run counts as hung; 0 or null = never"
    )
    guard: Literal["off", "warn", "act"] = Field(
        "act",
        description="before memory runs out: act = once a reader and half the prefetch less, then save and exit 4",
    )
    ram_limit_gib: float | None = Field(
        None, gt=0, description="memory that this run may use, with its readers, GiB; null = the cgroup's or machine's"
    )
    exit_at: Share = Field(
        0.92,
        description="share of the memory limit at which the guard saves and exits (Ray kills readers at 0.95); in "
        "proportion, the log warns from 0.80 on, and from 0.84 on it drops volumes kept in "
        "memory, then halves the prefetch and stops a reader, once",
    )


class ClusterConfig(Section):
    """Where Ray runs."""

    address: Annotated[str | None, AfterValidator(lambda address: None if address == "local" else address)] = Field(
        None, description="running Ray cluster, HOST:PORT or auto; local or null = a private Ray on this machine"
    )
    min_ranks: PositiveInt | None = Field(
        None, description="continue with this many ranks when others are lost; null = wait for all of training.ranks"
    )
    reader_nodes: Literal["auto", "same", "any"] = Field(
        "auto", description="where readers run: same = on the trainer's node; auto = same with several ranks, else any"
    )
    max_restarts: NonNegativeInt = Field(10, description="restarts from the last checkpoint after a rank was lost")
    rank_timeout_minutes: float = Field(
        30.0, gt=0, description="longest wait of a rank for others, for rank 0's validation, or for nodes to run on"
    )


class Config(Section):
    """One experiment."""

    name: Annotated[str, AfterValidator(_check_name)] = Field(description="the run directory is runs/<name>")
    seed: NonNegativeInt = Field(0, description="all randomness follows from it: weights, order of samples, noise")
    data: DataConfig = Field(description="where patches come from")
    training: TrainingConfig = Field(TrainingConfig(), description="the loop")
    diffusion: DiffusionConfig = Field(DiffusionConfig(), description="schedule and sampler")
    model: ModelConfig = Field(ModelConfig(), description="the network")
    monitor: MonitorConfig = Field(MonitorConfig(), description="memory figures")
    cluster: ClusterConfig = Field(ClusterConfig(), description="where Ray runs")

    def with_training(self, **changes: Any) -> Self:
        """The same with other values of `training`, which are not checked.  Pure."""
        return self.model_copy(update={"training": self.training.model_copy(update=changes)})

    @property
    def global_batch(self) -> int:
        """Samples that one optimizer step consumes, over all micro-batches and ranks."""
        ranks = 1 if self.training.ranks == "auto" else self.training.ranks  # a launcher has put a number there
        return self.training.micro_batch * self.training.accumulate_steps * ranks

    def with_micro_batch(self, size: int) -> Self:
        """The same effective batch in micro-batches of `size` patches, a divisor of a rank's part of it.  Pure."""
        patches = self.training.micro_batch * self.training.accumulate_steps
        return self.with_training(train_batch_size=size, accumulate_steps=patches // size)

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
        """Channels of the network's input: x_t (two parts with spectral noise) and the condition."""
        return (2 if self.diffusion.noise == "spectral" else 1) + self.condition_channels

    def contradictions(self) -> Iterator[str]:
        if problem := self.model.size_problem(self.data.patch_size):
            yield problem
        guided = self.has_condition and self.diffusion.condition_dropout > 0
        if self.diffusion.sampler_guidance != 1 and not guided:
            yield (
                "diffusion.sampler_guidance other than 1 needs a model trained both with and without a condition; got "
                f"{self.diffusion.sampler_guidance}; add data.volumes[].condition and diffusion.condition_dropout=0.1"
            )
        if 0 in self.training.checkpoint_levels and self.model.full_res_channels == 0:
            yield (
                "training.checkpoint_levels 0 is the full-resolution blocks; got it with model.full_res_channels 0; "
                "remove it"
            )
        levels = len(self.model.channels)
        if any(level > levels for level in self.training.checkpoint_levels):
            yield (
                f"training.checkpoint_levels go from 0, full resolution, to {levels}, the last of model.channels; got "
                f"{list(self.training.checkpoint_levels)}"
            )
        least, ranks = self.cluster.min_ranks, self.training.ranks
        if least is not None and ranks != "auto" and least > ranks:
            yield f"cluster.min_ranks must not be above training.ranks; got {least} and {ranks}; lower it"
        if self.training.warmup_steps >= self.horizon_steps:
            yield (
                f"training.warmup_steps must be below epochs x steps_per_epoch; got {self.training.warmup_steps} of "
                f"{self.horizon_steps}; lower warmup_steps or lengthen the run"
            )


# ---- runs that are measured and thrown away, as `tune`, `bench` and `profile` start them


def without_listeners(config: Config) -> Config:
    """Return a config whose records stay in the run directory: nobody else is told of them."""
    listeners_off = {"tensorboard": False, "prometheus_port": None, "trackers": ()}
    return config.model_copy(update={"monitor": config.monitor.model_copy(update=listeners_off)})


def trial_config(
    config: Config, name: str, training: Mapping[str, Any], monitor: Mapping[str, Any] | None = None, **keys: Any
) -> Config:
    """Return the config of a trial run: it starts afresh, saves nothing and notifies nobody.  What its readers deliver
    is measured, so it keeps no volumes in memory.

    Args:
        training, monitor: what else differs in these sections.
        keys: what else differs at the top level.

    Raises:
        ValidationError: what differs does not fit the rest.
    """
    changed = without_listeners(config).model_dump() | {"name": name} | keys
    changed["training"] |= {"max_hours": None, "resume": "never", "init_from": None, "autotune": "off"}
    changed["training"] |= {"save_every": NEVER, "keep_every": None, "preview_every": 0} | dict(training)
    changed["monitor"] |= monitor or {}
    changed["data"]["resident"] = 0
    return Config.model_validate(changed)
