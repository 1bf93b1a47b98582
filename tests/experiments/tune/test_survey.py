"""The search space of a tune follows from the config and the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.experiments.machine import with_micro_batch
from vesuvius.experiments.tune.measurement import SearchSpace, Setting, in_words
from vesuvius.experiments.tune.session import planner_of, survey
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.forecast import plan

WriteConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def _some_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """To plan a real one takes seconds."""

    monkeypatch.setattr(plan, "_step_bytes", lambda config: 2**21 * config.training.train_batch_size)


def surveyed(config: Config) -> SearchSpace:
    return survey(config, prepare_data(config.seed, config.data), budget_s=1800.0)


def test_a_local_volume_has_at_most_one_reader_per_core(tiny_config: WriteConfig) -> None:
    space = surveyed(read_config(tiny_config()))
    assert space.most_workers == max(int(usable_cores(os.getpid())), 1)
    assert space.most_requests == space.source.requests, "on a disk"
    assert not space.on_gpu


def test_a_rank_has_its_share_of_the_machine(tiny_config: WriteConfig) -> None:
    one, four = (
        surveyed(read_config(tiny_config(training={"ranks": ranks}, monitor={"ram_limit_gib": 8.0})))
        for ranks in (1, 4)
    )
    assert four.most_workers == max(one.most_workers // 4, 1)
    assert four.ram_limit_bytes == pytest.approx(one.ram_limit_bytes / 4, rel=0.05)
    assert four.most_batch == one.most_batch, "of the samples of one rank"
    apart = read_config(tiny_config(training={"ranks": 4}, cluster={"address": "box:6379"}))
    assert surveyed(apart).most_workers == one.most_workers, "a cluster places them"


@pytest.mark.usefixtures("of_two_micro_batches")
def test_the_values_of_the_source_are_within_the_caps(tiny_config: WriteConfig) -> None:
    config = read_config(tiny_config(training={"workers": 50, "prefetch_factor": 40}))
    space = surveyed(config)
    assert (space.most_workers, space.most_prefetch) == (50, 40)
    assert space.most_batch == config.global_batch == 4


def test_the_planner_knows_readers_batches_and_that_a_long_run_takes_more(tiny_config: WriteConfig) -> None:
    long = {"steps_per_epoch": 100_000, "warmup_steps": 3}
    config = read_config(tiny_config(training=long))
    planner = planner_of(config, prepare_data(config.seed, config.data))
    source = Setting.of(config)
    two, four = replace(source, workers=2), replace(source, workers=4)
    assert planner(source).ram_bytes < planner(two).ram_bytes < planner(four).ram_bytes
    assert planner(source).ram_bytes < planner(replace(source, train_batch_size=4, accumulate_steps=1)).ram_bytes
    assert planner(source).later_bytes == 0, "there is no handover if the trainer reads"
    assert 0 < planner(two).later_bytes < planner(four).later_bytes
    assert planner(source).vram_bytes is None


def test_a_setting_survives_the_round_trip_through_a_config(tiny_config: WriteConfig) -> None:
    config = read_config(tiny_config())
    source = Setting.of(config)
    turned = replace(source, workers=3, requests=64, compile=True)
    assert Setting.of(turned.applied_to(config)) == turned
    assert Setting.of(read_config(tiny_config(), turned.overrides(source))) == turned
    assert in_words(turned, source).startswith("workers 0 -> 3, requests 16 -> 64, compile auto -> true")
    assert in_words(source, source) == "nothing"


@pytest.mark.long
def test_a_tune_of_auto_starts_from_the_micro_batch_of_a_run(tiny_config: WriteConfig) -> None:
    config = read_config(tiny_config(training={"train_batch_size": "auto", "accumulate_steps": 6, "ranks": 2}))
    setting = Setting.of(with_micro_batch(config))
    assert (setting.train_batch_size, setting.accumulate_steps) == (6, 1)
    assert setting.applied_to(config).global_batch == config.global_batch == 12
