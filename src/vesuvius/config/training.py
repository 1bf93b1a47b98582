"""`model.*`, `training.*` and `diffusion.*`: the network, the training loop and the noise."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from vesuvius.config.section import NonNegativeInt, PathText, PositiveFloat, PositiveInt, Section, SizeZYX, Triple

_MOST = {"channels": 2**16, "full_res_channels": 2**16, "blocks_per_level": 100}


class ModelConfig(Section):
    """The 3D U-Net."""

    channels: tuple[PositiveInt, ...] = Field((128, 256, 512), min_length=1)
    """of each level, finest first"""
    strides: tuple[SizeZYX, ...] | None = None
    """downsampling factors (z, y, x) from each level to the next; null = [2, 2, 2] each"""
    blocks_per_level: PositiveInt = 2
    """residual blocks per encoder level; the decoder has one more"""
    stem_stride: SizeZYX = (2, 2, 2)
    """voxels (z, y, x) of a box that becomes a voxel of the trunk"""
    full_res_channels: NonNegativeInt = 64
    """channels of the full-resolution blocks; 0 = none"""
    patch_embed_kernel: Literal[1, 3] | None = None
    """boxes of stem_stride voxels per axis from which each voxel of the trunk is embedded; null = 1, or 3 without
    full-resolution blocks"""
    attention_heads: NonNegativeInt = 8
    """self-attention heads at the coarsest level; 0 = none"""

    @property
    def level_strides_zyx(self) -> tuple[Triple, ...]:
        return ((2, 2, 2),) * (len(self.channels) - 1) if self.strides is None else self.strides

    @property
    def divisor_zyx(self) -> Triple:
        """Sizes that the patch size must be a multiple of, so that every level divides evenly."""
        z, y, x = (math.prod(factors) for factors in zip(self.stem_stride, *self.level_strides_zyx, strict=True))
        return z, y, x

    def size_problem(self, size_zyx: Triple) -> str | None:
        """Return a message with the nearest valid sizes if a patch size does not fit; None if it does."""
        divisor = self.divisor_zyx
        if not any(size % d for size, d in zip(size_zyx, divisor, strict=True)):
            return None
        below = [max(size // d, 1) * d for size, d in zip(size_zyx, divisor, strict=True)]
        above = [-(-size // d) * d for size, d in zip(size_zyx, divisor, strict=True)]
        nearest = " and ".join(dict.fromkeys(map(str, (below, above))))
        thin = [axis for axis, size, d in zip("zyx", size_zyx, divisor, strict=True) if size < d]
        keep = f"; or set model.stem_stride and model.strides to 1 along {', '.join(thin)}" if thin else ""
        return (
            f"data.patch_size {list(size_zyx)} is not a multiple of {list(divisor)} (model.stem_stride times "
            f"model.strides); the nearest valid sizes are {nearest}{keep}"
        )

    def contradictions(self) -> Iterator[str]:
        if self.strides is not None and len(self.strides) != len(self.channels) - 1:
            lengths = f"length {len(self.strides)} for {len(self.channels)} levels of model.channels"
            yield f"model.strides has {lengths}; it needs one fewer than channels"
        for key, most in _MOST.items():
            if max(self.channels if key == "channels" else (getattr(self, key),)) > most:
                yield f"model.{key} is above {most}; lower it"
        if self.attention_heads and self.channels[-1] % self.attention_heads:
            last, heads = self.channels[-1], self.attention_heads
            yield f"the last entry of channels, {last}, is not a multiple of attention_heads {heads}; change one"


class TrainingConfig(Section):
    """The training loop: batch, readers, optimizer, checkpoints."""

    train_batch_size: PositiveInt | Literal["auto"] = 1
    """patches per micro-batch, on the GPU at once; auto = as many of the accumulate_steps patches as the memory plan
    allows, or, with one rank, fewer after running out of memory"""
    accumulate_steps: PositiveInt = 1
    """micro-batches per optimizer step; effective batch = train_batch_size (auto: 1) x accumulate_steps x ranks; if
    overrides change it, dry run and log say what usually follows"""
    ranks: PositiveInt | Literal["auto"] = 1
    """trainer processes, one GPU each; auto = one per GPU of this machine, or as started by torchrun"""
    workers: NonNegativeInt = 2
    """Ray worker processes per rank; 0 = threads of the trainer, one per core"""
    prefetch_factor: PositiveInt = 2
    """batches prefetched per worker, in trainer memory"""
    steps_per_epoch: PositiveInt = 1000
    """optimizer steps per epoch (bookkeeping only)"""
    epochs: PositiveInt = 1
    """epochs x steps_per_epoch = length of the run and of the schedule"""
    max_steps: PositiveInt | None = None
    """stop after this many steps; schedules keep their length"""
    max_hours: float | None = Field(None, gt=0)
    """save and exit 75 after this many hours of a session"""
    amp: Literal["auto", "off", "bf16", "fp16"] = "auto"
    """autocast dtype; auto = bf16 on Ampere and newer, fp16 on older GPUs, off on CPU"""
    channels_last: bool | Literal["auto"] = "auto"
    """weights and activations in channels_last_3d memory order; auto = on a GPU in 16 bits"""
    recompute_norm: bool | Literal["auto"] = "auto"
    """recompute norms and SiLU in the backward pass instead of storing them; same results; auto = unless a GPU has
    memory to store them"""
    checkpoint_levels: tuple[NonNegativeInt, ...] = ()
    """levels whose activations are recomputed in the backward pass; 0 = full resolution"""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile the network's blocks: slow first step, faster steps after it; auto = on a GPU, unless
    deterministic"""
    cudnn_benchmark: bool = True
    """let cuDNN choose its kernels by timing them once"""
    deterministic: bool = False
    """bit-reproducible kernels: exact resume on a GPU too; slower"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon = orthogonalized momentum for kernels (less memory), AdamW for the rest"""
    lr: float = Field(1e-4, gt=0)
    """peak learning rate of both optimizers"""
    lr_schedule: Literal["cosine", "constant", "inverse_sqrt"] = "cosine"
    """learning rate after the warm-up; cosine reaches 0 at the end of the last epoch"""
    warmup_steps: NonNegativeInt = 500
    """optimizer steps of linear learning-rate warm-up"""
    weight_decay: float = Field(0.01, ge=0)
    """decoupled weight decay, for weights with two or more axes"""
    clip_norm: float = Field(1.0, gt=0)
    """gradient norm above which gradients are scaled down"""
    ema_decay: float = Field(0.9999, ge=0, lt=1)
    """decay of the averaged weights, warmed up as (1+n)/(10+n)"""
    extra_ema_decays: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = ()
    """validated and saved as well"""
    init_from: PathText | None = None
    """run, checkpoint, .safetensors file or address of a model file, whose averaged weights initialize a new run"""
    save_every: PositiveInt = 500
    """optimizer steps between checkpoints; the last is always saved"""
    keep_last: PositiveInt = 3
    """newest checkpoints to keep; older ones are deleted"""
    keep_every: PositiveInt | None = None
    """checkpoints at its multiples are never deleted; null = none"""
    validate_every: NonNegativeInt = 1000
    """optimizer steps between validations on held-out patches, and at the end; 0 = none"""
    validate_patches: PositiveInt = 16
    """held-out patches per validation, each at 8 noise levels"""
    preview_every: NonNegativeInt = 0
    """steps between previews, and one at 90 s and the end; 0 = none"""
    max_nonfinite: PositiveInt = 1
    """consecutive non-finite steps that stop the run with exit 5"""
    resume: Literal["never", "auto"] = "never"
    """auto = continue from the newest checkpoint if there is one, otherwise start"""

    @property
    def micro_batch(self) -> int:
        """Patches per micro-batch; 1 until `fit_micro_batch` replaces auto."""
        return 1 if self.train_batch_size == "auto" else self.train_batch_size

    def contradictions(self) -> Iterator[str]:
        decays = (self.ema_decay, *self.extra_ema_decays)
        if len(set(decays)) < len(decays):
            yield f"EMA decays {list(decays)} contain a value twice; change training.extra_ema_decays"


Prediction = Literal["v", "eps", "x_0", "flow"]
SamplerMethod = Literal["ddim", "ddpm", "dpmpp2m", "heun"]
NoiseEmbedding = Literal["log_sigma", "t"]


class DiffusionConfig(Section):
    """Noise schedule, target, loss and sampler.  The timestep t counts from 0, the least noisy."""

    timesteps: Annotated[int, Field(ge=2, le=100_000)] = 1000
    """number of noise levels"""
    noise: Literal["spectral", "cosine", "linear"] = "spectral"
    """noise levels: spectral = uniform in log-SNR over the range that the data's power spectrum needs; cosine, linear =
    the classic schedules"""
    sigma_min: float = Field(0.02, gt=0)
    """lowest spectral noise level, in standard deviations of the data"""
    sigma_max: float | None = Field(None, gt=0)
    """highest spectral noise level; null = four times the largest amplitude of the measured spectrum"""
    noise_embedding: NoiseEmbedding | None = None
    """how the network is told the noise level; log_sigma means the same for all patch sizes, volumes and schedules;
    null = log_sigma, or on a resume that of the checkpoint (t before there was a choice)"""
    prediction: Prediction = "v"
    """what the network predicts; v = sqrt(ab) eps - sqrt(1-ab) x_0; flow = eps - x_0; eps needs a sampler_clip"""
    min_snr_gamma: float | None = Field(None, gt=0)
    """cap on the loss weight by signal-to-noise ratio; null = none; spectral noise has its own weights"""
    condition_dropout: float = Field(0.1, ge=0, lt=1)
    """share of samples trained without their condition, needed for guidance; 0 = none"""
    condition_noise: float = Field(0.0, ge=0)
    """noise that training adds to a condition with context, so that its defects are not copied: the largest standard
    deviation, in model values; 0 = none"""
    sampler: SamplerMethod = "dpmpp2m"
    """sampler; ddpm = ancestral, dpmpp2m = DPM-Solver++(2M)"""
    sampler_steps: PositiveInt = 30
    """steps per generated sample; heun evaluates the network twice in all but the last; ddim and ddpm need 40 or
    more"""
    sampler_clip: float | None = Field(None, gt=0)
    """limit on |x_0| in each step, in model values; null = none"""
    sampler_guidance: float = Field(1.0, ge=0)
    """classifier-free guidance: 1 = plain condition, more = stronger, 0 = ignore the condition"""
    sampler_condition_noise: float | None = Field(None, ge=0)
    """noise added to the condition while sampling, at most condition_noise; null = a quarter of it"""
    residual_guidance: float = Field(1.0, gt=0)
    """factor on the network's correction of the Wiener filter while sampling (spectral noise only); 1.5 sharpens clean
    volumes after brief training, and distorts noisy scans"""
    residual_guidance_interval: tuple[PositiveFloat, PositiveFloat] | None = (1.0, 30.0)
    """noise levels between which residual_guidance applies, in standard deviations of the data (in model values without
    spectral noise); null = all"""

    @property
    def sampled_condition_noise(self) -> float:
        """Standard deviation of the noise on the condition in sampling and validation."""
        given = self.sampler_condition_noise
        return self.condition_noise / 4 if given is None else given

    def contradictions(self) -> Iterator[str]:
        if self.sampler_steps > self.timesteps:
            yield f"sampler_steps {self.sampler_steps} exceed timesteps {self.timesteps}; lower sampler_steps"
        if (self.sampler_condition_noise or 0) > self.condition_noise:
            added = f"what training adds, {self.condition_noise:g}"
            yield f"sampler_condition_noise {self.sampler_condition_noise:g} exceeds {added}; lower it"
        if self.sigma_max is not None and self.sigma_max <= self.sigma_min:
            yield f"sigma_max {self.sigma_max:g} is not above sigma_min {self.sigma_min:g}; raise it or set it to null"
        if (interval := self.residual_guidance_interval) and interval[0] >= interval[1]:
            yield f"residual_guidance_interval {list(interval)} is empty; give the lower noise level first"
        if self.noise == "spectral" and self.prediction != "v":
            yield f"diffusion.prediction {self.prediction} does not work with spectral noise; use v, or cosine noise"
        if self.noise == "spectral" and self.min_snr_gamma is not None:
            yield f"diffusion.min_snr_gamma {self.min_snr_gamma:g} does not apply to spectral noise; set it to null"
