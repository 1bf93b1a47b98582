"""The sliding window of regions."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vesuvius.plan.order import Mixing

mixings = st.builds(Mixing, st.integers(1, 70), st.integers(1, 70))


@given(mixing=mixings)
def test_each_region_gives_k_samples_and_fewer_in_the_first_window(mixing: Mixing) -> None:
    rounds = 3 * mixing.patches + 2
    given_ = Counter(mixing.slot_of(index) for index in range(rounds * mixing.regions))
    for slot, count in given_.items():
        whole = mixing.rounds_of(slot).stop <= rounds
        if slot >= mixing.regions and whole:
            assert count == mixing.patches
        assert 1 <= count <= mixing.patches
    assert sorted(given_) == list(range(max(given_) + 1)), "none is left out"


@given(mixing=mixings, number=st.integers(0, 10**12))
def test_each_round_takes_one_sample_of_each_region_in_flight(mixing: Mixing, number: int) -> None:
    first = number * mixing.regions
    slots = [mixing.slot_of(index) for index in range(first, first + mixing.regions)]
    window = range(mixing.first_slot(number), mixing.first_slot(number) + mixing.regions)
    assert sorted(slots) == list(window)
    assert all(number in mixing.rounds_of(slot) for slot in window)
    assert number not in mixing.rounds_of(window.start - 1)
    assert number not in mixing.rounds_of(window.stop)
    turns = [mixing.patch_index_in_region(index) for index in range(first, first + mixing.regions)]
    assert all(0 <= turn < mixing.patches for turn in turns)


@given(mixing=mixings, slot=st.integers(0, 10**6))
def test_samples_of_inverts_slot_of(mixing: Mixing, slot: int) -> None:
    samples = list(mixing.samples_of(slot))
    assert [mixing.slot_of(index) for index in samples] == [slot] * len(samples)
    assert [index // mixing.regions for index in samples] == list(mixing.rounds_of(slot))
    turns = [mixing.patch_index_in_region(index) for index in samples]
    assert turns == list(range(mixing.patches))[mixing.patches - len(samples) :]


@given(mixing=mixings, number=st.integers(0, 10**12))
def test_samples_of_a_region_are_equal_modulo_m(mixing: Mixing, number: int) -> None:
    """So ranks of which M is a multiple share no region."""
    assert (mixing.slot_of(number) - number) % mixing.regions == 0


@given(mixing=mixings, first=st.integers(0, 5000), count=st.integers(0, 300))
def test_slots_of_a_sample_range_cover_its_samples(mixing: Mixing, first: int, count: int) -> None:
    slots = mixing.slots(first, first + count)
    assert {mixing.slot_of(index) for index in range(first, first + count)} <= set(slots)
    assert len(slots) <= mixing.regions + -(-(count + mixing.regions) // mixing.patches) + 1 if count else not slots
