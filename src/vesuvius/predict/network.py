"""Networks for prediction: opened from a file, a function or a living module, and probed with an empty batch."""

import copy
import hashlib
import importlib
import os
import re
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vesuvius.accelerator import synchronize
from vesuvius.config import Triple
from vesuvius.errors import ConfigError, one_line
from vesuvius.runlog.units import format_sizes

Network = Callable[[Tensor], Tensor]
"""(B, C, Z, Y, X) -> (B, K, Z', Y', X')."""


@dataclass(frozen=True)
class Probe:
    """The shape and time of a result, of a batch of zeros."""

    channels: int
    factor: Fraction  # voxels of the output per voxel of the input, along each axis
    seconds: float


def open_network(network: Any, device: torch.device, folder: str) -> Network:
    """Open a network on a device, for inference.

    Args:
        network: a module, which is copied; any other callable, used as it is; the path of a TorchScript or torch.export
            file; or "module:function", a function without arguments that builds the network.
        folder: from which modules can be imported, too; "" = the working directory, which may be gone.

    Raises:
        ConfigError: it is none of these, or cannot be opened.
    """
    try:
        if isinstance(network, (str, os.PathLike)):
            opened = _loaded(os.fspath(network), device, folder)
        else:
            opened = copy.deepcopy(network) if isinstance(network, nn.Module) else network
        exported = isinstance(opened, torch.fx.GraphModule)  # has no modes
        if isinstance(opened, nn.Module) and not exported:
            opened = opened.to(device).eval()
    except ConfigError:
        raise
    except Exception as error:
        name = network if isinstance(network, (str, os.PathLike)) else type(network).__name__
        remedy = "; pass a function that calls it" if isinstance(network, nn.Module) else ""  # it cannot be copied
        raise ConfigError(
            f"Cannot open the network {name}: {type(error).__name__}: {one_line(error)}{remedy}"
        ) from error
    if not callable(opened):
        raise ConfigError(f"The network {network} is a {type(opened).__name__}, which cannot be called; pass a module")
    network_of_device: Network = opened
    return network_of_device


def _loaded(name: str, device: torch.device, folder: str) -> Any:
    if not os.path.exists(name):
        module, colon, function = name.partition(":")
        if not colon:
            raise ConfigError(f"The network {name} does not exist; pass a file, or MODULE:FUNCTION that builds it")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return getattr(importlib.import_module(module), function)()
    names = zipfile.ZipFile(name).namelist() if zipfile.is_zipfile(name) else []
    if any("/code/" in each for each in names):
        return torch.jit.load(name, map_location=device)
    if not any("exported_program" in each or "/models/" in each for each in names):
        raise ConfigError(
            f"{name} is not a file of TorchScript or torch.export: it may hold weights alone; save the network with "
            "torch.export.save, or pass MODULE:FUNCTION that builds it and loads them"
        )
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(torch.export.load(name), device).module()


def fingerprint(network: Any, opened: Network) -> str:
    """Return a name and a hash: of a file, else of all layers, weights and buffers; of another callable the name."""
    is_name = isinstance(network, (str, os.PathLike))
    name = os.fspath(network) if is_name else getattr(network, "__qualname__", type(network).__qualname__)
    digest = hashlib.sha256()
    if is_name and os.path.exists(network):
        with Path(network).open("rb") as file:
            return f"{Path(name).name} {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    if isinstance(opened, nn.Module):
        digest.update(re.sub(" at 0x[0-9a-f]+", "", repr(opened)).encode())  # activations, strides, ...
        values = {**opened.state_dict(), **dict(opened.named_buffers())}  # also those that are not saved
        for key, value in sorted((key, value) for key, value in values.items() if isinstance(value, Tensor)):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            value = value if value.layout == torch.strided else value.to_dense()
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"{name} {digest.hexdigest()[:16]}"


def probe_network(network: Network, batch_size: int, channels: int, patch_zyx: Triple, device: torch.device) -> Probe:
    """Evaluate a network on zeros.  Raises ConfigError if it fails, or its result is not as asked; OutOfMemoryError."""
    batch = torch.zeros(batch_size, channels, *patch_zyx, device=device)
    started = time.perf_counter()
    try:
        with torch.inference_mode():
            result = network(batch)
            synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The network fails on a batch of {tuple(batch.shape)}: {type(error).__name__}: {one_line(error, 400)}; "
            "change the patch size, the batch size or the channels of the volume to what it takes"
        ) from error
    seconds = time.perf_counter() - started
    if not isinstance(result, Tensor) or result.is_complex():
        found = result.dtype if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"The network returns a {found}; wrap it so that it returns one tensor of real numbers")
    shape = tuple(result.shape)
    factors = {Fraction(out, size) for out, size in zip(shape[2:], patch_zyx, strict=False)}
    factor = next(iter(factors), Fraction(0))
    if len(shape) != 5 or shape[0] != batch_size or len(factors) != 1 or 1 not in factor.as_integer_ratio():
        raise ConfigError(
            f"The network maps {tuple(batch.shape)} to {shape}, not to (B, K, Z, Y, X) of the same size, or by one "
            f"factor such as 1/2 or 2 along all axes; change the network or the patch size ({format_sizes(patch_zyx)})"
        )
    return Probe(shape[1], factor, seconds)
