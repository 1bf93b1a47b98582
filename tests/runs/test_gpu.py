"""`vesuvius train` on a GPU or its stand-in: the same run as on a CPU, and what only a GPU has."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tests.support import sim_device
from tests.support.gpu import GPU, needs_gpu
from tests.support.runs import WriteConfig, assert_same_weights, final_weights, records_of, steps_of, vesuvius_train
from vesuvius.commands import sample
from vesuvius.monitor.probes import vram
from vesuvius.runlog.records import read_records
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.step.step import TrainStep

TRAINING = {
    "amp": "off",
    "deterministic": True,
    "accumulate_steps": 2,
    "max_steps": 2,
    "validate_every": 2,
    "validate_patches": 1,
    "save_every": 2,
}


@needs_gpu
def test_a_run_on_a_gpu_equals_one_on_the_cpu_and_its_own_resume(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, losses, validation and samples.  All randomness is drawn on the CPU: only rounding differs."""
    assert vesuvius_train(tiny_config("gpu", training=TRAINING)) == 0
    one_step = TrainingLoop._one_step

    def signal_in_step_1(loop: TrainingLoop, *arguments: Any) -> None:
        if loop.run.progress.step == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        one_step(loop, *arguments)

    parts = tiny_config("parts", training=TRAINING)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_one_step", signal_in_step_1)
        assert vesuvius_train(parts) == 75
    assert steps_of("parts")[-1]["step"] == 1
    assert vesuvius_train(parts, "--resume") == 0
    assert_same_weights("gpu", "parts")
    assert all(step["vram_used_bytes"] > 0 for step in steps_of("gpu"))
    assert read_records(tmp_path / "runs/gpu/system.jsonl")[-1]["vram"] is not None

    def outputs(name: str) -> dict[str, Any]:
        assert sample.main(["--checkpoint", f"runs/{name}", "--count", "1", "--out", name]) == 0
        figures = {key: [step[key] for step in steps_of(name)] for key in ("loss", "grad_norm")}
        figures["relative_error"] = [records_of("validation", name)[-1]["relative_error"]]
        arrays = {key: np.array(value) for key, value in figures.items()}
        arrays["samples"] = zarr.open_array(f"{name}/samples.zarr/0", mode="r")[...] / 200
        return arrays | {key: value.float().numpy() for key, value in final_weights(name).items()}

    on_gpu = outputs("gpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert vesuvius_train(tiny_config("cpu", training=TRAINING)) == 0
    for name, value in outputs("cpu").items():
        # AdamW's first steps divide by the gradient's size, which enlarges the rounding of small ones.
        np.testing.assert_allclose(on_gpu[name], value, rtol=2e-3, atol=1e-3, err_msg=name)


@pytest.mark.skipif(GPU.type != "sim", reason="needs SIM_GPU=1: limits the stand-in's memory")
@pytest.mark.gpu
def test_a_micro_batch_that_a_gpu_cannot_hold_is_halved(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step, there is memory for what is kept and 0.85 of what the step took in addition."""
    accumulate, calls = TrainStep.accumulate, list[int]()

    def with_less_memory(step: TrainStep, *arguments: Any, **options: Any) -> None:
        if arguments[0].device.type == GPU.type:  # not the trace of the memory plan
            calls.append(len(arguments[0]))
        if calls == [8, 8]:
            torch.accelerator.empty_cache()
            kept, peak = torch.accelerator.memory_allocated(GPU), vram.process_peaks(GPU)[0]
            sim_device.set_total_bytes(int(kept + 0.85 * (peak - kept)))
        accumulate(step, *arguments, **options)

    monkeypatch.setattr(TrainStep, "accumulate", with_less_memory)
    monkeypatch.setattr(vram, "_ended", dict.fromkeys(vram._PEAKS, 0))
    torch.accelerator.reset_peak_memory_stats(GPU)
    training = TRAINING | {"train_batch_size": "auto", "accumulate_steps": 8, "max_steps": 2, "validate_every": 0}
    try:
        assert vesuvius_train(tiny_config(training=training)) == 0
    finally:
        sim_device.set_total_bytes(sim_device.TOTAL_BYTES)
    assert calls == [8, 8, 4, 4]
    (event,) = (record for record in records_of("event") if record["event"] == "micro_batch")
    assert (event["before"], event["now"], event["step"]) == (8, 4, 1)
    assert "sim out of memory" in event["text"]
