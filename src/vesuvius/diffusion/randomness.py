"""All randomness of training and sampling, as pure functions of the seed, a purpose and indices; no global generator.

The random numbers of sample i do not depend on batch size, accumulation, ranks, workers, device or earlier draws, and a
checkpoint stores no generator state.
"""

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
    """Use of random numbers.  The values determine the random numbers of every run: add new ones, never renumber."""

    NOISE = 1
    TIMESTEPS = 2
    WEIGHTS = 3
    PREVIEW = 4
    VALIDATION = 5
    CONDITION_DROPOUT = 6
    SAMPLE = 7
    SAMPLER_NOISE = 8
    CONDITION_POSITION = 9
    VOLUME = 10
    CONDITION_NOISE = 11


def _sequence(seed: int, purpose: Purpose, indices: Sequence[int]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, int(purpose), *(int(index) for index in indices)])


def derive_seed(seed: int, purpose: Purpose, *indices: int) -> int:
    """Return a seed in [0, 2**63) for a `torch.Generator`, hashed from all arguments (each at least 0).  Pure.

    With `seed + index`, sample 0 of seed 1 would equal sample 1 of seed 0.
    """
    return int(_sequence(seed, purpose, indices).generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(seed: int, purpose: Purpose, *indices: int) -> torch.Generator:
    """Return a new CPU generator, seeded with `derive_seed(seed, purpose, *indices)`."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *indices))


def sample_noise(
    seed: int,
    sample_indices: SampleIndices,
    shape_czyx: tuple[int, int, int, int],
    device: torch.device | str = "cpu",
    *,
    pinned: bool = False,
    purpose: Purpose = Purpose.NOISE,
) -> Tensor:
    """Return standard normal noise: float32 [len(sample_indices), *shape_czyx].

    Row k follows from (seed, index k).  It is drawn on the CPU (about 3 ms for 72x136x136 on one core), because CUDA's
    generator depends on the GPU model.  With `pinned` on the CPU, a later copy to a GPU can be asynchronous.
    """
    pinned |= torch.device(device).type != "cpu"
    noise = torch.empty((len(sample_indices), *shape_czyx), dtype=torch.float32, pin_memory=pinned)
    for row, index in zip(noise, sample_indices, strict=True):
        row.normal_(generator=torch_generator(seed, purpose, int(index)))
    return noise.to(device, non_blocking=True)


def condition_mask(seed: int, sample_indices: SampleIndices, dropout: float) -> npt.NDArray[np.bool_]:
    """Return which samples keep their condition in training: bool [len(sample_indices)].

    Entry k follows from (seed, index k) and is false with probability `dropout` (Ho & Salimans 2022, algorithm 1).
    """
    draws = [_sequence(seed, Purpose.CONDITION_DROPOUT, [int(i)]).generate_state(1, np.uint64) for i in sample_indices]
    return np.array([float(draw[0]) / 2.0**64 >= dropout for draw in draws], dtype=np.bool_)


def condition_noise_std(seed: int, sample_indices: SampleIndices, most: float) -> list[float]:
    """Return the standard deviation of the noise on each condition in training: uniform in [0, most), by (seed, index).

    Source: conditioning augmentation, Ho et al. 2022.
    """
    return [
        most * np.random.default_rng(_sequence(seed, Purpose.CONDITION_NOISE, [int(i)])).random()
        for i in sample_indices
    ]


def stratified_timesteps(seed: int, step: int, global_batch: int, timesteps: int) -> npt.NDArray[np.int64]:
    """Return the timesteps of one optimizer step: int64 [global_batch], each in [0, timesteps).

    t_j = floor(T (perm_j + u_j) / G), with u_j uniform in [0, 1): each of the G equal parts of [0, T) is hit once and
    every t is equally likely (Kingma et al. 2021, here with one u per part).  The sample at position j of the global
    batch takes entry j, so micro-batches and ranks take slices.  Pure.
    """
    rng = np.random.default_rng(_sequence(seed, Purpose.TIMESTEPS, [step]))
    positions = rng.permutation(global_batch) + rng.random(global_batch)
    t = np.floor(timesteps * positions / global_batch).astype(np.int64)
    return np.minimum(t, timesteps - 1)  # (G - 1 + u) / G rounds to 1 when u is within half an ulp of 1


def timestep_bins(timesteps: int) -> list[int]:
    """Return the edges of 8 timestep bins of equal length (fewer timesteps: one bin each): bin b holds edges[b] <= t <
    edges[b + 1].
    """
    bins = min(_VALIDATION_BINS, timesteps)
    return [b * timesteps // bins for b in range(bins + 1)]


def validation_timesteps(patches: int, timesteps: int) -> npt.NDArray[np.int64]:
    """Return the validation timesteps of each fixed patch: int64 [patches, bins], one in each timestep bin.

    Entry (p, b) depends on p, b and `timesteps` only.  Within a bin the patches follow the van der Corput sequence,
    with a different shift per bin: the first 2**k patches fall into 2**k equal parts of the bin, one each.  Pure.
    """
    edges = np.array(timestep_bins(timesteps))
    fractions = np.array([_van_der_corput(patch) for patch in range(patches)]).reshape(patches, 1)
    shifts = (np.arange(len(edges) - 1) + 0.5) * _GOLDEN_RATIO
    t: npt.NDArray[np.int64] = edges[:-1] + np.floor(np.diff(edges) * ((fractions + shifts) % 1.0)).astype(np.int64)
    return t


def _van_der_corput(n: int) -> float:
    """Return element n (from 0) of 0, 1/2, 1/4, 3/4, 1/8, ...: the bits of n mirrored at the binary point."""
    return int(f"{n:032b}"[::-1], 2) / 2.0**32
