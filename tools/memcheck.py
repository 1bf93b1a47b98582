"""`vesuvius memcheck` from a checkout that is not installed; needs only Python, psutil and rich.

python tools/memcheck.py demo
python tools/memcheck.py demo --once --json
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vesuvius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from vesuvius.commands.memcheck import main

if __name__ == "__main__":
    sys.exit(main())
