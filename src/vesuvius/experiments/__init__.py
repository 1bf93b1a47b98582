"""`vesuvius bench`, `tune` and `profile`: measure settings of a config, and compare them.

In: a config.  Out: a page, and the command to type next.  A cell is a setting to measure.  trainer.py measures one cell
in a process of its own, steady.py detects the steady state, folder.py locks out other sessions, paired.py compares.
bench/ has fixed cells, tune/ chooses the next cell, profile.py analyzes the steps of one."""

from typing import Literal

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]
"""How a measurement ends."""
