"""States of checkpoints, each read once: torch reads one in 50 ms of CPU, and a command that draws reads it twice."""

from __future__ import annotations

import functools
import io
import sys
from pathlib import Path
from typing import Any

import pytest


def read_states_once(patch: pytest.MonkeyPatch) -> None:
    """Let `read_checkpoint_info` and others of `trained` keep what they have read, by the bytes of the file."""
    if not (trained := sys.modules.get("vesuvius.training.checkpoint.trained")):
        return  # no test here reads one
    import torch
    from torch.utils._pytree import tree_map_only

    load_state = trained.load_state

    @functools.lru_cache(maxsize=8)
    def state_in(content: bytes) -> Any:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

    def load_state_once(path: Path, mmap: bool = False) -> Any:
        try:
            found = state_in(path.read_bytes())
        except Exception:
            return load_state(path, mmap)  # raises its own errors
        return tree_map_only(torch.Tensor, torch.clone, found)

    patch.setattr(trained, "load_state", load_state_once)
