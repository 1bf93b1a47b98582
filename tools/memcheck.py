"""`vesuvius memcheck` from a checkout that is not installed; needs only Python, psutil and rich.

python tools/memcheck.py demo
python tools/memcheck.py demo --once --json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # an installed `vesuvius` may be another's

from vesuvius.commands.memcheck import main

if __name__ == "__main__":
    sys.exit(main())
