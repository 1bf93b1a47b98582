"""List the kernels that inductor would write for a GPU, and write them: `backend`, for torch.compile.

Dynamo, autograd, decompositions and the partitioner run as always, on the CPU's fake tensors.  Each resulting graph is
then placed on a fake GPU, lowered, and its nodes fused by inductor's own scheduler.  With `sources`, inductor also
writes their Triton code, which `triton_kernels.py` compiles.  It uses private parts of torch, whose names change:
checked with torch 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from vesuvius.training.forecast.memory_plan import FLOPS

# Name, compute capability, multiprocessors, and bytes of shared memory that one block may ask for, of A100 and H100
# SXM, from the technical specifications in NVIDIA's CUDA C++ programming guide.
CARDS = {"sm_80": ("A100", 80, 108, 163 * 1024), "sm_90": ("H100", 90, 132, 227 * 1024)}
REGISTERS, MOST_THREADS = 65536, 1024  # of a multiprocessor, of a block
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


# Triton code of distinct kernels, and a name of each, by architecture: a key of `CARDS`.
Sources = dict[str, dict[str, str]]


def backend(launch: Launch, sources: Sources | None = None) -> Callable[..., Any]:
    """A backend for torch.compile; the blocks it compiles run by `launch(graph, arguments, kernels)`.

    The kernels are those of an A100; those of each architecture in `sources` are written and added to it.
    """

    def inner(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with _a_gpu():  # a backward pass may be compiled long after the forward pass
            kernels = _kernels(_lowered(graph, inputs, options))
        for arch, written in (sources or {}).items():
            with _a_gpu(arch):
                written |= _written(_lowered(graph, inputs, options), arch)

        def run(arguments: list[Any]) -> Any:
            with _disable_current_modes():
                return launch(graph, arguments, kernels)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compiled(graph: GraphModule, inputs: list[Tensor]) -> Any:
        with _a_gpu():
            return compile_fx(graph, inputs, inner_compile=inner)

    return compiled


@contextmanager
def _lowered(graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Iterator[GraphLowering]:
    """Context in which inductor's representation of a graph on a GPU can be scheduled or written."""
    is_backward, is_inference = (bool(options.get(key)) for key in ("is_backward", "is_inference"))
    graph = copy.deepcopy(graph)
    view_to_reshape(graph)
    with torch.no_grad():
        fake = fake_tensor_prop(graph, list(inputs))
    record_original_output_strides(graph)
    with V.set_fake_mode(fake):
        _recursive_post_grad_passes(graph, is_inference=is_inference)
        on_gpu = [_moved(value) if isinstance(value, Tensor) else value for value in inputs]
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": _CUDA}
        with torch.no_grad():
            fake_tensor_prop(graph, on_gpu)
        lowering = GraphLowering(graph, on_gpu, is_backward=is_backward, is_inference=is_inference)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            lowering.run(*on_gpu)
            yield lowering


def _kernels(lowered: AbstractContextManager[GraphLowering]) -> list[Kernel]:
    with lowered as lowering:
        return [_kernel(node) for node in Scheduler(lowering.operations).nodes if _is_launched(node)]


def _written(lowered: AbstractContextManager[GraphLowering], arch: str) -> dict[str, str]:
    """Code of the graph's kernels, without their names, and the names."""
    from triton_kernels import card  # most uses need no Triton

    with card(arch), lowered as lowering:
        lowering.codegen()
        return dict(lowering.wrapper_code.src_to_kernel)


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


def order_of_cudnn(x: Tensor, weight: Tensor, backend: Any = None) -> torch.memory_format:
    """Memory order of a convolution's results: channels last if its input or its weights are.

    Replaces `torch._C._conv_determine_backend_memory_format`: torch without CUDA has contiguous results.
    """
    last = torch.channels_last_3d
    return last if last in (suggest_memory_format(x), suggest_memory_format(weight)) else torch.contiguous_format


@contextmanager
def _a_gpu(arch: str = "sm_80") -> Iterator[None]:
    name, capability, multiprocessors, _ = CARDS[arch]
    # The properties that inductor reads: reductions are split so that all multiprocessors have work.
    gpu = SimpleNamespace(
        name=name,
        multi_processor_count=multiprocessors,
        major=capability // 10,
        minor=capability % 10,
        warp_size=32,
        regs_per_multiprocessor=REGISTERS,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=MOST_THREADS,
        gcnArchName="",
    )
    interface = "torch._dynamo.device_interface.CudaInterface."
    answers = {
        interface + "is_available": lambda: True,
        interface + "get_device_properties": lambda device=None: gpu,
        interface + "get_compute_capability": lambda device=None: capability,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_properties": lambda device=None: gpu,
        "torch.cuda.get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "torch._inductor.scheduler.has_triton": lambda: True,
        # decompositions for a GPU, though graphs are traced on the CPU: the bias of a convolution
        "torch._inductor.decomposition.is_gpu": lambda device: True,
        "torch._C._conv_determine_backend_memory_format": order_of_cudnn,
    }
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        for target, answer in answers.items():
            stack.enter_context(patch(target, answer))
        yield
