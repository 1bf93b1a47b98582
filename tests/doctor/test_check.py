"""What breaks or hangs in a check costs that check alone."""

from __future__ import annotations

import threading

import pytest

from vesuvius.doctor.check import Check, Finding, examine
from vesuvius.errors import ConfigError

FINE = Finding("ok", "fine")


def raises(error: BaseException) -> Finding:
    raise error


def waits(end: threading.Event) -> Finding:
    end.wait(60)
    return FINE


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (ZeroDivisionError("by zero"), Finding("fail", "ZeroDivisionError: by zero")),
        (OSError(), Finding("fail", "OSError: no message")),
        (SystemExit(3), Finding("fail", "SystemExit: 3")),
        (ConfigError("a must be b; got c; set a=b"), Finding("fail", "a must be b; got c", "set a=b")),
    ],
)
def test_a_check_that_breaks_is_a_failure_with_its_cause(error: BaseException, finding: Finding) -> None:
    checks = [Check("broken", lambda: raises(error)), Check("other", lambda: FINE)]
    assert list(examine(checks, 10)) == [("broken", finding), ("other", FINE)]


@pytest.mark.parametrize("beside", [False, True])
def test_a_check_that_hangs_is_left_behind(beside: bool) -> None:
    end = threading.Event()
    hung = Check("hung", lambda: waits(end), 0.05, "do this", beside=beside)
    found = list(examine([hung, Check("other", lambda: FINE, beside=beside)], 10))
    assert found == [("hung", Finding("fail", "no answer within 0 s", "do this")), ("other", FINE)]
    end.set()


def test_on_a_busy_machine_it_is_a_warning() -> None:
    end = threading.Event()
    ((_, found),) = examine([Check("slow", lambda: waits(end), 0.05)], 10, lambda: "load 9 on 2 processors")
    assert (found.level, found.value) == ("warn", "no answer within 0 s, load 9 on 2 processors")
    end.set()


def test_a_check_whose_time_another_one_took_is_a_warning_and_not_a_failure() -> None:
    """A mount that hangs is not a GPU driver that hangs."""
    end = threading.Event()
    mount = Check("mount", lambda: waits(end), 0.1, "see the mount")
    driver = Check("driver", lambda: waits(end), 0.15, "restart the machine", beside=True)
    late, cut = (found for _, found in examine([mount, driver], 0.2))
    assert (late.level, late.remedy) == ("fail", "see the mount")
    assert (cut.level, "not completed" in cut.value, cut.remedy) == (
        "warn", True, "see the lines above, then try again"
    )  # fmt: skip
    end.set()


def test_checks_that_measure_a_speed_run_alone_and_before_the_others() -> None:
    together = threading.Barrier(2, timeout=60)
    begun: list[str] = []

    def meets(name: str) -> Finding:
        begun.append(name)
        together.wait()  # breaks unless the other one runs at the same time
        return FINE

    def alone() -> Finding:
        assert begun == []
        return FINE

    checks = [
        Check("a", lambda: meets("a"), beside=True),
        Check("b", lambda: meets("b"), beside=True),
        Check("alone", alone),
    ]
    assert list(examine(checks, 60)) == [("a", FINE), ("b", FINE), ("alone", FINE)]
