"""Short pauses between retries."""

from __future__ import annotations

import pytest

from vesuvius.volumes.store import retry


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process."""
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(retry, "_LONGEST_PAUSE_S", 0.02)
