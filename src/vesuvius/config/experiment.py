"""`Config`: all sections, and the rules between them."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from vesuvius.config.data import DataConfig
from vesuvius.config.section import NonNegativeInt, PositiveInt, Section
from vesuvius.config.training import DiffusionConfig, ModelConfig, TrainingConfig

_LONGEST_NAME = 200  # bytes; a file name has 255, including the suffix
NEVER = 10**9  # as a period in steps: longer than any run
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
    """Monitoring of memory, CPUs and GPUs, where the figures go, and the memory guard."""

    sample_every_s: float = Field(1.0, ge=0.5, le=10)
    """seconds between samples of memory, CPUs and GPUs"""
    tensorboard: bool = True
    """also write the records of metrics.jsonl to tb/ for TensorBoard"""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """also send metrics to Weights & Biases or MLflow (needs their package)"""
    prometheus_port: Port | HostAndPort | None = None
    """port of this machine for Prometheus, or HOST:PORT (0.0.0.0:9400 = all interfaces, readable by anyone); null =
    none"""
    verdict_every: NonNegativeInt = 50
    """steps between verdicts on the bottleneck; 0 = none"""
    stall_minutes: float | None = Field(5.0, ge=0)
    """minutes without a batch or a step after which the run counts as hung; 0 or null = never"""
    guard: Literal["off", "warn", "act"] = "act"
    """response to memory running out: act = at 84 % of the limit drop volumes kept in memory, then halve the prefetch
    and stop a worker, once; at 92 % save and exit 4 (Ray kills workers at 95 %)"""
    ram_limit_gib: float | None = Field(None, gt=0, le=2**30)
    """memory limit of this run and its workers, GiB; null = the cgroup's or machine's"""


class ClusterConfig(Section):
    """Ray cluster, and the ranks on it."""

    address: Annotated[str | None, AfterValidator(lambda address: None if address == "local" else address)] = None
    """running Ray cluster, HOST:PORT or auto; local or null = a private Ray on this machine"""
    min_ranks: PositiveInt | None = None
    """continue with this many ranks when others are lost; null = wait for all of training.ranks"""
    worker_nodes: Literal["auto", "same", "any"] = "auto"
    """where workers run: same = on the trainer's node; auto = same for several ranks, otherwise any"""
    max_restarts: NonNegativeInt = 10
    """limit on restarts from the last checkpoint after lost ranks"""
    rank_timeout_minutes: float = Field(30.0, gt=0)
    """longest wait of a rank for other ranks, for a preview on rank 0, or for nodes"""


class Config(Section):
    """One experiment."""

    name: Annotated[str, AfterValidator(_check_name)]
    """the run directory is runs/<name>"""
    seed: NonNegativeInt = 0
    """seed of all randomness: weights, order of samples, noise"""
    data: DataConfig
    """source and order of the patches"""
    training: TrainingConfig = TrainingConfig()
    """training loop"""
    diffusion: DiffusionConfig = DiffusionConfig()
    """noise schedule and sampler"""
    model: ModelConfig = ModelConfig()
    """the network"""
    monitor: MonitorConfig = MonitorConfig()
    """monitoring of memory, CPUs and GPUs"""
    cluster: ClusterConfig = ClusterConfig()
    """Ray cluster and ranks"""

    def with_training(self, **changes: Any) -> Self:
        """Return a copy with other, unvalidated values of `training`.  Pure."""
        return self.model_copy(update={"training": self.training.model_copy(update=changes)})

    @property
    def global_batch(self) -> int:
        ranks = 1 if self.training.ranks == "auto" else self.training.ranks  # launchers replace auto
        return self.training.micro_batch * self.training.accumulate_steps * ranks

    def with_micro_batch(self, size: int) -> Self:
        """Return a copy with micro-batches of `size` patches (a divisor of a rank's share), same batch.  Pure."""
        patches = self.training.micro_batch * self.training.accumulate_steps
        return self.with_training(train_batch_size=size, accumulate_steps=patches // size)

    @property
    def horizon_steps(self) -> int:
        return self.training.epochs * self.training.steps_per_epoch

    @property
    def stop_step(self) -> int:
        return min(self.horizon_steps, self.training.max_steps or self.horizon_steps)

    @property
    def has_condition(self) -> bool:
        """Whether each patch comes with a condition that the network sees."""
        return self.data.volumes[0].condition is not None

    @property
    def condition_channels(self) -> int:
        """Input channels in addition to x_t: those of the condition, one that marks its presence and, with context,
        its level of noise and the channels of the window."""
        channels = len(self.data.class_values or (0,))
        return (2 * (channels + 1) if self.data.context else channels + 1) if self.has_condition else 0

    @property
    def input_channels(self) -> int:
        """Channels of the network input: x_t (two parts with spectral noise) and the condition."""
        return (2 if self.diffusion.noise == "spectral" else 1) + self.condition_channels

    @property
    def learns_without_condition(self) -> bool:
        """Whether the network learns with and without the condition, so that it can be guided, or draw without it."""
        return self.has_condition and self.diffusion.condition_dropout > 0

    def contradictions(self) -> Iterator[str]:
        if problem := self.model.size_problem(self.data.patch_size):
            yield problem
        if several := [volume.path for volume in self.data.volumes if volume.channels or volume.more_labels]:
            found = f"data.volumes[].channels and more_labels of {several[0]}"
            yield f"{found} are for PatchLoader: a run trains on one channel; remove them"
        if self.diffusion.condition_noise and (not self.data.context or self.data.condition_classes):
            yield (
                f"diffusion.condition_noise {self.diffusion.condition_noise:g} is for conditions of intensities with a "
                "context; set it to 0, or set data.volumes[].condition.context"
            )
        if self.diffusion.sampler_guidance != 1 and not self.learns_without_condition:
            yield (
                f"diffusion.sampler_guidance {self.diffusion.sampler_guidance} needs a model trained with and without "
                "a condition; add data.volumes[].condition and diffusion.condition_dropout=0.1"
            )
        if 0 in self.training.checkpoint_levels and self.model.full_res_channels == 0:
            first = "training.checkpoint_levels contains 0, the full-resolution blocks"
            yield f"{first}, but model.full_res_channels is 0; remove it"
        levels = len(self.model.channels)
        if any(level > levels for level in self.training.checkpoint_levels):
            yield (
                f"training.checkpoint_levels {list(self.training.checkpoint_levels)} exceed the levels of the network: "
                f"0 (full resolution) to {levels} (the last of model.channels)"
            )
        least, ranks = self.cluster.min_ranks, self.training.ranks
        if least is not None and ranks != "auto" and least > ranks:
            yield f"cluster.min_ranks {least} exceeds training.ranks {ranks}; lower it"
        if self.training.warmup_steps >= self.horizon_steps:
            yield (
                f"training.warmup_steps {self.training.warmup_steps} leaves no steps after the warm-up: epochs x "
                f"steps_per_epoch is {self.horizon_steps}; lower warmup_steps or lengthen the run"
            )


# ---- trial runs of `tune`, `bench` and `profile`


def quiet(config: Config) -> Config:
    """Return a copy without trackers: records stay in the run directory."""
    listeners_off = {"tensorboard": False, "prometheus_port": None, "trackers": ()}
    return config.model_copy(update={"monitor": config.monitor.model_copy(update=listeners_off)})


def trial_config(
    config: Config, name: str, training: Mapping[str, Any], monitor: Mapping[str, Any] | None = None, **keys: Any
) -> Config:
    """Return the config of a trial run: a fresh start, no checkpoints, no trackers, no volumes in memory (its readers
    are measured); `training`, `monitor` and `keys` of the top level are further changes.

    Raises ValidationError: the changes contradict other keys.
    """
    changed = quiet(config).model_dump() | {"name": name} | keys
    changed["training"] |= {"max_hours": None, "resume": "never", "init_from": None}
    changed["training"] |= {"save_every": NEVER, "keep_every": None, "preview_every": 0} | dict(training)
    changed["monitor"] |= monitor or {}
    changed["data"]["resident"] = 0
    return Config.model_validate_json(json.dumps(changed))  # with absolute paths, as the trial runs elsewhere
