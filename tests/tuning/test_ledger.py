"""The ledger: what is on disk is what was measured, whatever became of the tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.simulated import BY_NAME, BiasedPlanner, SimulatedRunner, tune
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, StorageError
from vesuvius.trials.machine import MachineFacts
from vesuvius.tuning.ledger import TuneLedger, check_same
from vesuvius.tuning.measurement import Block, SearchSpace
from vesuvius.tuning.search.policy import recommend
from vesuvius.tuning.search.search import Entry, Search

MACHINE = MachineFacts("box", 12.0, 170.0, "A100", 80.0)
SIMULATED = BY_NAME["knee"]
SPACE = SIMULATED.space()
BLOCKS = [entry.block for entry in tune(SIMULATED, 0)[0]]


@pytest.fixture
def config(tiny_config: Callable[..., Path]) -> Config:
    return read_config(tiny_config())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tune" / "ledger.jsonl"


def new(path: Path, config: Config) -> TuneLedger:
    ledger = TuneLedger(path, config.model_dump(mode="json"), SPACE, MACHINE)
    ledger.begin()
    return ledger


def begun(path: Path, config: Config, blocks: list[Block] = BLOCKS) -> TuneLedger:
    with new(path, config) as ledger:
        for number, block in enumerate(blocks):
            ledger.end(number, block)
    return ledger


def search_of(ledger: TuneLedger, lab: SimulatedRunner, space: SearchSpace) -> Search:
    """A tune that goes on from a ledger, as its session does."""

    def on_block(entry: Entry) -> None:
        ledger.end(entry.planned.number, entry.block)

    return Search(lab, space, BiasedPlanner(SIMULATED), on_block=on_block, earlier=ledger.blocks)


def test_a_ledger_reads_back_equal(path: Path, config: Config) -> None:
    written = begun(path, config)
    read = TuneLedger.read(path)
    assert read.blocks == written.blocks == BLOCKS
    assert (read.space, read.machine, read.config) == (SPACE, MACHINE, config.model_dump(mode="json"))


def test_a_torn_line_is_passed_over(path: Path, config: Config) -> None:
    begun(path, config)
    with path.open("a") as file:
        file.write('{"kind": "block", "block": {"ended": "o')
    assert TuneLedger.read(path).blocks == BLOCKS


@pytest.mark.parametrize("count", [0, 1, 7, len(BLOCKS)])
def test_a_tune_goes_on_from_its_ledger_to_the_same_end(path: Path, config: Config, count: int) -> None:
    begun(path, config, BLOCKS[:count])
    lab = SimulatedRunner(SIMULATED, 0)
    for block in BLOCKS[:count]:  # the machine goes on where it was
        lab.measure(block.setting, block.kind, SPACE.block_s, SPACE.budget_s)
    with TuneLedger.read(path) as ledger:
        found = recommend(search_of(ledger, lab, SPACE))
    assert found == tune(SIMULATED, 0)[1]
    assert TuneLedger.read(path).blocks == BLOCKS


def test_a_ledger_of_another_tune_is_refused(path: Path, config: Config) -> None:
    begun(path, config)
    other = replace(SPACE, source=replace(SPACE.source, workers=3))
    with (
        TuneLedger.read(path) as ledger,
        pytest.raises(ConfigError, match=r"a run block of workers 3 -> 2 where this tune has a run block"),
    ):
        recommend(search_of(ledger, SimulatedRunner(SIMULATED, 0), other))


def test_a_block_that_a_full_disk_ended_is_measured_again(path: Path, config: Config) -> None:
    class FullDisk(SimulatedRunner):
        def measure(self, *_: object) -> Block:
            raise StorageError("full")

    with new(path, config) as ledger, pytest.raises(StorageError):
        recommend(search_of(ledger, FullDisk(SIMULATED, 0), SPACE))
    assert TuneLedger.read(path).blocks == []


def test_a_new_tune_keeps_the_ledger_of_the_one_before(path: Path, config: Config) -> None:
    begun(path, config)
    with new(path, config) as ledger:
        assert ledger.blocks == []
    assert TuneLedger.read(path.with_name("ledger-1.jsonl")).blocks == BLOCKS


@pytest.mark.parametrize(("text", "said"), [(None, "got none in"), ("{}\n", "lacks"), ("", "lacks")])
def test_what_is_no_ledger_is_refused(path: Path, text: str | None, said: str) -> None:
    path.parent.mkdir()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        TuneLedger.read(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"machine": replace(MACHINE, cores=6.0)}, r"cores 6.0, which was 12.0"),
        ({"overrides": ["training.lr=1e-4"]}, r"training.lr 0.0001, which was 0.001"),
        ({"asked": [("--goal", "samples_s", "cost")]}, r"--goal 'cost', which was 'samples_s'"),
    ],
)
def test_a_tune_goes_on_only_with_what_it_was_begun_with(
    path: Path, tiny_config: Callable[..., Path], change: dict[str, Any], named: str
) -> None:
    ledger = begun(path, read_config(tiny_config()))
    check_same(ledger, read_config(tiny_config()), MACHINE, [("--goal", "samples_s", "samples_s")])
    now = read_config(tiny_config(), change.get("overrides", []))
    with pytest.raises(ConfigError, match=named):
        check_same(ledger, now, change.get("machine", MACHINE), change.get("asked", []))
