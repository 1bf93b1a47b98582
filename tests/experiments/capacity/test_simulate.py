"""The simulated node against closed forms: each resource alone limits a run as its definition says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vesuvius.experiments.capacity.simulate import ArrayLoad, NodeSetup, RegionLoad, simulate

PATCHES, CHUNKS, BYTES = 20, 8, 8_000_000  # of a region
SAMPLES = 60 * PATCHES
SETUP = NodeSetup(readers=2, regions_ahead=2, staged=2, requests=4, cores=64, batch=4, batches_ahead=4)
ARRAY = ArrayLoad(CHUNKS, CHUNKS, 0, BYTES, BYTES / 2)


def regions(*arrays: ArrayLoad, per_task: int = 1) -> list[RegionLoad]:
    """The regions of a rank: one for each `PATCHES` samples, more than it needs."""
    return [RegionLoad(PATCHES * n, n // per_task, arrays or (ARRAY,)) for n in range(75)]


@pytest.mark.parametrize(("readers", "cores", "at_work"), [(1, 8, 1), (4, 8, 4), (4, 2, 2)])
def test_decoding_is_limited_by_the_fewer_of_readers_and_cores(readers: int, cores: int, at_work: int) -> None:
    setup = replace(SETUP, readers=readers, cores=cores, decode_bytes_s=BYTES / 0.5)
    assert simulate([regions()], SAMPLES, setup)[0] == pytest.approx(at_work * PATCHES / 0.5, rel=0.03)


@pytest.mark.parametrize(("readers", "requests", "staged"), [(1, 1, 2), (2, 4, 2), (4, 2, 3)])
def test_latency_is_limited_by_the_requests_in_flight(readers: int, requests: int, staged: int) -> None:
    setup = replace(SETUP, readers=readers, requests=requests, staged=staged, latency_s=0.3)
    assert simulate([regions()], SAMPLES, setup)[0] == pytest.approx(
        readers * requests / 0.3 * PATCHES / CHUNKS, rel=0.05
    ), "Little's law"


def test_each_array_has_requests_of_its_own() -> None:
    setup = replace(SETUP, latency_s=0.3)
    alone, two = (simulate([regions(*[ARRAY] * n)], SAMPLES, setup)[0] for n in (1, 2))
    assert two == pytest.approx(alone, rel=0.05)


def test_an_unstaged_reader_pays_a_latency_for_the_indices_and_one_for_the_chunks_of_a_region() -> None:
    setup = replace(SETUP, readers=1, staged=1, requests=CHUNKS, latency_s=0.3, decode_bytes_s=BYTES / 0.1)
    sharded = replace(ARRAY, indices=2)
    # The next region is fetched once this one is decoded.
    for array, seconds in ((ARRAY, 0.3 + 0.1), (sharded, 0.6 + 0.1)):
        assert simulate([regions(array)], SAMPLES, setup)[0] == pytest.approx(PATCHES / seconds, rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_the_network_and_the_requests_of_a_node(ranks: int) -> None:
    network = replace(SETUP, node_bytes_s=BYTES / 2 * 10)  # 10 regions/s
    answers = replace(SETUP, requests_s=CHUNKS * 10.0)
    for setup in (network, answers):
        assert simulate([regions()] * ranks, SAMPLES, setup)[0] == pytest.approx(10 * PATCHES, rel=0.05)


@pytest.mark.parametrize("step_s", [0.02, 0.08, 0.8])
def test_a_step_waits_for_what_the_readers_lack(step_s: float) -> None:
    setup = replace(SETUP, readers=1, decode_bytes_s=BYTES / 0.2, batch_s=step_s)  # 100 patches/s
    patches_s, wait = simulate([regions()], SAMPLES, setup)
    needed = SETUP.batch / step_s
    assert patches_s == pytest.approx(min(needed, 100), rel=0.05)
    assert wait == pytest.approx(max(1 - 100 / needed, 0), abs=0.05)


def test_all_ranks_wait_for_the_slowest() -> None:
    slow = [regions(replace(ARRAY, decoded_bytes=5 * BYTES)), regions()]
    setup = replace(SETUP, readers=1, decode_bytes_s=BYTES / 0.1)
    assert simulate(slow, SAMPLES, setup)[0] == pytest.approx(2 * PATCHES / 0.5, rel=0.05)


def test_a_reader_that_may_run_ahead_bridges_regions_that_come_in_bursts() -> None:
    burst = [replace(region, first_sample=region.first_sample // 80 * 80) for region in regions()]
    setup = replace(SETUP, readers=1, decode_bytes_s=BYTES / 0.1, batches_ahead=1, batch_s=0.08)  # needs a quarter
    waits = [simulate([burst], SAMPLES, replace(setup, regions_ahead=n))[1] for n in (1, 8)]
    assert waits[0] > 0.05
    assert waits[1] < 0.001
