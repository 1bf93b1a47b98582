"""Start-up test of the kernels that a run will use: convolutions, norm and SiLU, forward and backward.

A fixed convolution is compared with float64 on the CPU, which makes float32 a reference.  In 16 bits the network's own
convolutions, with the shapes of its micro-batch, are then compared with float32: a library picks its kernel by shape,
and one of them can be wrong while the others are right (oneDNN's weight gradient in bf16 for inputs of depth 2, as of
torch 2.13, on processors with avx512_bf16).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vesuvius.config import Config
from vesuvius.diffusion.network.lean import norm_silu_conv
from vesuvius.errors import ConfigError
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.step import AmpMode, autocast

Convolve = Callable[[Tensor, Tensor, Tensor], Tensor]

# Norm of the error over the norm of the result.  One rounding to bf16 is up to 2^-9, to fp16 2^-12; float32 is held to
# that of TF32 (2^-11), which GPUs use for it.  Each with room for the roundings of inputs, weights and output together.
TOLERANCES: dict[AmpMode, float] = {"off": 2e-3, "fp16": 2e-3, "bf16": 1e-2}
_CUDNN_WITHOUT_CONV3D = (90800, 91500)  # from, to below
_CHANNELS = 32
_SIZE_ZYX = (9, 17, 17)  # the lowest level of the default network with its default patch


def convolution_errors(device: torch.device, amp: AmpMode, convolve: Convolve | None = None) -> dict[str, float]:
    """Compare a 3x3x3 convolution and its gradients on `device`, under autocast, with float64 on the CPU.

    Takes milliseconds and touches no global generator.  `convolve` is tested in place of `F.conv3d` with padding 1.
    Returns the norm of the error over the norm of the result, of the output and the gradients of input and weight.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, _CHANNELS, *_SIZE_ZYX, generator=generator)
    kernel = torch.randn(_CHANNELS, _CHANNELS, 3, 3, 3, generator=generator) * (27 * _CHANNELS) ** -0.5
    bias = torch.randn(_CHANNELS, generator=generator)
    grad = torch.randn(x.shape, generator=generator)
    exact = _run(_convolve, x.double(), kernel.double(), bias.double(), grad.double())
    with autocast(device, amp):
        found = _run(convolve or _convolve, x.to(device), kernel.to(device), bias.to(device), grad.to(device))
    return _errors(("output", "input gradient", "weight gradient"), found, exact)


def check_convolution(device: torch.device, amp: AmpMode, convolve: Convolve | None = None) -> None:
    """Raises ConfigError where `convolution_errors` are beyond rounding.

    torch 2.9 was once silently wrong there; other versions, drivers and GPUs are tested rather than trusted.
    """
    _check("Conv3d", convolution_errors(device, amp, convolve), device, amp, "install a different torch")


@dataclass(frozen=True)
class Convolution:
    """A convolution of a network, as it is called: shapes [B, C, Z, Y, X] and [C_out, C, z, y, x]."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def __str__(self) -> str:
        out, _, *kernel = self.weight_shape
        sizes = ("x".join(map(str, part)) for part in (kernel, self.input_shape))
        return "Conv3d to {} channels, kernel {}, of an input of {}".format(out, *sizes)


def network_convolutions(config: Config, batch: int) -> list[Convolution]:
    """List the different convolutions of a network for `batch` patches, in the order of a forward pass.

    Runs the network on the meta device: takes no memory.
    """
    network = lay_out_network(config)
    scalars = len(config.model.scalars) + 1 if config.model.scalars else 0
    with torch.device("meta"), torch.no_grad(), _Recorder() as recorder:
        x = torch.empty(batch, config.input_channels, *config.data.patch_size)
        network(x, torch.empty(batch), torch.empty(batch, scalars) if scalars else None)
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


def check_convolutions(
    convolutions: Iterable[Convolution],
    device: torch.device,
    amp: AmpMode,
    channels_last: bool,
    backward: bool = True,
    convolve: Callable[..., Tensor] = F.conv3d,
) -> dict[str, float]:
    """Compare convolutions and their gradients under autocast with float32 on the same device.

    Costs about two forward and backward passes; nothing in float32, which is the reference.  Touches no global
    generator.

    Args:
        convolve: tested in place of `F.conv3d`.

    Returns:
        The largest error, as in `convolution_errors`, of the output and of each gradient.

    Raises:
        ConfigError: an error is beyond rounding, or not a number.
    """
    worst: dict[str, float] = {}
    for convolution in () if amp == "off" else convolutions:
        errors = _errors_of(convolution, device, amp, channels_last, backward, convolve)
        _check(str(convolution), errors, device, amp, "install a different torch")
        worst |= {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    return worst


def _errors_of(
    convolution: Convolution,
    device: torch.device,
    amp: AmpMode,
    channels_last: bool,
    backward: bool,
    convolve: Callable[..., Tensor],
) -> dict[str, float]:
    generator = torch.Generator(device).manual_seed(2)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format

    def normal(shape: Sequence[int], std: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device).mul_(std)
        return values.contiguous(memory_format=layout) if values.ndim == 5 else values

    x, kernel = normal(convolution.input_shape), normal(convolution.weight_shape)
    kernel *= kernel[0].numel() ** -0.5
    bias = normal(convolution.weight_shape[:1])
    grad: Tensor | None = None

    def run(convolve: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        nonlocal grad
        leaves = [part.detach().requires_grad_(backward) for part in (x, kernel, bias)]
        out = convolve(*leaves, stride=convolution.stride, padding=convolution.padding)
        if not backward:
            return (out,)
        grad = normal(out.shape) if grad is None else grad
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = run(F.conv3d)
    with autocast(device, amp):
        found = run(convolve)
    names = ("output", "input gradient", "weight gradient", "bias gradient")[: len(exact)]
    return {
        name: float((ours.float() - truth).norm() / truth.norm())
        for name, ours, truth in zip(names, found, exact, strict=True)
    }


def norm_errors(device: torch.device, amp: AmpMode, channels_last: bool, lean: bool = True) -> dict[str, float]:
    """Compare norm, SiLU and a 1x1x1 convolution after them, as the network has them, with float64 on the CPU.

    With the first call on a GPU its kernels are compiled, which takes seconds; touches no global generator.  Returns
    as `convolution_errors`, of the output and the gradients of input, scale and shift.
    """
    generator = torch.Generator().manual_seed(1)
    x = 1 + torch.randn(2, _CHANNELS, *_SIZE_ZYX, generator=generator)
    rows = torch.randn(2, 2 * _CHANNELS, generator=generator)
    grad = torch.randn(x.shape, generator=generator)
    conv = nn.Conv3d(_CHANNELS, _CHANNELS, 1, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(std=_CHANNELS**-0.5, generator=generator)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    exact = _norm_run(x.double(), rows.double(), grad.double(), copy.deepcopy(conv).double(), lean)
    on_device = [part.to(device).contiguous(memory_format=layout) for part in (x, grad)]
    conv = conv.to(device).to(memory_format=layout)  # type: ignore[call-overload]  # torch declares channels_last only
    with autocast(device, amp):
        found = _norm_run(on_device[0], rows.to(device), on_device[1], conv, lean)
    return _errors(("output", "input gradient", "scale gradient", "shift gradient"), found, exact)


def check_norm(device: torch.device, amp: AmpMode, channels_last: bool, errors: dict[str, float] | None = None) -> None:
    """Raises ConfigError where `norm_errors`, or given `errors`, are beyond rounding."""
    errors = errors or norm_errors(device, amp, channels_last)
    _check("GroupNorm and SiLU", errors, device, amp, "install the triton that belongs to this torch")


def _errors(names: Sequence[str], found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    return {
        name: float((ours.cpu().double() - truth).norm() / truth.norm())
        for name, ours, truth in zip(names, found, exact, strict=True)
    }


def _check(what: str, errors: dict[str, float], device: torch.device, amp: AmpMode, other: str) -> None:
    for name, error in errors.items():
        if not error <= TOLERANCES[amp]:  # also where it is NaN
            remedy = other if amp == "off" else f"set training.amp=off or {other}"
            raise ConfigError(
                f"{what} is wrong on this machine: {name} off by {error:.2g} of its norm, {TOLERANCES[amp]:g} allowed "
                f"(torch {torch.__version__}, {device}, amp {amp}); {remedy}"
            )


def _norm_run(x: Tensor, rows: Tensor, grad: Tensor, conv: nn.Conv3d, lean: bool) -> tuple[Tensor, ...]:
    """The output and the gradients of x, scale and shift, which are views of `rows` as in the network's AdaGN."""
    x, rows = x.clone().requires_grad_(), rows.clone().requires_grad_()
    scale, shift = rows.chunk(2, dim=1)
    out = norm_silu_conv(x, scale, shift, 8, conv, lean)
    grad_x, grad_rows = torch.autograd.grad(out, (x, rows), grad.to(out.dtype))
    return out.detach(), grad_x, *grad_rows.chunk(2, dim=1)


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


def check_cudnn(device: torch.device, amp: AmpMode, channels_last: bool, version: int | None = None) -> None:
    """Raises ConfigError where `cudnn_problem` finds one."""
    if problem := cudnn_problem(device, amp, channels_last, version):
        raise ConfigError(problem)


def _run(convolve: Convolve, x: Tensor, kernel: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of x and kernel for the output's gradient `grad`."""
    x, kernel = x.clone().requires_grad_(), kernel.clone().requires_grad_()
    out = convolve(x, kernel, bias)
    grad_x, grad_kernel = torch.autograd.grad(out, (x, kernel), grad.to(out.dtype))
    return out.detach(), grad_x, grad_kernel


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return F.conv3d(x, kernel, bias, padding=1)
