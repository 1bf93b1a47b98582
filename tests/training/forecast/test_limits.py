"""What a run needs of the system's limits."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError
from vesuvius.monitor.probes.task_limits import TaskLimit
from vesuvius.training.forecast import limits
from vesuvius.training.forecast.limits import check_limits, task_problem, tasks_needed


@pytest.mark.parametrize(("workers", "peak"), [(0, 20), (1, 305), (2, 335), (4, 407)])
def test_what_is_needed_is_what_runs_took_on_two_cores(workers: int, peak: int) -> None:
    """Peaks of pids cgroups.  Less would let a run hang, much more would refuse what works."""
    assert peak <= tasks_needed(workers, 1, 2) <= 1.2 * peak


@pytest.mark.parametrize(
    ("workers", "limit", "others", "says"),
    [
        (1, 10_000, 0, None),
        (1, 400, 10, None),
        (1, 300, 0, "allows 300 processes and threads, and this run needs about 320.*or set training.workers=0"),
        (1, 1000, 800, "allows 1000 processes and threads, of which others use 800, and this"),
        (8, 450, 0, "or set training.workers=4"),
        (0, 100, 0, None),
        (0, 20, 0, r"needs about 24; raise it \(`ulimit -u`, docker run --pids-limit\)$"),
    ],
)
def test_a_limit_that_is_too_low_is_named_with_what_fits(
    workers: int, limit: int, others: int, says: str | None
) -> None:
    tightest, wide = TaskLimit("pids.max of cgroup /a", limit, others), TaskLimit("kernel.pid_max", 10**6, 0)
    said = "; ".join(task_problem(workers, 1, 2, [tightest, wide]))
    if says is None:
        assert said == "; "
    else:
        with pytest.raises(ConfigError, match=f"^pids.max of cgroup /a .*{says}"):
            raise ConfigError(said)
    assert task_problem(workers, 1, 2, []) == ("", "")


def test_ranks_that_share_a_machine_need_more() -> None:
    assert tasks_needed(2, 4, 2) > tasks_needed(2, 1, 2) + 3 * 2 * 35


def test_a_run_is_refused_before_ray_starts(tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(tiny_config(training={"workers": 1}))
    monkeypatch.setattr(limits, "task_limits", lambda: [TaskLimit("`ulimit -u`", 100, 20)])
    with pytest.raises(ConfigError, match="`ulimit -u` allows 100 processes and threads, of which others use 20"):
        check_limits(config, 1, 2**28)
    of_cluster = read_config(tiny_config(training={"workers": 1}, cluster={"address": "a:1"}))
    check_limits(of_cluster, 1, 0)  # its Ray runs already
    monkeypatch.setattr(limits, "task_limits", list)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    with pytest.raises(ConfigError, match=r"`ulimit -f` allows files of 1 MiB.*one of 0.25 GiB; raise it"):
        check_limits(config, 1, 2**28)
