"""A GPU out of memory: the error text, and a whole run, simulated in the allocator."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.config_text import MINIMAL, read
from tests.support.runs import WriteConfig, records_of, steps_of, vesuvius_train
from vesuvius.config import Config
from vesuvius.monitor.probes.gpus import VramUse
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.runlog.units import GIB
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.forecast.plan import (
    gpu_memory_error,
    remedy,
)

MIB = 2**20
CPU = torch.device("cpu")
# As torch 2.13 words it.
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 640.00 MiB. GPU 0 has a total capacity of 79.25 GiB of which 512.69 MiB is "
    "free. Including non-PyTorch memory, this process has 78.74 GiB memory in use. Of the allocated memory 77.11 GiB "
    "is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
USE = VramUse(
    allocated_bytes=70 * GIB,
    reserved_bytes=75 * GIB,
    peak_bytes=74 * GIB,
    free_bytes=1 * GIB,
    total_bytes=80 * GIB,
    retries=12,
    failures=1,
)
MODEL = (
    "data.patch_size=[8, 16, 16]",
    "model={channels: [8], blocks_per_level: 1, stem_stride: [1, 2, 2], full_res_channels: 4, attention_heads: 2}",
)


def small(*overrides: str) -> Config:
    return read(MINIMAL, *MODEL, *overrides)


def batches(batch: int, accumulate: int) -> tuple[str, str]:
    return f"training.train_batch_size={batch}", f"training.accumulate_steps={accumulate}"


@pytest.mark.parametrize(
    ("text", "used_share", "short"),
    [
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", 0.1, True),
        ("CUDA error: out of memory", 0.1, True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 0.1, True),
        ("CUDA error: an illegal memory access was encountered", 0.1, False),
        ("FIND was unable to find an engine to execute this computation", 0.9, True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", 0.9, True),
        ("FIND was unable to find an engine to execute this computation", 0.1, False),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM", 0.9, False),
    ],
)
def test_a_missing_cudnn_kernel_counts_as_out_of_memory_if_memory_was_nearly_full(
    monkeypatch: pytest.MonkeyPatch, text: str, used_share: float, short: bool
) -> None:
    monkeypatch.setattr("vesuvius.monitor.probes.vram.used_share", lambda: used_share)
    assert is_gpu_memory_error(RuntimeError(text)) is short
    assert not is_gpu_memory_error(ValueError(text)), "not an error of the device"
    assert is_gpu_memory_error(torch.OutOfMemoryError(CUDA_TEXT))


@pytest.mark.parametrize(("batch", "accumulate", "expected"), [(4, 4, (2, 8)), (6, 1, (3, 2)), (5, 2, (2, 5))])
def test_the_next_smaller_batch_keeps_the_effective_batch_of_all_ranks(
    batch: int, accumulate: int, expected: tuple[int, int]
) -> None:
    config = small(*batches(batch, accumulate), "training.ranks=4")
    overrides = remedy(config).split("--resume ")[1].split(",")[0].split()
    assert tuple(overrides) == batches(*expected)
    assert small(*overrides, "training.ranks=4").global_batch == config.global_batch


def test_if_one_patch_does_not_fit_memory_saving_settings_are_named() -> None:
    text = remedy(small(*batches(1, 1), "training.recompute_norm=false"))
    assert text.startswith("set training.recompute_norm=true, add training.checkpoint_levels")


def test_the_error_names_value_remedy_and_memory_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vesuvius.training.forecast.plan.read_vram", lambda device, new_window: USE)
    error = gpu_memory_error(small(*batches(4, 1)), CPU, torch.OutOfMemoryError(CUDA_TEXT), 12)
    first, memory, last = str(error).splitlines()
    assert error.exit_code == 3
    assert re.match(
        r"A step with train_batch_size 4 does not fit the GPU: out of memory \(Tried to allocate 640.00 MiB\); ",
        first,
    )
    assert last == "checkpoint: step 12 is saved; no steps are lost"
    assert memory == (
        "memory: 70.00 GiB in tensors (74.00 GiB at the peak), torch held 75.00 GiB, CUDA itself and other processes "
        "4.00 GiB, 1.00 GiB of 80.00 GiB are free"
    )


@pytest.fixture
def failing_allocator(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Convolutions on too many patches run out of memory from optimizer step 3 on, in their own function."""
    convolve = torch.nn.functional.conv3d

    def fail_beyond(batch: int) -> None:
        def conv3d(input: Tensor, *rest: Any, **options: Any) -> Tensor:
            if len(input) > batch and len(steps_of()) >= 2:
                raise torch.OutOfMemoryError(CUDA_TEXT)
            return convolve(input, *rest, **options)

        monkeypatch.setattr("torch.nn.functional.conv3d", conv3d)

    return fail_beyond


def test_a_run_out_of_gpu_memory_saves_exits_3_and_resumes_with_the_proposed_overrides(
    tiny_config: WriteConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing_allocator: Callable[[int], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(training={"train_batch_size": 4, "accumulate_steps": 1, "max_steps": 5})
    failing_allocator(2)
    assert vesuvius_train(config) == 3
    checkpoints = list_checkpoints(Path("runs/tiny/checkpoints"))
    assert [load_checkpoint(path)["step"] for path in checkpoints] == [2]
    assert records_of("run_end")[-1]["exit_code"] == 3
    for text in (capsys.readouterr().err, Path("runs/tiny/logs/train_full.log").read_text()):
        assert "out of memory (Tried to allocate 640.00 MiB)" in text
        assert "checkpoint: step 2 is saved" in text
    overrides = re.search(r"--resume (training\.train_batch_size=\d+ training\.accumulate_steps=\d+)", text)
    assert overrides
    assert vesuvius_train(config, "--resume", *overrides[1].split()) == 0
    assert [s["step"] for s in steps_of()] == [1, 2, 3, 4, 5]


def test_a_preview_out_of_gpu_memory_is_skipped_and_the_run_goes_on(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(CUDA_TEXT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vesuvius.training.between_steps.make_preview", fail)
    assert vesuvius_train(tiny_config(training={"preview_every": 2, "max_steps": 4, "workers": 0})) == 0
    assert [event["step"] for event in records_of("event") if event["event"] == "preview_failed"] == [2, 4]
    log = Path("runs/tiny/logs/train_full.log").read_text()
    assert "no preview of step 2: CUDA out of memory. Tried to allocate 640.00 MiB" in log
    assert "training.preview_every=0 skips previews; training continues" in log


def test_an_interrupted_update_is_not_saved(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights are updated and others are not: an unusable state."""
    monkeypatch.chdir(tmp_path)
    update = torch.optim.AdamW.step

    def torn(self: torch.optim.AdamW, *rest: Any) -> Any:
        result = update(self, *rest)
        if len(steps_of()) == 2:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return result

    config = tiny_config(training={"save_every": 1})
    monkeypatch.setattr(torch.optim.AdamW, "step", torn)
    assert vesuvius_train(config) == 3
    checkpoints = list_checkpoints(Path("runs/tiny/checkpoints"))
    assert load_checkpoint(checkpoints[-1])["step"] == 2
    assert "none was saved" in Path("runs/tiny/logs/train_full.log").read_text()
