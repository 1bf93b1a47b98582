"""The config of a command: the file, then `VESUVIUS_*` variables, then the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vesuvius.config import Config
from vesuvius.config.environment import variables
from vesuvius.config.load import read_config

log = logging.getLogger(__name__)


def take_config(path: Path, overrides: Sequence[str]) -> Config:
    """Read the config of this process, and take its variables out of the environment.

    Raises:
        ConfigError: as `read_config`.
    """
    return read_config(path, overrides, take_variables())


def take_variables() -> dict[str, str]:
    """Take the variables that set keys out of the environment, and log them.

    Processes that this one starts (readers, ranks, trainers of a tune or bench) get the config itself: they must not
    apply the variables a second time.
    """
    taken = variables(os.environ)
    for name in taken:
        del os.environ[name]
    if taken:
        log.info("keys are set by the environment: %s", ", ".join(taken))  # no values: they may be secret
    return taken
