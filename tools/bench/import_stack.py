"""Measure `vesuvius volume import` of a TIFF stack: seconds, peak memory of all its processes, and kills.

    python tools/bench/import_stack.py --gib 4 --kills 5 --folder /a/disk

Imports once undisturbed, then once more with SIGKILLs at random times and a restart after each; all bytes must be
equal.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import tifffile

PAGE = (2048, 1024)  # uint16, 4 MiB


def write_stack(path: Path, pages: int) -> None:
    """Smooth structure and noise, about as compressible as a CT scan; each page a BigTIFF page of its own."""
    rng = np.random.default_rng(0)
    y, x = np.indices(PAGE)
    page = (20000 + 8000 * np.sin(x / 40) * np.cos(y / 60) + rng.normal(0, 300, PAGE)).astype("u2")
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for z in range(pages):
            writer.write(np.roll(page, (7 * z, 3 * z), (0, 1)), contiguous=False, metadata=None)


def run(command: list[str], is_over: Callable[[float], bool] = lambda seconds: False) -> tuple[bool, float, int]:
    """Run a command, or kill it once `is_over()`.  Returns whether it was killed, its seconds, and its peak bytes."""
    started, peak = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            if is_over(time.monotonic() - started):
                process.kill()
                return True, time.monotonic() - started, peak
            try:
                peak = max(peak, sum(each.memory_info().rss for each in (tree, *tree.children(recursive=True))))
            except psutil.NoSuchProcess:
                continue
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return False, time.monotonic() - started, peak


def digest(folder: Path) -> str:
    """Hash of the names and bytes of all chunks."""
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.parent != folder):
        total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="size of the stack (default: 4)")
    parser.add_argument("--kills", type=int, default=5, help="0 = no kills (default: 5)")
    parser.add_argument("--folder", type=Path, help="for the files, which are removed afterwards (default: /tmp)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        stack, whole, killed = (Path(name, file) for file in ("stack.tif", "whole.zarr", "killed.zarr"))
        write_stack(stack, int(arguments.gib * 2**30) // (2 * PAGE[0] * PAGE[1]))
        command = [sys.executable, "-m", "vesuvius", "volume", "import", str(stack)]
        _, seconds, peak = run([*command, str(whole)])
        print(f"{stack.stat().st_size / 2**30:.2f} GiB: {seconds:.0f} s, at most {peak / 2**20:.0f} MiB", flush=True)
        moments = []
        while len(moments) < arguments.kills:
            limit = random.uniform(0, seconds / arguments.kills)
            was_killed, took, peak_now = run([*command, str(killed)], lambda now, limit=limit: now > limit)
            peak = max(peak, peak_now)
            if not was_killed:
                raise SystemExit("the import finished before all kills")
            moments.append(f"{took:.1f}")
        if moments:
            _, took, peak_now = run([*command, str(killed)])
            same = digest(whole) == digest(killed)
            verdict = "the same bytes" if same else "DIFFERENT BYTES"
            print(f"killed after {', '.join(moments)} s; the rest took {took:.0f} s: {verdict}")
            print(f"at most {max(peak, peak_now) / 2**20:.0f} MiB in all of them")
            sys.exit(not same)


if __name__ == "__main__":
    main()
