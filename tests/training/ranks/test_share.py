"""A global batch is the same samples whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.config import Config, DataConfig, TrainingConfig, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.training.ranks.share import check_ranks, rank_share


def config(batch: int, accumulate: int, ranks: int) -> Config:
    training = TrainingConfig(train_batch_size=batch, accumulate_steps=accumulate, ranks=ranks)
    data = DataConfig(volumes=(VolumeConfig(path="scroll.zarr"),), patch_size=(16, 16, 16))
    return Config(name="x", data=data, training=training)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_ranks_at_work_share_each_place_once_in_micro_batches_that_fit(
    batch: int, accumulate: int, ranks: int, data: st.DataObject
) -> None:
    asked = config(batch, accumulate, ranks)
    total = asked.global_batch
    world = data.draw(st.sampled_from([count for count in range(1, total + 1) if total % count == 0]))
    parts = [rank_share(asked, rank, world) for rank in range(world)]
    assert np.array_equal(np.sort(np.concatenate([part.positions for part in parts])), np.arange(asked.global_batch))
    assert len({(part.micro_batch, part.accumulate_steps) for part in parts}) == 1
    assert all(part.micro_batch * part.accumulate_steps == len(part.positions) for part in parts)
    assert parts[0].micro_batch <= batch


def test_a_rank_of_the_configured_number_does_what_the_config_says() -> None:
    part = rank_share(config(3, 5, 4), 2, 4)
    assert (part.micro_batch, part.accumulate_steps) == (3, 5)
    assert part.positions[:3].tolist() == [2, 6, 10]


def test_a_batch_that_does_not_divide_is_refused_with_numbers_that_do() -> None:
    with pytest.raises(ConfigError, match="got 12 samples for 5 ranks; use 4 or 6 ranks"):
        rank_share(config(3, 1, 4), 0, 5)


def test_each_number_of_ranks_that_may_be_left_has_to_share_the_batch() -> None:
    check_ranks(config(3, 1, 4), 2, 4)
    with pytest.raises(ConfigError, match=r"12 samples does not divide by 5, and cluster.min_ranks=3 lets 3 to 6"):
        check_ranks(config(2, 1, 6), 3, 6)
