"""List the kernels that inductor would write for a GPU: `for_cuda`, an inner compiler of torch's compile_fx.

Dynamo, autograd, decompositions and the partitioner run as always, on the CPU's fake tensors.  Each resulting graph is
then placed on a fake GPU, lowered, and its nodes fused by inductor's own scheduler; nothing is written, compiled or
launched.  It uses private parts of torch, whose names change: checked with torch 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    compile_fx,
    fake_tensor_prop,
    record_original_output_strides,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from vesuvius.training.forecast.memory_plan import FLOPS

# The properties of an A100 that inductor reads: reductions are split so that its multiprocessors have work.
_GPU = SimpleNamespace(
    name="A100",
    multi_processor_count=108,
    major=8,
    minor=0,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    gcnArchName="",
)
_CUDA = torch.device("cuda", 0)
_CASTS = {"convert_element_type", "permute", "reshape", "view", "squeeze", "unsqueeze", "clone"}


@dataclass(frozen=True)
class Kernel:
    """One launch of a graph, other than a convolution or matrix product."""

    kind: str
    moved_bytes: int
    of: tuple[str, ...]  # names of the operations in it


# A graph, what to call it with, and its kernels; returns how to run it.
Launch = Callable[[GraphModule, Sequence[Any], list[Kernel]], Any]


def backend(launch: Launch) -> Callable[..., Any]:
    """A backend for torch.compile; the blocks it compiles run by `launch(graph, arguments, kernels)`."""

    def inner(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with _a_gpu():  # a backward pass may be compiled long after the forward pass
            kernels = _kernels(graph, inputs, is_backward=options.get("is_backward", False))

        def run(arguments: list[Any]) -> Any:
            with _disable_current_modes():
                return launch(graph, arguments, kernels)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compiled(graph: GraphModule, inputs: list[Tensor]) -> Any:
        with _a_gpu():
            return compile_fx(graph, inputs, inner_compile=inner)

    return compiled


def _kernels(graph: GraphModule, inputs: Sequence[Any], is_backward: bool) -> list[Kernel]:
    graph = copy.deepcopy(graph)
    view_to_reshape(graph)
    with torch.no_grad():
        fake = fake_tensor_prop(graph, list(inputs))
    record_original_output_strides(graph)
    with V.set_fake_mode(fake):
        _recursive_post_grad_passes(graph, is_inference=False)
        on_gpu = [_moved(value) if isinstance(value, Tensor) else value for value in inputs]
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": _CUDA}
        with torch.no_grad():
            fake_tensor_prop(graph, on_gpu)
        lowering = GraphLowering(graph, example_inputs=on_gpu, is_backward=is_backward, is_inference=False)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            lowering.run(*on_gpu)
            return [_kernel(node) for node in Scheduler(lowering.operations).nodes if _is_launched(node)]


def _moved(value: Tensor) -> Tensor:
    with V.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)


def _is_launched(node: Any) -> bool:
    if isinstance(node, NopKernelSchedulerNode):
        return False
    if not node.is_extern():
        return True
    return isinstance(node.node, ir.FallbackKernel) and node.node.op_overload._overloadpacket not in FLOPS


def _kernel(node: Any) -> Kernel:
    origins = (origin for part in node.get_nodes() for origin in part.node.origins)
    names = {str(getattr(origin.target, "_overloadpacket", origin.target)).removeprefix("aten.") for origin in origins}
    names = {name.removeprefix("prims.") for name in names}
    if node.is_extern():
        kind = "extern"
    elif node.is_reduction():
        kind = "fused reduction"
    else:
        kind = "cast" if names <= _CASTS else "fused pointwise"
    return Kernel(kind, node.get_read_write_buffers_sizes(), tuple(sorted(names)))


def _order_of_cudnn(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """Memory order of a convolution's results: channels last if its input or its weights are."""
    last = torch.channels_last_3d
    return last if last in (suggest_memory_format(x), suggest_memory_format(weight)) else torch.contiguous_format


@contextmanager
def _a_gpu() -> Iterator[None]:
    interface = "torch._dynamo.device_interface.CudaInterface."
    answers = {
        interface + "is_available": lambda: True,
        interface + "get_device_properties": lambda device=None: _GPU,
        interface + "get_compute_capability": lambda device=None: 10 * _GPU.major + _GPU.minor,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_properties": lambda device=None: _GPU,
        "torch.cuda.get_device_capability": lambda device=None: (_GPU.major, _GPU.minor),
        "torch._inductor.scheduler.has_triton": lambda: True,
        # decompositions for a GPU, though graphs are traced on the CPU: the bias of a convolution
        "torch._inductor.decomposition.is_gpu": lambda device: True,
        # torch without CUDA uses its own convolution, whose result is contiguous
        "torch._C._conv_determine_backend_memory_format": _order_of_cudnn,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        yield
