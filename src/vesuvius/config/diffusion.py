"""`diffusion.*`: noise schedule, target, loss and sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from vesuvius.config.section import PositiveInt, Section

Prediction = Literal["v", "eps", "x_0", "flow"]
SamplerMethod = Literal["ddim", "ddpm", "dpmpp2m", "heun"]


class DiffusionConfig(Section):
    """Noise schedule, target, loss and sampler.  The timestep t counts from 0, the least noisy."""

    timesteps: Annotated[int, Field(ge=2, le=100_000)] = Field(1000, description="noise levels of the schedule")
    noise: Literal["edm", "cosine", "linear"] = Field(
        "edm",
        description="noise levels: edm = uniform in log-SNR, over the range that the data's power spectrum needs; "
        "others = how alpha_bar falls with t",
    )
    sigma_min: float = Field(0.02, gt=0, description="smallest noise of edm, in standard deviations of the data")
    sigma_max: float | None = Field(
        None, gt=0, description="largest noise of edm; null = four times the largest amplitude of the measured spectrum"
    )
    prediction: Prediction = Field(
        "v",
        description="what the network predicts; v = sqrt(ab) eps - sqrt(1-ab) x_0; flow = eps - x_0; eps needs "
        "a sampler_clip",
    )
    min_snr_gamma: float | None = Field(
        None,
        gt=0,
        description="cap on the loss weight by signal-to-noise ratio; null = none, and with edm as the spectrum gives",
    )
    condition_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of samples trained without their condition, for guidance; 0 = none"
    )
    sampler: SamplerMethod = Field("dpmpp2m", description="sampler; ddpm = ancestral, dpmpp2m = DPM-Solver++(2M)")
    sampler_steps: PositiveInt = Field(
        40,
        description="steps per generated sample (rho = 7 for edm, else trailing); heun evaluates twice in all but one",
    )
    sampler_clip: float | None = Field(None, gt=0, description="limit of |x_0| in each step, model values; null = none")
    sampler_guidance: float = Field(
        1.0, ge=0, description="classifier-free guidance: 1 = the condition as it is, more = stronger, 0 = none"
    )

    def contradictions(self) -> Iterator[str]:
        if self.sampler_steps > self.timesteps:
            yield (
                f"sampler_steps must not exceed timesteps; got {self.sampler_steps} of {self.timesteps}; "
                "lower diffusion.sampler_steps"
            )
        if self.sigma_max is not None and self.sigma_max <= self.sigma_min:
            yield (
                f"sigma_max must be above sigma_min; got {self.sigma_max:g} and {self.sigma_min:g}; raise "
                "diffusion.sigma_max or set it to null"
            )
        if self.noise == "edm" and self.prediction != "v":
            yield (
                f"edm has one prediction, what the best linear denoiser leaves of v; got {self.prediction}; set "
                "diffusion.prediction=v or diffusion.noise=cosine"
            )
        if self.noise == "edm" and self.min_snr_gamma is not None:
            yield (
                f"min_snr_gamma weighs cosine and linear noise; got {self.min_snr_gamma:g} with edm, whose "
                "weights follow from the spectrum; set diffusion.min_snr_gamma=null"
            )
