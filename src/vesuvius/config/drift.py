"""What a changed key means for a run that goes on, by the beginnings of keys."""

from __future__ import annotations

# It becomes another experiment, whose weights would not fit or not mean the same; how samples are drawn may change.
OTHER_EXPERIMENT = ("seed", "model.", "diffusion.", "data.normalize.", "data.condition_")
DRAWS_SAMPLES = ("diffusion.sampler",)
# Allowed, yet what is learned from each step is no longer the same; `resume.drift_effects` begins its lines so.
EFFECTS = ("learning rate", "effective batch", "average of the weights")
CHANGES_TRAINING = ("data.", "training.clip_norm", "training.weight_decay", "training.amp", *EFFECTS)
# What a step takes stays the same; pauses are left out of that.
SAME_SPEED = (
    "name", "monitor.", "training.max_", "training.lr", "training.warmup_steps", "training.epochs",
    "training.steps_per_epoch", "training.save_every", "training.keep_", "training.validate_", "training.preview_",
    "training.resume", "training.weight_decay", "training.clip_norm", "training.ema_decay", "diffusion.sampler",
)  # fmt: skip
