"""The ledger: what is on disk is what was measured, whatever became of the tune or the bench."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.experiments.tune.simulated import BY_NAME, tune
from vesuvius.errors import ConfigError
from vesuvius.experiments.ledger import Ledger
from vesuvius.experiments.tune.measurement import Block

BLOCKS = tune(BY_NAME["knee"]).blocks
ASKED = {"config": {"training": {"lr": 1e-3}}, "machine": {"cores": 12.0}, "--keep": ["workers"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tune" / "ledger.jsonl"


def begun(path: Path, blocks: list[Block] = BLOCKS) -> None:
    with closing(Ledger[Block](path, "tune", ASKED)) as ledger:
        ledger.begin()
        for block in blocks:
            ledger.add(block)


def read(path: Path) -> Ledger[Block]:
    return Ledger.read(path, "tune", Block)


def test_a_ledger_reads_back_equal_also_behind_a_torn_line(path: Path) -> None:
    begun(path)
    with path.open("a") as file:
        file.write('{"kind": "result", "result": {"ended": "o')
    ledger = read(path)
    assert ledger.results == BLOCKS
    assert (ledger.asked, ledger.session) == (ASKED, 2)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no tune to continue"), ("{}\n", "is not a ledger of this version"), ("", "is not a")]
)
def test_what_is_no_ledger_is_refused(path: Path, text: str | None, said: str) -> None:
    path.parent.mkdir()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(path)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"machine": {"cores": 6.0}}, r"machine.cores 12.0, not 6.0"),
        ({"config": {"training": {"lr": 1e-4}}}, r"config.training.lr 0.001, not 0.0001"),
        ({"--keep": []}, r"--keep \['workers'\], not \[\]"),
    ],
)
def test_an_experiment_goes_on_only_with_what_it_was_begun_with(
    path: Path, changed: dict[str, object], named: str
) -> None:
    begun(path, [])
    read(path).check_same(ASKED)
    with pytest.raises(ConfigError, match=named):
        read(path).check_same(ASKED | changed)
