"""`training.*`: the loop, its optimizer, checkpoints, validation and previews."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from vesuvius.config.section import NonNegativeInt, PathText, PositiveInt, Section


class TrainingConfig(Section):
    """The loop: batch, readers, optimizer, checkpoints."""

    train_batch_size: PositiveInt = Field(1, description="patches per micro-batch: what the GPU holds at once")
    accumulate_steps: PositiveInt = Field(
        1, description="micro-batches per optimizer step; effective batch = train_batch_size x accumulate_steps x ranks"
    )
    ranks: PositiveInt | Literal["auto"] = Field(
        1,
        description="trainer processes, one GPU each; auto = one for each GPU of this machine, or as torchrun started",
    )
    workers: NonNegativeInt = Field(2, description="Ray reader processes per rank; 0 reads in the trainer, without Ray")
    prefetch_factor: PositiveInt = Field(2, description="batches prepared ahead, per worker; costs trainer memory")
    steps_per_epoch: PositiveInt = Field(1000, description="optimizer steps in an epoch; bookkeeping only")
    epochs: PositiveInt = Field(1, description="epochs x steps_per_epoch = length of the run and of the LR schedule")
    max_steps: PositiveInt | None = Field(None, description="stop after this many steps; the LR horizon stays")
    max_hours: float | None = Field(None, gt=0, description="stop, save and exit 75 after so many hours of a session")
    amp: Literal["auto", "off", "bf16", "fp16"] = Field(
        "auto", description="autocast dtype; auto = bf16 on Ampere and newer, fp16 on older GPUs, off on CPU"
    )
    channels_last: bool = Field(False, description="weights and activations in channels_last_3d memory order")
    recompute_norm: bool = Field(
        True, description="recompute norms and SiLU in the backward pass instead of keeping them: same numbers"
    )
    checkpoint_levels: tuple[NonNegativeInt, ...] = Field(
        (), description="levels whose activations are recomputed in the backward pass; 0 = full resolution"
    )
    compile: bool = Field(False, description="torch.compile the network: minutes at the start, faster steps after")
    cudnn_benchmark: bool = Field(True, description="let cuDNN time its kernels for the fixed patch size once")
    deterministic: bool = Field(False, description="bit-reproducible kernels: a resume is exact on a GPU too; slower")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon = kernels step by orthogonalized momentum (less memory), all else by AdamW"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate of both optimizers")
    lr_schedule: Literal["cosine", "constant", "inverse_sqrt"] = Field(
        "cosine", description="learning rate after warm-up, in optimizer steps; cosine ends at 0 with the last epoch"
    )
    warmup_steps: NonNegativeInt = Field(500, description="optimizer steps of linear learning-rate warm-up")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, on weights of two and more axes")
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm; larger gradients are scaled down to it")
    ema_decay: float = Field(0.9999, ge=0, lt=1, description="decay of the weight average, warmed up as (1+n)/(10+n)")
    extra_ema_decays: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        (), description="further EMA decays, validated and saved beside the first"
    )
    init_from: PathText | None = Field(
        None, description="run, checkpoint or .safetensors file whose averaged weights a new run starts from"
    )
    save_every: PositiveInt = Field(500, description="optimizer steps between checkpoints; the last step always saves")
    keep_last: PositiveInt = Field(3, description="checkpoints kept; older ones are deleted once a new one is complete")
    keep_every: PositiveInt | None = Field(
        None, description="checkpoints at multiples of this step are never deleted; null = none"
    )
    validate_every: NonNegativeInt = Field(
        1000, description="optimizer steps between validations on held-out patches, and one at the horizon; 0 = none"
    )
    validate_patches: PositiveInt = Field(16, description="held-out patches of a validation, each at 8 noise levels")
    preview_every: NonNegativeInt = Field(0, description="steps between sample pictures, one at the horizon; 0 = none")
    max_nonfinite: PositiveInt = Field(1, description="consecutive non-finite steps that stop the run with exit 5")
    autotune: Annotated[Literal["off", "act"], BeforeValidator(lambda mode: "off" if mode == "advise" else mode)] = (
        Field("off", description="act = apply what a verdict advises on readers, prefetch and requests while training")
    )
    resume: Literal["never", "auto"] = Field(
        "never", description="auto = as --resume: continue from the newest checkpoint, if there is one"
    )

    def contradictions(self) -> Iterator[str]:
        decays = (self.ema_decay, *self.extra_ema_decays)
        if len(set(decays)) < len(decays):
            yield (f"each average must have a decay of its own; got {list(decays)}; change training.extra_ema_decays")
