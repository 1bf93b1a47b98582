"""The `vesuvius` command, outside the package: villa's package has the same import name, and two such packages in one
environment overwrite each other's files.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Run `vesuvius`.  Returns the exit code; 2 if `import vesuvius` would find another package, which is not run."""
    spec = importlib.util.find_spec("vesuvius")
    found = (spec and (spec.origin or "; ".join(spec.submodule_search_locations or ()))) or "nothing"
    try:
        ours = "of vesuvius-diffusion" in Path(found).read_text(encoding="utf-8", errors="replace")
    except OSError:
        ours = False
    if not ours:
        print(
            f"vesuvius: error: `import vesuvius` finds {found}, which is not vesuvius-diffusion: another package of "
            "this import name, such as villa's, overwrote it or comes first on sys.path; uninstall both and install "
            "vesuvius-diffusion into an environment of its own",
            file=sys.stderr,
        )
        return 2
    from vesuvius.commands.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
