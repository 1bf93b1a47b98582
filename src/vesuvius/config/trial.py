"""Configs of runs that are measured and thrown away, as `tune`, `bench`, `profile` and `doctor` start them.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vesuvius.config.experiment import Config

# More steps than a run ever has; a period of them never comes round.
NEVER = 10**9

_LISTENERS_OFF = {"tensorboard": False, "prometheus_port": None, "trackers": ()}
_STARTS_AFRESH_AND_SAVES_NOTHING = {
    "max_hours": None,
    "resume": "never",
    "init_from": None,
    "autotune": "off",
    "save_every": NEVER,
    "keep_every": None,
    "preview_every": 0,
}


def without_listeners(config: Config) -> Config:
    """Return a config whose records stay in the run directory: nobody else is told of them."""
    return config.model_copy(update={"monitor": config.monitor.model_copy(update=_LISTENERS_OFF)})


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
    told_nobody = without_listeners(config)
    changed = told_nobody.model_copy(
        update={
            "name": name,
            "training": config.training.model_copy(update=_STARTS_AFRESH_AND_SAVES_NOTHING | dict(training)),
            "monitor": told_nobody.monitor.model_copy(update=monitor or {}),
            **keys,
        }
    )
    return Config.model_validate(changed.model_dump())
