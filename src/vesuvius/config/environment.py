"""Environment variables -> config keys: `VESUVIUS_TRAINING__WORKERS=4` is `training.workers=4`.

Two underscores stand for a dot, a number for an item of a list (`VESUVIUS_DATA__VOLUMES__0__PATH`), and the value is
YAML, as in an override.  Commands that read a config file obey them: `commands/arguments/config.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from vesuvius.config.describe import REMOVED, dotted, iter_keys
from vesuvius.errors import ConfigError

PREFIX = "VESUVIUS_"
_NO_KEYS = ("VESUVIUS_RUNS",)  # read by `runlog/find_run.py`
_OF_SERVICES = "_SERVICE_HOST"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are meant for the config, sections before what they hold.  Pure.

    Those that Kubernetes puts into each pod of a namespace with a Service called `vesuvius` or `vesuvius-...` are not.
    """
    services = tuple(name.removesuffix(_OF_SERVICES) for name in environment if name.endswith(_OF_SERVICES))
    foreign = tuple(f"{service}{part}" for service in services for part in ("_SERVICE_", "_PORT"))
    names = sorted(name for name in environment if name.startswith(PREFIX) and not name.startswith(foreign))
    return {name: environment[name] for name in names if name not in _NO_KEYS}


def key_of_variable(name: str) -> str:
    """The key that a variable sets, as in an override.  Pure.

    Raises:
        ConfigError: there is none; names the variable of the nearest key.
    """
    steps = tuple(int(part) if part.isdecimal() else part for part in name.removeprefix(PREFIX).lower().split("__"))
    known = [key for key, _ in iter_keys()]
    if name.isupper() and dotted(steps, index="[]").removesuffix("[]") in known:
        return dotted(steps)
    if removed := REMOVED.get(dotted(steps, index="[]")):
        raise ConfigError(f"environment variable {name}: {dotted(steps)} was removed; {removed}; unset the variable")
    likely = max(map(_name_of, known), key=lambda candidate: _likeness(name.upper(), candidate))
    raise ConfigError(
        f"environment variable {name}: names no config key; did you mean {likely}? unset it if it is not meant for "
        "vesuvius"
    )


def _name_of(key: str) -> str:
    return PREFIX + key.replace("[]", ".0").replace(".", "__").upper()


def _likeness(name: str, candidate: str) -> tuple[bool, float]:
    """A key that ends like the name comes first: the section was left out."""
    ending = name.removeprefix(PREFIX)
    return candidate.endswith(f"_{ending}"), difflib.SequenceMatcher(None, ending, candidate).ratio()
