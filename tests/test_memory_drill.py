"""The guard against a real leak in a real run: it acts in time, the checkpoint is whole, the run goes on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY, textured, write_array
from vesuvius.errors import EXIT_GUARD


@pytest.fixture(scope="module")
def drill() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("memory_drill", REPOSITORY / "tools" / "memory_drill.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memory_drill"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["memory_drill"]


@pytest.fixture
def scroll(tmp_path: Path) -> Path:
    return write_array(tmp_path / "scroll.zarr", textured((128, 128, 128)), chunk=64)


def test_a_leaking_trainer_is_ended_with_a_whole_checkpoint_and_goes_on(
    drill: ModuleType, scroll: Path, tmp_path: Path
) -> None:
    arguments = drill.parse(
        f"--volume {scroll} --leak trainer --limit-gib 1.2 --mib-s 40 --after-s 2 --workers 0 --minutes 3 --ahead-s 0"
    )
    found = drill.run_drill(arguments, tmp_path)
    # Whether it is in time depends on what else this machine does: the full drill asks for that.
    assert (found.exit_code, found.resumed) == (EXIT_GUARD, True)
    assert found.checkpoint is not None
    assert found.acts[-1] == "exit"
    assert any("the memory guard" in line for line in found.alarms), "a real event is found by grep"


@pytest.mark.long
def test_a_leaking_reader_is_started_anew_before_the_run_is_ended(
    drill: ModuleType, scroll: Path, tmp_path: Path
) -> None:
    arguments = drill.parse(f"--volume {scroll} --leak reader --minutes 15")
    found = drill.run_drill(arguments, tmp_path)
    assert drill.find_problems(found, arguments) == []
    assert found.acts == ("prefetch", "worker", "exit")


@pytest.mark.long
def test_a_healthy_run_that_fills_the_page_cache_gives_no_alarm(
    drill: ModuleType, scroll: Path, tmp_path: Path
) -> None:
    arguments = drill.parse(f"--volume {scroll} --minutes 3 --limit-gib 4 --cgroup")
    found = drill.run_drill(arguments, tmp_path)
    assert found.alarms == ()
