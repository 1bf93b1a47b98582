"""The ledger: what is on disk is what was tried, whatever became of the tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.tune.made_up import LEDGER, SPACE
from vesuvius.config import Config
from vesuvius.config_file import read_config
from vesuvius.errors import ConfigError
from vesuvius.lab.tune.ledger import Ledger, Machine, check_same

MACHINE = Machine("box", 12.0, 170.0, "A100", 80.0)


@pytest.fixture
def config(tiny_config: Callable[..., Path]) -> Config:
    return read_config(tiny_config())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tune" / "ledger.jsonl"


def begun(path: Path, config: Config) -> Ledger:
    """With all trials of the made-up tune."""
    with Ledger.new(path, config, SPACE, MACHINE) as ledger:
        for entry in LEDGER:
            assert ledger.begin(entry.trial) is None
            ledger.end(entry.outcome)
    return ledger


def test_a_ledger_reads_back_equal(path: Path, config: Config) -> None:
    written = begun(path, config)
    read = Ledger.read(path)
    assert read.entries == written.entries == list(LEDGER)
    assert (read.space, read.machine, read.config) == (SPACE, MACHINE, config.model_dump(mode="json"))


def test_a_torn_line_and_a_trial_without_an_end_are_passed_over(path: Path, config: Config) -> None:
    begun(path, config)
    with Ledger.read(path) as ledger:
        ledger.begin(replace(LEDGER[0].trial, number=len(LEDGER)))
    with path.open("a") as file:
        file.write('{"kind": "outcome", "ended": "o')
    assert Ledger.read(path).entries == list(LEDGER)


def test_a_trial_in_which_the_tune_died_twice_is_not_run_again(path: Path, config: Config) -> None:
    trial = LEDGER[0].trial
    with Ledger.new(path, config, SPACE, MACHINE) as ledger:
        assert ledger.begin(trial) is None
    with Ledger.read(path) as ledger:
        assert ledger.begin(trial) is None
    with Ledger.read(path) as ledger:
        outcome = ledger.begin(trial)
        assert outcome is not None
        assert (outcome.ended, outcome.measured) == ("killed", None)
        ledger.end(outcome)
    assert [entry.outcome for entry in Ledger.read(path).entries] == [outcome]


def test_a_trial_that_the_operator_broke_off_does_not_count_against_it(path: Path, config: Config) -> None:
    trial = LEDGER[0].trial
    with Ledger.new(path, config, SPACE, MACHINE) as ledger:
        for _ in range(3):
            assert ledger.begin(trial) is None
            ledger.interrupted()
    assert Ledger.read(path).begin(trial) is None


def test_a_new_tune_keeps_the_ledger_of_the_one_before(path: Path, config: Config) -> None:
    begun(path, config)
    with Ledger.new(path, config, SPACE, MACHINE) as ledger:
        assert ledger.entries == []
    assert Ledger.read(path.with_name("ledger-1.jsonl")).entries == list(LEDGER)


@pytest.mark.parametrize(("text", "said"), [(None, "got none in"), ("{}\n", "lacks"), ("", "lacks")])
def test_what_is_no_ledger_is_refused(path: Path, text: str | None, said: str) -> None:
    path.parent.mkdir()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Ledger.read(path)


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
