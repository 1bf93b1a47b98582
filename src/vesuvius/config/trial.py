"""Configs of runs that are measured and thrown away, as `tune`, `bench`, `profile` and `doctor` start them.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vesuvius.config.experiment import Config

# More steps than a run ever has; a period of them never comes round.
NEVER = 10**9


def without_listeners(config: Config) -> Config:
    """Return a config whose records stay in the run directory: nobody else is told of them."""
    listeners_off = {"tensorboard": False, "prometheus_port": None, "trackers": ()}
    return config.model_copy(update={"monitor": config.monitor.model_copy(update=listeners_off)})


def trial_config(
    config: Config, name: str, training: Mapping[str, Any], monitor: Mapping[str, Any] | None = None, **keys: Any
) -> Config:
    """Return the config of a trial run: it starts afresh, saves nothing and notifies nobody.

    Args:
        training, monitor: what else differs in these sections.
        keys: what else differs at the top level.

    Raises:
        ValidationError: what differs does not fit the rest.
    """
    changed = without_listeners(config).model_dump() | {"name": name} | keys
    changed["training"] |= {"max_hours": None, "resume": "never", "init_from": None, "autotune": "off"}
    changed["training"] |= {"save_every": NEVER, "keep_every": None, "preview_every": 0} | dict(training)
    changed["monitor"] |= monitor or {}
    return Config.model_validate(changed)
