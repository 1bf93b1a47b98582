"""The side of `gpu_check.py` that uses the device: what measures rows in a child process (`runner.Worker`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from bench.machine import describe_machine
from gpu import checks, processes
from gpu.measure import Bench
from gpu.runner import Row
from gpu_check import Setting

from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, one_line
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.training.forecast.memory_plan import largest_batch, peak_flops_s, plan_memory
from vesuvius.training.step import setup

VRAM_SHARE = 0.92  # of `training/forecast/plan.py`
REHEARSED = ("data.patch_size=[16,16,16]", "training.amp=bf16", "training.train_batch_size=2")
REHEARSED += ("training.accumulate_steps=2", "model.channels=[8]", "model.full_res_channels=4")
REHEARSED += ("model.blocks_per_level=1", "model.attention_heads=2")
CHECKS = vars(checks) | vars(processes) | {"measure": Bench.measure}


def prepare(options: Row) -> tuple[Row, Callable[[Row], Row]]:
    """Describe the device and the config's own setting on it; also returns what measures rows."""
    rehearse, gpu = options["rehearse"], torch.device("cuda")
    if not rehearse and not torch.cuda.is_available():
        raise ConfigError(f"needs a CUDA GPU, and torch {torch.__version__} sees none; rehearse it with --rehearse")
    device = torch.device("cpu") if rehearse else gpu
    config = read_config(options["config"], [*(REHEARSED if rehearse else ()), *options["overrides"]])
    config = config.with_training(ranks=1, amp=setup.resolve_amp(config.training.amp, device))
    about: Row = {"device": "cpu", "gpus": 0, "memory_bytes": 0, "peak_tflops": options["peak_tflops"]}
    effective, share, room, most = config.global_batch, 1.0, 0, 2 * config.global_batch
    if rehearse:
        torch.set_num_threads(1)  # at such sizes more threads only wait for one another
        # Inductor would compile C++ for minutes.
        setup.CompiledRegions = functools.partial(setup.CompiledRegions, "eager")
    else:
        total, amp, name = torch.cuda.mem_get_info()[1], config.training.amp, torch.cuda.get_device_name()
        about |= {"device": name, "gpus": torch.cuda.device_count(), "memory_bytes": total}
        if not options["peak_tflops"] and (peak := peak_flops_s(name, amp, torch.backends.cudnn.allow_tf32)):
            about["peak_tflops"] = peak / 1e12
        share = min((options["cap_gib"] or total) * 2**30 / total, 1.0)
        room = int(min(VRAM_SHARE * torch.cuda.mem_get_info()[0], share * total))
        most = largest_batch(config, room, amp)
    divisors = [n for n in range(1, effective + 1) if effective % n == 0]
    if config.training.train_batch_size == "auto":  # as `fit_micro_batch`, which needs what reads volumes
        config = config.with_micro_batch(max(n for n in divisors if n <= max(most, 1)))
    if config.training.recompute_norm == "auto":
        stored = plan_memory(config.with_training(recompute_norm=False), amp=config.training.amp)
        config = config.with_training(recompute_norm=stored.vram_bytes > room)
    # Each micro-batch compiles its own variants of a block; a run has one micro-batch.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = 1024, 4096
    libraries = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    about["versions"] = describe_machine(("torch", "triton", "numpy", "pydantic"))["versions"] | libraries
    own, multiples = config.training, range(2 * effective, most + 1, effective)
    setting = {key: getattr(own, key) for key in Setting.__dataclass_fields__}
    setting |= {"compile": setup.is_compiled(own, gpu), "channels_last": setup.uses_channels_last(own, gpu)}
    about |= {"amp": own.amp, "setting": setting, "micro_batches": divisors, "larger": [*multiples[:2]]}
    bench = Bench(device, config, about["peak_tflops"] and 1e12 * about["peak_tflops"], share)
    return about, functools.partial(answer, bench)


def answer(bench: Bench, request: Row) -> Row:
    """The figures of a check, or a detail with the outcome of a RowError, out of memory, or the name of the error."""
    bench.limit_memory()  # only here: as long as an error is handled, its frames hold the tensors
    bench.row_end_s = time.monotonic() + request["limit_s"]
    try:
        row = CHECKS[request["check"]](bench, **request["arguments"]) | {"outcome": "ok"}
    except Exception as error:
        outcome = "out of memory" if is_gpu_memory_error(error) else getattr(error, "outcome", type(error).__name__)
        row = {"outcome": outcome, "detail": one_line(error, 600)}
    return row
