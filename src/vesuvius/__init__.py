"""vesuvius: train 3D diffusion models on patches of huge chunked CT volumes.

Public names are imported when they are first used: `import vesuvius` alone loads no torch, Ray or zarr.
Their types stand in `__init__.pyi`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "config": ("ArrayConfig", "DataConfig", "MaskConfig", "StoreConfig", "VolumeConfig"),
    "errors": ("ConfigError", "DataError", "VesuviusError"),
    "loader.device": ("PatchBatch",),
    "loader.patch_loader": ("PatchLoader",),
    "predict.grid": ("Aggregator", "GridBatch", "GridLoader"),
    "predict.run": ("Prediction", "predict_volume"),
    "stream.options": ("StreamOptions",),
    "stream.start.prepare": ("prepare_data",),
    "stream.stream": ("PatchStream",),
    "volumes.volume": ("Volume", "open_volume"),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} of vesuvius-diffusion has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
