"""Measures settings (trials) of a config, compares them.  In: a config.  Out: a page, and the command to type next."""

from typing import Literal

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]
"""How a measurement ends."""
