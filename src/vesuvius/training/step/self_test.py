"""Start-up test of the convolutions that a run will use, forward and backward, in its autocast dtype.

In float32 one convolution is compared with float64 on the CPU, which makes float32 a reference.  In 16 bits all those
of the network are compared with it, with the shapes of its micro-batch: a library picks its kernel by shape, and one of
them can be wrong while the others are right (oneDNN's weight gradient in bf16 for inputs of depth 2, as of torch 2.13,
on processors with avx512_bf16).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.step import AmpMode, autocast

Convolve = Callable[..., Tensor]

# Norm of the error over the norm of the result.  One rounding to bf16 is up to 2^-9, to fp16 2^-12; float32 is held to
# that of TF32 (2^-11), which GPUs use for it.  Each with room for the roundings of inputs, weights and output together.
TOLERANCES: dict[AmpMode, float] = {"off": 2e-3, "fp16": 2e-3, "bf16": 1e-2}
_CUDNN_WITHOUT_CONV3D = (90800, 91500)  # from, to below


@dataclass(frozen=True)
class Convolution:
    """A convolution of a network, as it is called: shapes [B, C, Z, Y, X] and [C_out, C, z, y, x]."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1, 1)
    padding: tuple[int, ...] = (1, 1, 1)

    def __str__(self) -> str:
        out, _, *kernel = self.weight_shape
        sizes = ("x".join(map(str, part)) for part in (kernel, self.input_shape))
        return "Conv3d to {} channels, kernel {}, of an input of {}".format(out, *sizes)


# At the lowest level of the default network with its default patch.
USUAL = Convolution((2, 32, 9, 17, 17), (32, 32, 3, 3, 3))


def check_kernels(config: Config, batch: int, device: torch.device, amp: AmpMode, backward: bool = True) -> None:
    """Test the convolutions of the network of `config` on `device`; takes about two forward and backward passes.

    Raises:
        ConfigError: a result or gradient is wrong beyond rounding or not a number, or torch would not use cuDNN.
    """
    channels_last = config.training.channels_last
    if backward and (problem := cudnn_problem(device, amp, channels_last)):
        raise ConfigError(problem)
    check_convolution(USUAL, device, "off")
    for convolution in network_convolutions(config, batch) if amp != "off" else ():
        check_convolution(convolution, device, amp, channels_last, backward)


def network_convolutions(config: Config, batch: int) -> list[Convolution]:
    """List the different convolutions of a network for `batch` patches, in the order of a forward pass.

    Runs the network on the meta device: takes no memory.
    """
    network = lay_out_network(config)
    with torch.device("meta"), torch.no_grad(), _Recorder() as recorder:
        x = torch.empty(batch, config.input_channels, *config.data.patch_size)
        network(x, torch.empty(batch))
    return list(recorder.seen)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Keeps what each convolution is called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[Convolution, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, weight, _, stride, padding = args[:5]
            self.seen[Convolution(tuple(x.shape), tuple(weight.shape), tuple(stride), tuple(padding))] = None
        return func(*args, **(kwargs or {}))


def check_convolution(
    convolution: Convolution,
    device: torch.device,
    amp: AmpMode,
    channels_last: bool = False,
    backward: bool = True,
    convolve: Convolve = F.conv3d,
) -> None:
    """Raises ConfigError where `convolution_errors` are beyond rounding, or not numbers."""
    errors = convolution_errors(convolution, device, amp, channels_last, backward, convolve)
    for name, error in errors.items():
        if not error <= TOLERANCES[amp]:  # also where it is NaN
            raise ConfigError(
                f"{convolution} is wrong on this machine: {name} off by {error:.2g} of its norm, "
                f"{TOLERANCES[amp]:g} allowed (torch {torch.__version__}, {device}, amp {amp}); "
                f"{'' if amp == 'off' else 'set training.amp=off or '}install a different torch"
            )


@functools.lru_cache(maxsize=64)  # of a run, its validations and its samples
def convolution_errors(
    convolution: Convolution,
    device: torch.device,
    amp: AmpMode,
    channels_last: bool = False,
    backward: bool = True,
    convolve: Convolve = F.conv3d,
) -> dict[str, float]:
    """Compare a convolution and its gradients under autocast with float32 on the device; float32 with float64 on a CPU.

    Touches no global generator.

    Args:
        convolve: tested in place of `F.conv3d`.

    Returns:
        Norm of the error over the norm of the result, of the output and of the gradients of input, weight and bias.
    """
    reference, exact_dtype = (torch.device("cpu"), torch.float64) if amp == "off" else (device, torch.float32)
    generator = torch.Generator(reference).manual_seed(2)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator, device=reference)

    shapes = (convolution.input_shape, convolution.weight_shape, convolution.weight_shape[:1])
    x, kernel, bias = (normal(shape) for shape in shapes)
    inputs = [x, kernel * kernel[0].numel() ** -0.5, bias]
    grads: list[Tensor] = []

    def run(convolve: Convolve, where: torch.device, dtype: torch.dtype) -> list[Tensor]:
        order = torch.channels_last_3d if channels_last else torch.contiguous_format
        leaves = [
            part.to(where, dtype).contiguous(memory_format=order if part.ndim == 5 else torch.contiguous_format)
            for part in inputs
        ]
        leaves = [part.detach().requires_grad_(backward) for part in leaves]
        out = convolve(*leaves, stride=convolution.stride, padding=convolution.padding)
        if not backward:
            return [out]
        if not grads:
            grads.append(normal(out.shape))
        return [out.detach(), *torch.autograd.grad(out, leaves, grads[0].to(where, out.dtype))]

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = run(F.conv3d, reference, exact_dtype)
    with autocast(device, amp):
        found = run(convolve, device, torch.float32)
    names = ("output", "input gradient", "weight gradient", "bias gradient")[: len(exact)]
    return {
        name: float((ours.to(truth.device, truth.dtype) - truth).norm() / truth.norm())
        for name, ours, truth in zip(names, found, exact, strict=True)
    }


def cudnn_problem(device: torch.device, amp: AmpMode, channels_last: bool, version: int | None = None) -> str:
    """Why torch would convolve without cuDNN on this machine, and the remedy; '' where it would not.  Pure.

    With cuDNN 9.8 to 9.14 torch takes kernels of its own for 16-bit Conv3d unless tensors lie channels last
    (`use_cudnn` in ATen's Convolution.cpp): far slower, and they unfold their input in memory.  torch's version does
    not tell which cuDNN is loaded; `version` is such as 91002 for 9.10.2.
    """
    if device.type != "cuda" or amp == "off" or channels_last:
        return ""
    version = torch.backends.cudnn.version() if version is None else version  # type: ignore[no-untyped-call]
    if version is None or not _CUDNN_WITHOUT_CONV3D[0] <= version < _CUDNN_WITHOUT_CONV3D[1]:
        return ""
    return (
        f"a 16-bit Conv3d must run on cuDNN; got cuDNN {version // 10000}.{version // 100 % 100}, for which "
        f"torch does not use it (9.8 to 9.14, amp {amp}); set training.channels_last=true or install cuDNN 9.15 or "
        "newer"
    )
