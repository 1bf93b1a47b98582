"""`vesuvius bench`, `tune` and `profile`: measure settings of a config, and compare them.

In: a config.  Out: a page, and the command to type next.  A trial is a setting to measure.  trainer.py measures one,
steady.py detects the steady state, machine.py locks out other sessions, paired.py compares.  bench/ has fixed trials,
tune/ chooses the next trial, profile.py analyzes the steps of one."""

from typing import Literal

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]
"""How a measurement ends."""
