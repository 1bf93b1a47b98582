"""Everything random in training and sampling, as pure functions of the seed and of what the numbers are for.

No global generator is read or moved: which numbers sample i meets does not depend on batch size, accumulation, ranks,
workers, device, or on what was drawn before, and nothing has to be saved for a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SampleIndices = Sequence[int] | npt.NDArray[np.int64]

_VALIDATION_BINS = 8
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Purpose(IntEnum):
    """What random numbers are for: equal indices of two purposes give unrelated numbers.

    The values are part of every run's identity: add new ones, never renumber.
    """

    NOISE = 1
    TIMESTEPS = 2
    WEIGHTS = 3
    PREVIEW = 4
    VALIDATION = 5
    CONDITION_DROPOUT = 6
    SAMPLE = 7
    SAMPLER_NOISE = 8
    CONDITION_PLACE = 9


def _sequence(seed: int, purpose: Purpose, indices: Sequence[int]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, int(purpose), *(int(index) for index in indices)])


def derive_seed(seed: int, purpose: Purpose, *indices: int) -> int:
    """Return a seed in [0, 2**63) for a `torch.Generator`, hashed from all arguments (each at least 0).

    Source: numpy's SeedSequence.  Never `seed + index`, where run 1's sample 0 would be run 0's sample 1.  Pure.
    """
    return int(_sequence(seed, purpose, indices).generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(seed: int, purpose: Purpose, *indices: int) -> torch.Generator:
    """Return a new CPU generator that starts at `derive_seed(seed, purpose, *indices)`."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *indices))


def sample_noise(
    seed: int,
    sample_indices: SampleIndices,
    shape_czyx: tuple[int, int, int, int],
    device: torch.device | str = "cpu",
    *,
    purpose: Purpose = Purpose.NOISE,
) -> Tensor:
    """Return standard normal noise: float32 [len(sample_indices), *shape_czyx]; row k follows from (seed, index k).

    Drawn on the CPU (some 3 ms for 72x136x136 on one core), because CUDA's numbers depend on the model of the GPU.
    The copy to a GPU goes through pinned memory and does not make the host wait for the kernels queued before it.
    """
    device = torch.device(device)
    noise = torch.empty((len(sample_indices), *shape_czyx), dtype=torch.float32, pin_memory=device.type == "cuda")
    for row, index in zip(noise, sample_indices, strict=True):
        row.normal_(generator=torch_generator(seed, purpose, int(index)))
    return noise.to(device, non_blocking=True)


def condition_kept(seed: int, sample_indices: SampleIndices, dropout: float) -> npt.NDArray[np.bool_]:
    """Return which samples are trained with their condition: bool [len(sample_indices)]; entry k from (seed, index k).

    Source: Ho & Salimans 2022, algorithm 1: each is left out with probability `dropout`.  Pure.
    """
    draws = [_sequence(seed, Purpose.CONDITION_DROPOUT, [int(i)]).generate_state(1, np.uint64) for i in sample_indices]
    return np.array([float(draw[0]) / 2.0**64 >= dropout for draw in draws], dtype=np.bool_)


def stratified_timesteps(seed: int, step: int, global_batch: int, timesteps: int) -> npt.NDArray[np.int64]:
    """Return the timesteps of one optimizer step: int64 [global_batch], each in [0, timesteps).

    t_j = floor(T (perm_j + u_j) / G), with u uniform in [0, 1): each of the G equal parts of [0, T) is hit once and
    every t stays equally likely, which takes most of the timestep's variance out of the loss (after the low-discrepancy
    sampler of Kingma et al. 2021, with one u per part).  The sample at place j of the global batch takes entry j, so a
    micro-batch or a rank takes a slice.  Pure.
    """
    rng = np.random.default_rng(_sequence(seed, Purpose.TIMESTEPS, [step]))
    places = rng.permutation(global_batch) + rng.random(global_batch)
    t = np.floor(timesteps * places / global_batch).astype(np.int64)
    return np.minimum(t, timesteps - 1)  # (G - 1 + u) / G rounds to 1 when u is within half an ulp of 1


def timestep_bins(timesteps: int) -> list[int]:
    """Return the edges of the bins of t that validation tells apart: bin b holds edges[b] <= t < edges[b + 1].

    8 bins over [0, timesteps) whose lengths differ by at most 1; fewer, of 1 timestep each, where T is below 8.  Pure.
    """
    bins = min(_VALIDATION_BINS, timesteps)
    return [b * timesteps // bins for b in range(bins + 1)]


def validation_timesteps(patches: int, timesteps: int) -> npt.NDArray[np.int64]:
    """Return the timesteps at which each fixed patch is validated: int64 [patches, bins], one in each timestep bin.

    Entry (p, b) depends on p, b and `timesteps` alone: neither on a seed nor on the number of patches.  Within a bin
    the patches follow the van der Corput sequence, shifted from bin to bin: the first 2**k patches hit each 2**k-th of
    the bin once, and in the long run every t comes equally often.  Pure.
    """
    edges = np.array(timestep_bins(timesteps))
    places = np.array([_van_der_corput(patch) for patch in range(patches)]).reshape(patches, 1)
    shifts = (np.arange(len(edges) - 1) + 0.5) * _GOLDEN_RATIO
    t: npt.NDArray[np.int64] = edges[:-1] + np.floor(np.diff(edges) * ((places + shifts) % 1.0)).astype(np.int64)
    return t


def _van_der_corput(n: int) -> float:
    """Number n, from 0, of the sequence 0, 1/2, 1/4, 3/4, 1/8, ...: the bits of n mirrored at the point."""
    return int(f"{n:032b}"[::-1], 2) / 2.0**32
