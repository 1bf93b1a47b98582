"""The global batch holds the same samples for any number of ranks."""

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
def test_ranks_share_each_position_once_in_micro_batches_that_fit(
    batch: int, accumulate: int, ranks: int, data: st.DataObject
) -> None:
    asked = config(batch, accumulate, ranks)
    total = asked.global_batch
    world = data.draw(st.sampled_from([count for count in range(1, total + 1) if total % count == 0]))
    shares = [rank_share(asked, rank, world) for rank in range(world)]
    # As the stream deals samples: those of rank r are r modulo the number of ranks.
    assert np.array_equal(np.stack([share.positions for share in shares], axis=1).ravel(), np.arange(total))
    assert len({(share.micro_batch, share.accumulate_steps) for share in shares}) == 1
    assert all(share.micro_batch * share.accumulate_steps == len(share.positions) for share in shares)
    assert shares[0].micro_batch <= batch


def test_an_indivisible_batch_is_refused_with_valid_numbers_of_ranks() -> None:
    with pytest.raises(ConfigError, match="batch of 12 samples is not divisible by 5 ranks; use 4 or 6 ranks"):
        rank_share(config(3, 1, 4), 0, 5)


def test_every_allowed_number_of_ranks_must_divide_the_batch() -> None:
    check_ranks(config(3, 1, 4), 2, 4)
    with pytest.raises(ConfigError, match=r"12 samples is not divisible by 5, but cluster.min_ranks=3 allows 3 to 6"):
        check_ranks(config(2, 1, 6), 3, 6)
