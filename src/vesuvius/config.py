"""The experiment: one YAML file becomes one frozen `Config`.  Every other module takes its own section of it.

Each field carries one line that says what it means, its unit and what follows from it; README's table of keys is made
from these lines (`tools/config_table.py`).  Reading files and overrides is in `config_file.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Triple = tuple[int, int, int]
Prediction = Literal["v", "eps", "x_0"]
SamplerMethod = Literal["ddim", "ddpm", "dpmpp2m", "heun"]


def _check_name(name: str) -> str:
    if not name or name in {".", ".."} or not all(c.isalnum() or c in "._-" for c in name):
        raise ValueError("a name may hold letters, digits, '.', '_' and '-' only, because it names the run directory")
    return name


def _check_positive(sizes: Triple) -> Triple:
    if min(sizes) < 1:
        raise ValueError("each of the three sizes (z, y, x) must be at least 1")
    return sizes


SizeZYX = Annotated[Triple, AfterValidator(_check_positive)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ArrayConfig(Section):
    """One array of voxels: a level of an OME-Zarr pyramid or a bare zarr array."""

    path: str = Field(description="zarr group or array: a folder, or an address https://, s3:// or gs://")
    level: NonNegativeInt = Field(0, description="level of an OME-Zarr pyramid, 0 = finest; 0 for a bare array")
    select: tuple[NonNegativeInt, ...] = Field(
        (), description="indices that fix the axes before z, y, x; [0, 0] takes time 0, channel 0 of a tczyx array"
    )


class VolumeConfig(ArrayConfig):
    """One zarr volume to draw patches from."""

    weight: float = Field(1.0, gt=0, description="share of the regions drawn from this volume, relative to the others")
    mask: ArrayConfig | None = Field(
        None, description="volume whose nonzero voxels are foreground; may be coarser by a whole factor per axis"
    )
    condition: ArrayConfig | None = Field(
        None, description="labels or a second scan of the same shape, cut at the same place as a second tensor"
    )


class AugmentConfig(Section):
    """Random symmetries, drawn by the plan per sample and applied on the device."""

    flip: bool = Field(True, description="mirror along z, y and x at random, each with probability 1/2")
    turn: bool = Field(True, description="turn by 0, 90, 180 or 270 degrees in the y-x plane; needs patch y = x")
    contrast: float = Field(
        0.0, ge=0, lt=1, description="model values times 1 + u, u uniform in -contrast..contrast; 0 = off"
    )
    brightness: float = Field(
        0.0, ge=0, description="model values plus u, u uniform in -brightness..brightness; 0 = off"
    )


class NormalizeConfig(Section):
    """Grey values to model values: low -> -1, high -> +1, linear, not clipped."""

    low: float | None = Field(None, description="grey value that becomes -1; null = 0.5th percentile of a sample")
    high: float | None = Field(None, description="grey value that becomes +1; null = 99.5th percentile of a sample")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high go together: set both, or neither to have them estimated")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low must be below high; got low={self.low}, high={self.high}")
        return self


class ValidationConfig(Section):
    """The part of every volume that training never sees: a slab across one axis."""

    fraction: float = Field(
        0.05, ge=0, lt=1, description="share of the split axis held out (at least one patch); 0 = none"
    )
    guard: float = Field(
        1.0, ge=0, description="gap between training and validation, in patches; below 1 they may share texture"
    )


class ForegroundConfig(Section):
    """What counts as foreground where `data.min_foreground` is above 0 and a volume names no mask."""

    source: Literal["chunks", "level"] = Field(
        "chunks", description="chunks = chunks that are stored (sidecar or listing); level = a coarse level's voxels"
    )
    level: PositiveInt = Field(5, description="which level of the same pyramid, with source: level")
    threshold: float = Field(0.0, ge=0, description="grey value above which a voxel of that level is foreground")


class StoreConfig(Section):
    """How chunks are fetched, from disks and from remote stores."""

    requests: PositiveInt = Field(16, description="requests in flight per reader on remote stores")
    retries: NonNegativeInt = Field(6, description="further tries of a failed read, after random growing pauses")
    max_pause_s: float = Field(10.0, gt=0, description="longest pause between two tries, seconds")
    timeout_s: float = Field(30.0, gt=0, description="seconds after which a request counts as failed")
    anonymous: bool | None = Field(
        None, description="s3 and gs without signing; null = where the environment holds no credentials"
    )
    cache_dir: str | None = Field(None, description="folder that keeps fetched chunk bytes; null = no cache")
    cache_gib: float = Field(50.0, gt=0, description="hard limit on that folder, shared by all readers, GiB")


class DataConfig(Section):
    """Where patches come from and in which order."""

    volumes: tuple[VolumeConfig, ...] = Field(min_length=1, description="the zarr volumes to draw from")
    patch_size: SizeZYX = Field((72, 136, 136), description="voxels (z, y, x) of one training example")
    patches_per_region: PositiveInt | None = Field(
        None, description="K, patches cut from each region read; null = as many as make read amplification 0.8"
    )
    regions_per_task: PositiveInt = Field(
        8, description="R, regions mixed in every run of R samples; higher = better mixed, more object store"
    )
    region_size: SizeZYX | None = Field(
        None, description="voxels (z, y, x) read and decoded at once; null = from chunks, patch and reader_mib"
    )
    reader_mib: PositiveInt = Field(
        256, description="MiB of the R decoded regions of a task, which wait in the object store; bounds the region"
    )
    min_foreground: float = Field(
        0.0, ge=0, le=1, description="least share of foreground in every patch; 0 = patches from everywhere"
    )
    foreground: ForegroundConfig = Field(ForegroundConfig(), description="what is foreground")
    missing_chunk: Literal["air", "error"] = Field(
        "air", description="what an absent chunk means: the fill value, or the end of the run with exit 6"
    )
    max_quarantined: NonNegativeInt = Field(
        32, description="unreadable regions that are replaced by others before the run ends with exit 6"
    )
    store: StoreConfig = Field(StoreConfig(), description="how chunks are fetched")
    augment: AugmentConfig = Field(AugmentConfig(), description="random symmetries")
    normalize: NormalizeConfig = Field(NormalizeConfig(), description="grey values to model values")
    condition_normalize: NormalizeConfig = Field(
        NormalizeConfig(), description="grey values of the condition to model values"
    )
    condition_classes: PositiveInt | None = Field(
        None, description="the condition holds labels 0 ... n-1, shown as n channels of 0 and 1; null = grey values"
    )
    validation: ValidationConfig = Field(ValidationConfig(), description="what is held out")

    @model_validator(mode="after")
    def _turnable(self) -> Self:
        if self.augment.turn and self.patch_size[1] != self.patch_size[2]:
            raise ValueError(
                f"augment.turn needs a patch that is square in y and x; got {list(self.patch_size)}; "
                "set data.augment.turn=false or make patch_size square"
            )
        return self

    @model_validator(mode="after")
    def _paired(self) -> Self:
        paired = [volume.condition is not None for volume in self.volumes]
        masks = [volume.path for volume in self.volumes if volume.mask is not None]
        if masks and self.min_foreground == 0:
            raise ValueError(
                f"a mask has an effect only with data.min_foreground above 0; got 0 and the mask of {masks[0]}; set "
                "data.min_foreground or remove the mask"
            )
        if self.condition_normalize.low is not None and (self.condition_classes or not any(paired)):
            raise ValueError(
                "condition_normalize is for conditions of grey values; got "
                f"{self.condition_normalize.low:g} to {self.condition_normalize.high:g} and "
                f"{'labels' if self.condition_classes else 'no condition'}; remove data.condition_normalize"
            )
        if self.condition_classes and not any(paired):
            raise ValueError(
                f"condition_classes says what the volumes' conditions hold; got {self.condition_classes} and no "
                "condition; add data.volumes[].condition or remove data.condition_classes"
            )
        if any(paired) and not all(paired):
            raise ValueError("either every volume has a condition or none; add data.volumes[].condition or remove it")
        return self


class TrainingConfig(Section):
    """The loop: batch, readers, optimizer, checkpoints."""

    train_batch_size: PositiveInt = Field(1, description="patches per micro-batch: what the GPU holds at once")
    accumulate_steps: PositiveInt = Field(
        1, description="micro-batches per optimizer step; effective batch = product of both"
    )
    workers: NonNegativeInt = Field(2, description="Ray reader processes per rank; 0 reads in the trainer, without Ray")
    prefetch_factor: PositiveInt = Field(
        2, description="batches put together ahead per worker; costs trainer memory (pinned on a GPU)"
    )
    prefetch_mib: PositiveInt | None = Field(
        None, description="upper limit on the batches read ahead, MiB over all workers of a rank; null = none"
    )
    steps_per_epoch: PositiveInt = Field(1000, description="optimizer steps that are called an epoch; only bookkeeping")
    epochs: PositiveInt = Field(
        1, description="epochs x steps_per_epoch = length of the run and horizon of the LR schedule"
    )
    max_steps: PositiveInt | None = Field(
        None, description="stop after this many optimizer steps; the LR horizon stays"
    )
    max_hours: float | None = Field(
        None, gt=0, description="stop, save and exit 75 after this many hours of this session"
    )
    amp: Literal["auto", "off", "bf16", "fp16"] = Field(
        "auto", description="autocast dtype; auto = bf16 on Ampere and newer, fp16 on older GPUs, off on CPU"
    )
    channels_last: bool = Field(False, description="weights and activations in channels_last_3d memory order")
    lean_norm: bool = Field(
        True, description="recompute norms and SiLU in the backward pass instead of keeping them; same numbers"
    )
    checkpoint_levels: tuple[NonNegativeInt, ...] = Field(
        (), description="levels whose blocks are computed again in the backward pass; 0 = full resolution"
    )
    compile: bool = Field(False, description="torch.compile the network: minutes at the start, faster steps after")
    cudnn_benchmark: bool = Field(True, description="let cuDNN time its kernels for the fixed patch size once")
    lr: float = Field(1e-4, gt=0, description="peak learning rate of AdamW")
    lr_schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="learning rate after warm-up, in optimizer steps"
    )
    warmup_steps: NonNegativeInt = Field(500, description="optimizer steps of linear learning-rate warm-up")
    weight_decay: float = Field(
        0.01, ge=0, description="AdamW's decoupled weight decay, on weights of two and more axes"
    )
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm; longer gradients are scaled down to it")
    ema_decay: float = Field(
        0.9999, ge=0, lt=1, description="decay of the weight average per step, warmed up as (1+n)/(10+n)"
    )
    save_every: PositiveInt = Field(500, description="optimizer steps between checkpoints; the last step always saves")
    keep_last: PositiveInt = Field(3, description="checkpoints kept; older ones are deleted after a new one is whole")
    preview_every: NonNegativeInt = Field(
        0, description="optimizer steps between sample pictures, and one at the horizon; 0 = none"
    )
    preview_count: PositiveInt = Field(2, description="generated patches in a sample picture; each costs a DDIM run")
    max_nonfinite: PositiveInt = Field(
        1, description="NaN or infinite steps in a row after which the run stops with exit 5"
    )
    resume: Literal["never", "auto"] = Field(
        "never", description="auto = as --resume: go on from the newest checkpoint if any"
    )


class DiffusionConfig(Section):
    """Noise schedule, target, loss and sampler.  The timestep t counts from 0, the least noisy."""

    timesteps: Annotated[int, Field(ge=2)] = Field(1000, description="noise levels of the schedule")
    schedule: Literal["linear", "cosine", "sigmoid"] = Field("cosine", description="how alpha_bar falls with t")
    zero_terminal_snr: bool = Field(
        False, description="rescale the schedule so that the last t is pure noise; needs prediction v or x_0"
    )
    prediction: Prediction = Field(
        "v", description="what the network predicts; v = sqrt(ab) eps - sqrt(1-ab) x_0; eps wants a sampler_clip"
    )
    loss: Literal["l2", "huber"] = Field("l2", description="error of the prediction, per voxel")
    huber_delta: float = Field(1.0, gt=0, description="error above which the Huber loss is linear, model values")
    min_snr_gamma: float | None = Field(
        5.0, gt=0, description="cap on the loss weight by signal-to-noise ratio; null = unweighted"
    )
    condition_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of samples trained without their condition, for guidance; 0 = none"
    )
    sampler: SamplerMethod = Field(
        "ddim", description="how samples are drawn; ddpm = ancestral, dpmpp2m = DPM-Solver++(2M)"
    )
    sampler_steps: PositiveInt = Field(
        50,
        description="steps per generated sample (trailing spacing); heun takes two evaluations in all but the last",
    )
    sampler_eta: float = Field(0.0, ge=0, le=1, description="noise that ddim adds in each step; 0 = none, 1 = ddpm's")
    sampler_clip: float | None = Field(None, gt=0, description="limit of |x_0| in each step, model values; null = none")
    sampler_quantile: float | None = Field(
        None, gt=0, le=1, description="dynamic thresholding: limit at this quantile of |x_0|, at least sampler_clip"
    )
    sampler_guidance: float = Field(
        1.0, ge=0, description="classifier-free guidance: 1 = the condition as it is, more = stronger, 0 = none"
    )

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if self.sampler_steps > self.timesteps:
            raise ValueError(
                f"sampler_steps must not exceed timesteps; got {self.sampler_steps} of {self.timesteps}; "
                "lower diffusion.sampler_steps"
            )
        return self

    @model_validator(mode="after")
    def _delta_used(self) -> Self:
        if self.loss != "huber" and self.huber_delta != 1.0:
            raise ValueError(
                f"huber_delta belongs to the Huber loss; got {self.huber_delta:g} with {self.loss}; set "
                "diffusion.loss=huber or remove diffusion.huber_delta"
            )
        return self

    @model_validator(mode="after")
    def _predictable(self) -> Self:
        if self.zero_terminal_snr and self.prediction == "eps":
            raise ValueError(
                "zero_terminal_snr needs a prediction that says something at pure noise; got prediction eps; set "
                "diffusion.prediction=v"
            )
        return self

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if self.sampler_quantile is not None and self.sampler_clip is None:
            raise ValueError(
                f"sampler_quantile needs sampler_clip, the least limit; got {self.sampler_quantile} and null; set "
                "diffusion.sampler_clip=1.0"
            )
        if self.sampler_eta > 0 and self.sampler != "ddim":
            raise ValueError(
                f"sampler_eta belongs to ddim; got {self.sampler_eta} with {self.sampler}; remove "
                "diffusion.sampler_eta or set diffusion.sampler=ddim"
            )
        return self


class ModelConfig(Section):
    """The 3D U-Net, from tiny to the recipe."""

    channels: tuple[PositiveInt, ...] = Field(
        (128, 256, 512), min_length=1, description="channels of each level, finest first"
    )
    strides: tuple[SizeZYX, ...] | None = Field(
        None,
        description="downsampling factors (z, y, x), an entry from each level to the next; null = [2, 2, 2] throughout",
    )
    blocks_per_level: PositiveInt = Field(
        2, description="residual blocks per level on the way down; one more on the way up"
    )
    stem_stride: SizeZYX = Field(
        (2, 2, 2), description="space-to-depth factor (z, y, x) before the first level; [1,1,1] = none"
    )
    full_res_channels: NonNegativeInt = Field(
        64, description="channels of the full-resolution block at each end; 0 = none"
    )
    skips: Literal["concat", "add"] = Field(
        "concat", description="how the way up takes what the way down left; add = smaller tensors, fewer weights"
    )
    attention_heads: NonNegativeInt = Field(8, description="heads of self-attention at the lowest level; 0 = none")
    norm_groups: PositiveInt = Field(32, description="groups of GroupNorm; fewer where channels do not divide by it")
    scalars: tuple[Literal["voxel_size", "level"], ...] = Field(
        (), description="what the network is told of each volume: its voxel size, its pyramid level"
    )

    @property
    def level_strides_zyx(self) -> tuple[Triple, ...]:
        """Downsampling factors from each level to the next."""
        return ((2, 2, 2),) * (len(self.channels) - 1) if self.strides is None else self.strides

    @property
    def divisor_zyx(self) -> Triple:
        """What each patch size must be a multiple of, so that every level divides evenly."""
        z, y, x = (math.prod(factors) for factors in zip(self.stem_stride, *self.level_strides_zyx, strict=True))
        return z, y, x

    def size_problem(self, size_zyx: Triple) -> str | None:
        """Why a patch of this size does not fit, with the nearest sizes that do; None where it fits."""
        divisor = self.divisor_zyx
        if not any(size % d for size, d in zip(size_zyx, divisor, strict=True)):
            return None
        below = [max(size // d, 1) * d for size, d in zip(size_zyx, divisor, strict=True)]
        above = [-(-size // d) * d for size, d in zip(size_zyx, divisor, strict=True)]
        return (
            f"data.patch_size must be a multiple of {list(divisor)} (model.stem_stride times model.strides); "
            f"got {list(size_zyx)}; nearest that fit: {below} and {above}"
        )

    @model_validator(mode="after")
    def _strides_match(self) -> Self:
        if self.strides is not None and len(self.strides) != len(self.channels) - 1:
            raise ValueError(
                f"strides must have one entry fewer than channels; got {len(self.strides)} for {len(self.channels)} "
                "levels; change model.strides"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.attention_heads and self.channels[-1] % self.attention_heads:
            raise ValueError(
                f"the last of channels must be a multiple of attention_heads; got {self.channels[-1]} and "
                f"{self.attention_heads}; change model.attention_heads"
            )
        return self


class MonitorConfig(Section):
    """Memory figures beside the steps."""

    sample_every_s: float = Field(1.0, gt=0, description="seconds between looks at memory")
    write_every_s: float = Field(
        10.0, gt=0, description="seconds between lines of system.jsonl (min, mean, max since the last)"
    )


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
