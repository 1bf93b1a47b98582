"""Before the first step: does this machine convolve rightly in the dtype that it will train in?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vesuvius.diffusion.network.lean import norm_silu_conv
from vesuvius.errors import ConfigError
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
    _check("Conv3d", "its", convolution_errors(device, amp, convolve), device, amp, "another torch")


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
    _check("GroupNorm and SiLU", "their", errors, device, amp, "the triton that belongs to this torch")


def _errors(names: Sequence[str], found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    return {
        name: float((ours.cpu().double() - truth).norm() / truth.norm())
        for name, ours, truth in zip(names, found, exact, strict=True)
    }


def _check(what: str, whose: str, errors: dict[str, float], device: torch.device, amp: AmpMode, other: str) -> None:
    for name, error in errors.items():
        if not error <= TOLERANCES[amp]:  # also where it is NaN
            raise ConfigError(
                f"{what} must agree with float64 within {TOLERANCES[amp]:g}; got an error of {error:.2g} in {whose} "
                f"{name} (torch {torch.__version__}, {device}, amp {amp}); set training.amp=off or use {other}"
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
