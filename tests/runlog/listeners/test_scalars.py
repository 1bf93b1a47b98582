"""How often the monitor's records are shown."""

from __future__ import annotations

from typing import Any

from vesuvius.runlog.listeners.scalars import SystemPace


def test_one_system_record_a_minute_is_shown_also_after_the_clock_was_set_back() -> None:
    pace = SystemPace()

    def taken(first: float, seconds: int) -> list[float]:
        records: list[dict[str, Any]] = [{"kind": "system", "time": first + s} for s in range(0, seconds, 10)]
        return [record["time"] - first for record in records if pace.takes(record)]

    assert taken(1e9, 180) == [0.0, 60.0, 120.0]
    assert taken(1e9 - 7200, 180) == [0.0, 60.0, 120.0], "two hours earlier by the clock"
    assert taken(1e9 + 7200, 60) == [0.0]
    assert pace.takes({"kind": "step", "time": 0.0})
