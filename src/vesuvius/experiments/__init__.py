"""`vesuvius bench`, `tune` and `profile`: a cell is a setting; measure cells; compare cells.

In: a config.  Out: a page, and the command to type next.  trainer.py measures one cell in a process that is
thrown away, steady.py says when a run is warm and measured for long enough, folder.py lets one session in at a time,
paired.py compares.  bench/ has fixed cells, tune/ asks for the next cell, profile.py looks into one."""

from typing import Literal

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]
"""How a measurement ends."""
