"""What a process that was measured said last."""

from __future__ import annotations

import pytest

from vesuvius.experiments.process import last_words

AT_THE_END = (
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 "
    "leaked semaphore objects to clean up at shutdown\n  warnings.warn('resource_tracker: There appear to be %d '\n"
)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (f"reading\nOSError: no such volume\n{AT_THE_END}", "OSError: no such volume"),
        (
            f"2026-01-01 00:00:00 ERROR the disk is full\n2026-01-01 00:00:01 INFO ended\n{AT_THE_END}",
            "the disk is full",
        ),
        ("a.py:1: UserWarning: odd\n", "a.py:1: UserWarning: odd"),
        ("\n \n", "it printed nothing"),
    ],
)
def test_the_last_words_of_a_process_are_no_warning_unless_it_said_nothing_else(output: str, said: str) -> None:
    assert last_words(output) == said
