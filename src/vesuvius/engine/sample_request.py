"""What `vesuvius sample` is asked for, and what is said of the samples: where they go, how they were made.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vesuvius import __version__
from vesuvius.config import Triple
from vesuvius.engine.step import AmpMode
from vesuvius.engine.trained import Trained

MAX_IN_MONTAGE = 64


@dataclass(frozen=True)
class SampleRequest:
    """What is asked for.

    Attributes:
        checkpoint: as `find_checkpoint` takes it.
        weights: "ema", another average, or "model" for those of the last step.
        overrides: `key.path=value`, on top of the checkpoint's config: sampler and amp.
        count: samples to write, numbers 0 ... count - 1.
        seed, batch_size: what a sample follows from, beside its number.
        volume: number of the volume whose grey values, condition and scalars are used.
        out: directory to write; None: below the run's `samples/`.
        overwrite: replace samples that are there.
    """

    checkpoint: Path
    weights: str
    overrides: tuple[str, ...]
    count: int
    seed: int
    batch_size: int
    volume: int
    out: Path | None
    overwrite: bool


@dataclass(frozen=True)
class SampleReport:
    """What was written.

    Attributes:
        out: the directory.
        dtype: of the array of shape (count, *shape_zyx).
        evaluations: calls of the network per sample.
        seconds: in all.
    """

    out: Path
    count: int
    shape_zyx: Triple
    dtype: str
    evaluations: int
    seconds: float


def default_out(request: SampleRequest, trained: Trained) -> Path:
    """`runs/<name>/samples/step_00000600_dpmpp2m_50_seed0`; `samples/...` for a checkpoint outside a run.

    Guidance, eta, volume and weights are named where they are not the usual ones.
    """
    path, diffusion = trained.checkpoint.path, trained.config.diffusion
    parent = path.parent if path.parent.name else path.absolute().parent
    run = parent.parent if parent.name == "checkpoints" else Path()
    parts = [f"step_{trained.step:08d}", diffusion.sampler, str(diffusion.sampler_steps), f"seed{request.seed}"]
    unusual = {
        f"guidance{diffusion.sampler_guidance:g}": diffusion.sampler_guidance != 1,
        f"eta{diffusion.sampler_eta:g}": diffusion.sampler_eta != 0,
        f"volume{request.volume}": request.volume != 0,
        request.weights: request.weights != "ema",
    }
    return run / "samples" / "_".join([*parts, *(part for part, named in unusual.items() if named)])


def describe(request: SampleRequest, trained: Trained, amp: AmpMode, evaluations: int) -> dict[str, Any]:
    """How the samples were made, as plain JSON: what stands in the attributes of their array."""
    diffusion, grey = trained.config.diffusion, trained.greys.volumes[request.volume]
    return {
        "seed": request.seed,
        "numbers": list(range(request.count)),
        "batch_size": request.batch_size,
        "noise": diffusion.noise,
        "sampler": diffusion.sampler,
        "steps": diffusion.sampler_steps,
        "eta": diffusion.sampler_eta,
        "clip": diffusion.sampler_clip,
        "quantile": diffusion.sampler_quantile,
        "guidance": diffusion.sampler_guidance,
        "evaluations_per_sample": evaluations,
        "checkpoint": str(trained.checkpoint.path),
        "step": trained.step,
        "weights": request.weights,
        "amp": amp,
        "volume": trained.volumes[request.volume].name,
        "grey_low": grey.low,
        "grey_high": grey.high,
        "vesuvius": __version__,
        "torch": torch.__version__,
    }


def title(request: SampleRequest, trained: Trained) -> str:
    """The first line of the picture."""
    diffusion = trained.config.diffusion
    shown = f", first {MAX_IN_MONTAGE} of {request.count}" if request.count > MAX_IN_MONTAGE else ""
    return (
        f"{trained.config.name} step {trained.step} ({request.weights}), {diffusion.sampler} "
        f"{diffusion.sampler_steps} steps, seed {request.seed}{shown}: z, y, x slices"
    )
