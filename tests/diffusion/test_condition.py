"""Conditions: how they are left out and how they join x_t."""

import pytest
import torch

from vesuvius.diffusion.condition import NO_CONDITION, Condition

SHAPE = (3, 2, 2, 3, 4)


@pytest.fixture
def condition() -> Condition:
    generator = torch.Generator().manual_seed(4)
    channels, scalars = torch.randn(SHAPE, generator=generator), torch.randn(3, 2, generator=generator)
    channels[:, -1], scalars[:, -1] = 1, 1
    return Condition(channels, scalars)


def test_samples_that_are_not_kept_are_zero_also_where_they_say_that_they_are_there(condition: Condition) -> None:
    kept = condition.kept(torch.tensor([True, False, True]))
    for before, after in ((condition.channels, kept.channels), (condition.scalars, kept.scalars)):
        assert torch.equal(after[[0, 2]], before[[0, 2]])
        assert not after[1].any()
        assert after.dtype == torch.float32
        assert before[1].any()  # the original is untouched


def test_left_out_is_what_keeping_none_gives(condition: Condition) -> None:
    none, left_out = condition.kept(torch.zeros(3, dtype=torch.bool)), condition.left_out()
    assert torch.equal(none.channels, left_out.channels)
    assert torch.equal(none.scalars, left_out.scalars)


def test_a_left_out_condition_cannot_leak_a_nan(condition: Condition) -> None:
    # Multiplying by 0 would: voxels of a float volume may be NaN outside the scanned cylinder.
    condition.channels[1, 0] = float("nan")
    assert condition.kept(torch.tensor([True, False, True])).channels.isfinite().all()
    assert condition.left_out().channels.isfinite().all()


def test_channels_follow_x_t(condition: Condition) -> None:
    x_t = torch.randn(3, 1, 2, 3, 4)
    joined = condition.joined(x_t)
    assert joined.shape == (3, 3, 2, 3, 4)
    assert torch.equal(joined[:, :1], x_t)
    assert torch.equal(joined[:, 1:], condition.channels)


def test_no_condition_changes_nothing() -> None:
    x_t = torch.randn(2, 1, 2, 3, 4)
    for condition in (NO_CONDITION, NO_CONDITION.left_out(), NO_CONDITION.kept(torch.tensor([True, False]))):
        assert condition.scalars is None
        assert condition.joined(x_t) is x_t
