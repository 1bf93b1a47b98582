"""The guard against a real leak in a real run: it acts in time, the checkpoint is whole, the run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import textured, write_array
from tests.support import memory_drill
from vesuvius.errors import EXIT_GUARD


@pytest.fixture
def scroll(tmp_path: Path) -> Path:
    return write_array(tmp_path / "scroll.zarr", textured((128, 128, 128)), chunk=64)


@pytest.mark.long
def test_a_leaking_trainer_is_ended_with_a_whole_checkpoint_and_goes_on(scroll: Path, tmp_path: Path) -> None:
    arguments = memory_drill.parse(
        f"--volume {scroll} --leak trainer --limit-gib 1.2 --mib-s 40 --after-s 2 --workers 0 --minutes 3 --ahead-s 0"
    )
    found = memory_drill.run_drill(arguments, tmp_path)
    # Whether it is in time depends on what else this machine does: the full drill asks for that.
    assert (found.exit_code, found.resumed) == (EXIT_GUARD, True)
    assert found.checkpoint is not None
    assert found.acts[-1] == "exit"
    assert any("the memory guard" in line for line in found.alarms), "a real event is found by grep"


@pytest.mark.long
def test_a_leaking_reader_is_started_anew_before_the_run_is_ended(scroll: Path, tmp_path: Path) -> None:
    arguments = memory_drill.parse(f"--volume {scroll} --leak reader --minutes 15")
    found = memory_drill.run_drill(arguments, tmp_path)
    assert memory_drill.find_problems(found, arguments) == []
    assert set(found.acts[:-1]) <= {"restart", "shrink"}
    assert len(found.acts) > 1


@pytest.mark.long
def test_a_healthy_run_that_fills_the_page_cache_gives_no_alarm(scroll: Path, tmp_path: Path) -> None:
    arguments = memory_drill.parse(f"--volume {scroll} --minutes 3 --limit-gib 4 --cgroup")
    found = memory_drill.run_drill(arguments, tmp_path)
    assert found.alarms == ()
