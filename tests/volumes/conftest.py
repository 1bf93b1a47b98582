"""Short pauses between retries."""

from __future__ import annotations

import pytest

from vesuvius.volumes.store import source as store_source


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process."""
    monkeypatch.setattr(store_source, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(store_source, "_LONGEST_PAUSE_S", 0.02)
