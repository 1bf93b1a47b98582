"""Trials and records of steps, for the tests of what runs and measures them."""

from __future__ import annotations

from typing import Any

from vesuvius.config import Config
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import Prediction, Trial


def trial_of(config: Config, number: int = 0, samples_s: float | None = None, **knobs: Any) -> Trial:
    """The baseline of a config, with some knobs turned."""
    setting = Setting.from_record(Setting.of(config).record() | knobs)
    return Trial(number, setting, "baseline", "nothing", "a test", Prediction(samples_s, 2**30, None, 60.0, "low", 0))


def step_record(step: int, **figures: Any) -> dict[str, Any]:
    """What `metrics.jsonl` says of a step: a second, of which half is computing; one batch each."""
    record = {
        "kind": "step",
        "time": 1000.0 + step,
        "step": step,
        "step_s": 1.0,
        "data_s": 0.3,
        "h2d_s": 0.1,
        "gpu_s": 0.5,
        "pause_s": 0.0,
        "ram_used_bytes": 10**9,
        "vram_used_bytes": None,
        "readers": {"blocks": 0, "decode_s": 0.0, "read_s": None},
        "feeder": {"full_s": 0.0, "batches": step, "ran_empty": 0},
    }
    return record | figures
