"""Start-up test of a network's 16-bit convolutions, forward and backward, against float32 on the same device.

All convolutions of the network run with the shapes of its micro-batch: libraries pick a kernel by shape, and a single
kernel can be wrong (oneDNN's bf16 weight gradient for inputs of depth 2, as of torch 2.13, on processors with
avx512_bf16).
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vesuvius.accelerator import empty_cache
from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.training.step.setup import AmpMode, autocast, build_meta_network, uses_channels_last

# Relative error.  One rounding costs up to 2^-9 in bf16 and 2^-12 in fp16; inputs, weights and output are all rounded.
TOLERANCES: dict[AmpMode, float] = {"fp16": 2e-3, "bf16": 1e-2}
_CUDNN_WITHOUT_CONV3D = (90800, 91500)  # first affected, first fixed


@dataclass(frozen=True)
class Convolution:
    """Shapes of one convolution call: input [B, C, Z, Y, X], weight [C_out, C, z, y, x]."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1, 1)
    padding: tuple[int, ...] = (1, 1, 1)

    def __str__(self) -> str:
        out, _, *kernel = self.weight_shape
        sizes = ("x".join(map(str, part)) for part in (kernel, self.input_shape))
        return "Conv3d with {} output channels, kernel {}, input {}".format(out, *sizes)


def check_kernels(
    config: Config,
    batch: int,
    device: torch.device,
    amp: AmpMode,
    backward: bool = True,
    poll: Callable[[], None] = lambda: None,
) -> None:
    """Test the 16-bit convolutions of the network of `config`; takes about two forward and backward passes and less
    memory than a step.  `poll` is called before each convolution.

    Raises ConfigError: a result or gradient is not finite or wrong beyond rounding, or torch would not use cuDNN.
    """
    if amp == "off":
        return
    channels_last = uses_channels_last(config.training, device)
    if backward and (problem := cudnn_problem(device, amp, channels_last)):
        raise ConfigError(problem)
    for convolution in network_convolutions(config, batch):
        poll()
        errors = convolution_errors(convolution, device, amp, channels_last, backward)
        for name, error in errors.items():
            if not error <= TOLERANCES[amp]:  # also true for NaN
                raise ConfigError(
                    f"{convolution} is wrong on this machine: relative error of the {name} {error:.2g}, "
                    f"{TOLERANCES[amp]:g} allowed (torch {torch.__version__}, {device}, amp {amp}); "
                    "set training.amp=off or install a different torch"
                )
    empty_cache()  # weights that were placed in these large segments would keep them for the run


def network_convolutions(config: Config, batch: int) -> list[Convolution]:
    """List the distinct convolutions of a network for `batch` patches, in forward order, without allocating memory."""
    seen, network = dict[Convolution, None](), deepcopy(build_meta_network(config))  # hooks change it

    def record(conv: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(conv, nn.Conv3d)
        assert not isinstance(conv.padding, str)
        seen[Convolution(tuple(given[0].shape), tuple(conv.weight.shape), conv.stride, conv.padding)] = None

    for module in network.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(record)
    with torch.device("meta"), torch.no_grad():
        network(torch.empty(batch, config.input_channels, *config.data.patch_size), torch.empty(batch))
    return list(seen)


def convolution_errors(
    convolution: Convolution, device: torch.device, amp: AmpMode, channels_last: bool = False, backward: bool = True
) -> dict[str, float]:
    """Relative errors (norms) of a convolution and its gradients under autocast.  Touches no global generator.

    All patches run together in 16 bits, as in a step, and one by one in float32: together that would need more memory
    than the step (`MemoryPlan.self_test_bytes`).
    """
    generator = torch.Generator(device).manual_seed(2)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return x.contiguous(memory_format=torch.channels_last_3d) if channels_last and len(shape) == 5 else x

    kernel = normal(*convolution.weight_shape)
    weights = (kernel * kernel[0].numel() ** -0.5, normal(len(kernel)))
    for weight in weights:
        weight.requires_grad_(backward)

    def run(x: Tensor, gradient: Tensor | None, amp: AmpMode) -> tuple[list[Tensor], Tensor]:
        """Output, gradients of input, weight and bias, and the output's gradient, which is drawn if None."""
        leaf = x.detach().requires_grad_(backward)
        with autocast(device, amp):
            out = F.conv3d(leaf, *weights, stride=convolution.stride, padding=convolution.padding)
        if not backward:
            return [out], out
        gradient = normal(*out.shape, dtype=out.dtype) if gradient is None else gradient
        return [out.detach(), *torch.autograd.grad(out, (leaf, *weights), gradient)], gradient

    x = normal(*convolution.input_shape, dtype=torch.bfloat16 if amp == "bf16" else torch.float16)
    ours, gradient = run(x, None, amp)
    sums = [torch.zeros_like(weight) for weight in ours[2:]]  # over the patches, of weight and bias
    squares = torch.zeros(4, 2, device=device)  # of differences and of float32 results
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for patch in range(len(x)):
            row = slice(patch, patch + 1)
            exact, _ = run(x[row].float(), gradient[row].float(), "off")
            for part, truth in enumerate(exact[:2]):
                squares[part, 1] += truth.norm() ** 2
                squares[part, 0] += truth.sub_(ours[part][row]).norm() ** 2
            for total, truth in zip(sums, exact[2:], strict=True):
                total += truth
            del exact, truth  # before the next patch
    for part, total in enumerate(sums, start=2):
        squares[part] = torch.stack([(ours[part] - total).norm() ** 2, total.norm() ** 2])
    names = ("output", "input gradient", "weight gradient", "bias gradient")
    errors = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
    return dict(zip(names[: len(ours)], errors, strict=False))


def cudnn_problem(device: torch.device, amp: AmpMode, channels_last: bool) -> str:
    """Why torch would convolve without cuDNN on this machine, with the remedy; '' if it uses cuDNN.

    With cuDNN 9.8 to 9.14 torch uses its own kernels for 16-bit Conv3d unless tensors are channels last (`use_cudnn` in
    ATen's Convolution.cpp): far slower, and they unfold the input in memory.
    """
    if device.type != "cuda" or amp == "off" or channels_last:
        return ""
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # such as 91002 for 9.10.2
    if version is None or not _CUDNN_WITHOUT_CONV3D[0] <= version < _CUDNN_WITHOUT_CONV3D[1]:
        return ""
    return (
        f"16-bit Conv3d would not run on cuDNN {version // 10000}.{version // 100 % 100}: torch avoids 9.8 to 9.14 "
        f"unless tensors are channels last (amp {amp}); set training.channels_last=auto or install cuDNN 9.15 or newer"
    )
