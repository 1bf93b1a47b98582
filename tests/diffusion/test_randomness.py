"""Noise, timesteps and seeds as pure functions of the seed and the index."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vesuvius.diffusion.randomness import (
    Purpose,
    condition_mask,
    derive_seed,
    sample_noise,
    stratified_timesteps,
    timestep_bins,
    torch_generator,
    validation_timesteps,
)

SHAPE = (1, 4, 6, 5)


def test_seeds_are_63_bits_and_pinned() -> None:
    # numpy promises the stream of SeedSequence; a change here would change every run.
    assert derive_seed(0, Purpose.NOISE, 0) == 2918264622725855778
    assert derive_seed(7, Purpose.WEIGHTS, 123456789) == 8993987414206795425
    assert all(0 <= derive_seed(seed, Purpose.NOISE, 1) < 2**63 for seed in range(50))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=12), st.data())
def test_neither_noise_nor_dropout_depends_on_the_batch_split(indices: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(indices) - 1))
    split = [np.array(part, dtype=np.int64) for part in (indices[:cut], indices[cut:])]
    noise, kept = sample_noise(3, indices, SHAPE), condition_mask(3, indices, 0.5)
    assert (noise.dtype, kept.dtype) == (torch.float32, np.bool_)
    assert torch.equal(noise, torch.cat([sample_noise(3, part, SHAPE) for part in split]))
    assert np.array_equal(kept, np.concatenate([condition_mask(3, part, 0.5) for part in split]))


def test_noise_of_another_seed_index_or_purpose_is_independent() -> None:
    shape = (1, 20, 25, 20)
    rows = torch.cat(
        [
            sample_noise(0, [0, 1], shape),
            sample_noise(1, [0], shape),  # seed + index would repeat sample (0, 1) here
            sample_noise(0, [0], shape, purpose=Purpose.PREVIEW),
        ]
    ).flatten(1)
    correlation = torch.corrcoef(rows) - torch.eye(4)
    # 5 standard deviations of the correlation of 10,000 independent pairs.
    assert correlation.abs().max() < 5 / math.sqrt(10_000)


def test_global_generators_are_neither_used_nor_changed() -> None:
    def draw() -> tuple[torch.Tensor, np.ndarray, np.ndarray, int]:
        noise = sample_noise(0, [3], SHAPE)
        number = int(torch.randint(2**31, (), generator=torch_generator(0, Purpose.WEIGHTS)))
        return noise, stratified_timesteps(0, 3, 8, 1000), condition_mask(0, range(20), 0.5), number

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what must not matter
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = draw()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    second = draw()
    assert torch.equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert np.array_equal(first[2], second[2])
    assert first[3] == second[3]


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 40))
def test_each_stratum_holds_exactly_one_timestep(seed: int, step: int, global_batch: int, width: int) -> None:
    timesteps = global_batch * width
    t = stratified_timesteps(seed, step, global_batch, timesteps)
    assert t.dtype == np.int64
    assert sorted(t // width) == list(range(global_batch))


@pytest.mark.parametrize("global_batch", [1, 3])
def test_every_position_gets_every_timestep_equally_often(global_batch: int) -> None:
    timesteps, steps = 24, 6000
    t = np.stack([stratified_timesteps(0, step, global_batch, timesteps) for step in range(steps)])
    for place in range(global_batch):
        counts = np.bincount(t[:, place], minlength=timesteps)
        expected = steps / timesteps
        # chi square of 23 degrees of freedom; 63 is its 1e-5 tail.  Covers reaching t = 0 and t = T - 1.
        assert ((counts - expected) ** 2 / expected).sum() < 63


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_requested_share_of_conditions_is_dropped(dropout: float) -> None:
    n = 4000
    left_out = 1 - condition_mask(0, range(n), dropout).mean()
    # 5 standard deviations of a share of n independent draws.
    assert abs(left_out - dropout) < 5 * math.sqrt(dropout * (1 - dropout) / n)


@pytest.mark.parametrize(
    ("timesteps", "edges"),
    [(1000, list(range(0, 1001, 125))), (21, [0, 2, 5, 7, 10, 13, 15, 18, 21]), (8, list(range(9))), (3, [0, 1, 2, 3])],
)
def test_there_are_8_bins_or_one_per_timestep(timesteps: int, edges: list[int]) -> None:
    assert timestep_bins(timesteps) == edges


@given(st.integers(2, 3000), st.integers(1, 40), st.integers(0, 40))
def test_every_patch_is_validated_in_every_bin_regardless_of_later_patches(
    timesteps: int, patches: int, more: int
) -> None:
    t, edges = validation_timesteps(patches, timesteps), np.array(timestep_bins(timesteps))
    assert t.dtype == np.int64
    assert t.shape == (patches, min(8, timesteps))
    assert (t >= edges[:-1]).all()
    assert (t < edges[1:]).all()
    assert np.array_equal(validation_timesteps(patches + more, timesteps)[:patches], t)


def test_over_many_patches_every_timestep_is_validated_equally_often() -> None:
    counts = np.bincount(validation_timesteps(4096, 200).ravel(), minlength=200)
    # Each t is a 25th of its bin, and 4096 patches are 4096 points at equal distances: 163.84 in each 25th.
    assert set(counts.tolist()) == {163, 164}


def test_timesteps_of_validation_are_pinned() -> None:
    # A change here would break the validation curve of every run that is resumed.
    assert validation_timesteps(3, 1000).tolist() == [
        [38, 240, 318, 395, 597, 674, 752, 954],
        [101, 178, 255, 457, 535, 737, 814, 891],
        [69, 147, 349, 426, 503, 706, 783, 985],
    ]
