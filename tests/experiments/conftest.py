"""Trials without the seconds that it takes to import torch."""

from __future__ import annotations

import pytest

from tests.support.runs import fork_trials


@pytest.fixture(autouse=True)
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of trials are forked; their Ray, and what they start, are processes as any."""
    fork_trials(monkeypatch)
