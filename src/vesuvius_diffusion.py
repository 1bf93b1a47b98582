"""The `vesuvius` command, outside the package: villa's package has the same import name, and two such packages in one
environment overwrite each other's files.
"""

import importlib
import importlib.util
import sys
from pathlib import Path


def main(module: str = "vesuvius.commands.cli") -> int:
    """Run the `main` of a module.  Returns its exit code; 2, at once, if `import vesuvius` finds another package."""
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
    exit_code: int = importlib.import_module(module).main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
