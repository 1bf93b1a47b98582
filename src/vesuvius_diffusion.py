"""The `vesuvius` command, outside the package: it first checks that `import vesuvius` finds that of vesuvius-diffusion.

villa's package has the same import name.  Two such packages in one environment overwrite each other's files.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_MARK = "of vesuvius-diffusion"
"""Words of the `__init__.py` of this distribution."""


def conflict() -> str:
    """Return one line if `import vesuvius` would find something else, else ''.  Imports nothing."""
    spec = importlib.util.find_spec("vesuvius")
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is not None and _MARK in origin.read_text(encoding="utf-8", errors="replace"):
        return ""
    found = origin or (spec and "; ".join(spec.submodule_search_locations or ())) or "nothing"
    return (
        f"`import vesuvius` finds {found}, which is not vesuvius-diffusion: another package of this import name, such "
        "as villa's, overwrote it or comes first on sys.path; uninstall both and install vesuvius-diffusion into an "
        "environment of its own"
    )


def main() -> int:
    """Run `vesuvius`.  Returns the exit code, 2 if another package has its import name."""
    if problem := conflict():
        print(f"vesuvius: error: {problem}", file=sys.stderr)
        return 2
    from vesuvius.commands.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
