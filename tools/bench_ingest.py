"""The data path against its peers: patches/s, time to the first batch, bytes decoded and memory, in one command.

    python tools/bench_ingest.py                     # a 512x1024x1024 phantom, written to volumes/ when it is not there
    python tools/bench_ingest.py --quick             # one repeat of all systems with 2 workers, in 90 s
    python tools/bench_ingest.py --volume scroll.zarr --level 0 --json bench.json
    python tools/bench_ingest.py --latency-ms 30     # every system reads the volume over HTTP, 30 ms a request

(a) zarr-python, (b) zarrs, (c) tensorstore: torch DataLoader, uniform random patches.  (d) torch DataLoader over our
own tasks.  (e) ours.  (f) the limit: nothing but decoding each chunk once, from disk, converted to patches/s by our
read amplification.  With --latency-ms also (e0): ours from a server without latency.

Each measurement is a process of its own; systems take turns, `--repeats` times, in a rotating order; figures are
medians with minimum and maximum.  How one is measured, and the settings of the others: `bench_systems.py`.  The
volume's files are read once before, so that all find them in the page cache.  A failure is shown with its error.

decoded MB/patch: bytes of the chunks decoded per patch delivered; absent chunks count.
RssAnon: private memory of the largest worker at the end; what workers share (DataLoader batches, Ray's object store) is
not in it.  Object store: memory of Ray's store that was ever used.  Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench_systems import Setup

Triple = tuple[int, int, int]
Row = dict[str, Any]

TOOLS = Path(__file__).resolve().parent
PHANTOM = Path("volumes/bench_512x1024x1024.zarr")
PHANTOM_SHAPE_ZYX = (512, 1024, 1024)
SYSTEMS = {
    "a": "zarr-python",
    "b": "zarrs",
    "c": "tensorstore",
    "d": "torch-tasks",
    "e": "ours",
    "e0": "ours-no-latency",
    "f": "decode-limit",
}
PACKAGES = ("numpy", "torch", "ray", "zarr", "numcodecs", "zarrs", "tensorstore", "obstore")
FIGURES = (
    "patches_s",
    "first_batch_s",
    "bytes_per_patch",
    "rss_anon_bytes",
    "object_store_peak_bytes",
    "ray_start_s",
    "window_s",
)


@dataclass(frozen=True)
class Entry:
    """One line of the table: the command that measures it once, the figures of each repeat, and what went wrong."""

    letter: str
    system: str
    workers: int
    command: tuple[str, ...]
    samples: list[dict[str, float | None]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


# ---- the parent: takes turns


def measure_in_turn(entries: Sequence[Entry], repeats: int, timeout_s: float) -> None:
    """Fill the entries, one process at a time.  An entry that failed is not tried again."""
    for repeat in range(repeats):
        shift = repeat % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            if not entry.errors:
                _measure_once(entry, timeout_s)
                outcome = entry.errors[-1] if entry.errors else f"{entry.samples[-1]['patches_s']:.0f} patches/s"
                print(f"  {repeat + 1}/{repeats} {entry.system}, {entry.workers} workers: {outcome}", file=sys.stderr)


def _measure_once(entry: Entry, timeout_s: float) -> None:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(entry.command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            entry.errors.append(f"no result within {timeout_s:.0f} s")
            return
        finally:  # whatever the measurement left behind, also on Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        last_line = (output.splitlines() or ["it printed nothing"])[-1]
        if process.returncode == 0 and last_line.startswith("{"):
            entry.samples.append(json.loads(last_line))
            return
        log.seek(0)
        sys.stderr.write(log.read())
        entry.errors.append(f"exit code {process.returncode}: {last_line}")


# ---- figures


def make_rows(entries: Sequence[Entry], about: Row) -> list[Row]:
    """One row per entry: medians, ranges, and `ratios` of its patches/s to each other system's at equal workers."""
    rows: list[Row] = []
    for entry in entries:
        row: Row = {"system": entry.system, "letter": entry.letter, "workers": entry.workers, **about}
        row |= {"repeats": len(entry.samples), "missing": "; ".join(entry.errors) or None}
        for name in FIGURES:
            values = [value for sample in entry.samples if (value := sample.get(name)) is not None]
            row[name] = statistics.median(values) if values else None
            row[f"{name}_range"] = [min(values), max(values)] if values else None
        rows.append(row)
    for row in rows:
        row["ratios"] = {
            other["system"]: row["patches_s"] / other["patches_s"]
            for other in rows
            if other is not row and other["workers"] == row["workers"] and other["patches_s"] and row["patches_s"]
        }
    return rows


def print_table(rows: Sequence[Row], reference: str) -> None:
    """A Markdown table; the last column is the ratio of `reference` to each system."""
    heads = ["system", "workers", "patches/s (min-max)", "first batch s", "decoded MB/patch", "RssAnon MiB/worker"]
    heads += ["object store MiB", f"{reference} : system"]
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in rows:
        cells = [f"({row['letter']}) {row['system']}", str(row["workers"])]
        if row["repeats"]:
            low, high = row["patches_s_range"]
            cells += [
                f"{row['patches_s']:.0f} ({low:.0f}-{high:.0f})",
                _cell(row["first_batch_s"], 1, ".1f"),
                _cell(row["bytes_per_patch"], 1e6, ".2f"),
                _cell(row["rss_anon_bytes"], 2**20, ".0f"),
                _cell(row["object_store_peak_bytes"], 2**20, ".0f"),
                _cell(_ratio(rows, reference, row), 1, ".2f"),
            ]
        if row["missing"]:
            cells.append(f"missing: {row['missing']}")
        print(f"| {' | '.join(cells)} |")


def _ratio(rows: Sequence[Row], reference: str, row: Row) -> float | None:
    """`reference` to this row's system at equal workers."""
    of = [r for r in rows if r["system"] == reference and r["workers"] == row["workers"]]
    return of[0]["ratios"].get(row["system"]) if of else None


def _cell(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)


def describe_machine(packages: Sequence[str]) -> Row:
    """CPU, cores, memory, versions.  Reads /proc."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "machine": {"cpu": cpu[0] if cpu else "?", "cores": len(os.sched_getaffinity(0)), "memory_gib": memory[0]},
        "versions": versions,
    }


def print_about(about: Row, repeats: int, seconds: float) -> None:
    """What the table was measured on."""
    machine, patch = about["machine"], "x".join(map(str, about["patch_size"]))
    latency = "" if about["latency_ms"] is None else f", over HTTP with {about['latency_ms']:g} ms of latency"
    cache = "warm" if about["page_cache_warm"] else "as it was"
    print(f"machine   {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.1f} GiB")
    print(f"versions  {', '.join(f'{name} {version}' for name, version in about['versions'].items())}")
    print(f"volume    {about['volume']} level {about['level']}{latency}")
    print(f"measured  patches {patch}, batch {about['batch']}, {repeats} repeats of {seconds:g} s, page cache {cache}")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


# ---- the volume


def ensure_phantom(path: Path) -> None:
    """Write the phantom where there is none: about a minute, 400 MB."""
    if path.exists():
        return
    from vesuvius.volume_tools.phantom_zarr import write_phantom

    print(f"writing the phantom {path}, once ...", file=sys.stderr)
    write_phantom(path, PHANTOM_SHAPE_ZYX, seed=0, levels=1)


def warm_page_cache(folder: Path) -> bool:
    """Read all files below `folder`; False, having read nothing more, where they exceed a third of the memory."""
    left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3
    for file in filter(Path.is_file, folder.rglob("*")):
        left -= file.stat().st_size
        if left < 0:
            return False
        file.read_bytes()
    return True


@contextlib.contextmanager
def served(folder: Path, latency_ms: float) -> Iterator[str]:
    """`folder` behind HTTP for the length of the `with`; its address."""
    command = [
        sys.executable,
        str(TOOLS / "chunk_server.py"),
        str(folder),
        "--latency-ms",
        str(latency_ms),
        "--with-parent",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"the chunk server must start; its exit code is {server.wait()}; see above for why")
            yield address
        finally:
            server.terminate()


# ---- the command


def add_options(parser: argparse.ArgumentParser, systems: dict[str, str], workers: tuple[int, ...]) -> None:
    """Options that `bench_peers.py` has too."""
    parser.add_argument("--volume", type=Path, default=PHANTOM, help="zarr group or array on disk (a phantom)")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--patch", type=_triple, default=(72, 136, 136), metavar="Z,Y,X")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=_numbers, default=workers, metavar="N,...")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="least length of a window")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one measurement")
    parser.add_argument("--systems", type=_letters, default=[*systems], metavar=",".join(systems))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="one repeat, the last of --workers, windows of 2 s")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one system, once, in this process
    parser.add_argument("--url", help=argparse.SUPPRESS)


def parse(parser: argparse.ArgumentParser, systems: dict[str, str]) -> argparse.Namespace:
    """The command line, --quick applied."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.seconds, arguments.workers = 1, 2.0, arguments.workers[-1:]
    if unknown := set(arguments.systems) - set(systems):
        parser.error(f"--systems must be of {', '.join(systems)}; got {', '.join(sorted(unknown))}")
    return arguments


def _letters(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _triple(text: str) -> Triple:
    z, y, x = _numbers(text)
    return z, y, x


def make_entries(
    script: str, arguments: argparse.Namespace, systems: dict[str, str], urls: dict[str, str]
) -> list[Entry]:
    """One entry per number of workers and system that was asked for; each runs `script --measure`."""
    options = {
        "volume": arguments.volume,
        "level": arguments.level,
        "patch": ",".join(map(str, arguments.patch)),
        "batch": arguments.batch,
        "seconds": arguments.seconds,
    }
    common = [sys.executable, script, *(f"--{name}={value}" for name, value in options.items())]
    return [
        Entry(
            letter,
            systems[letter],
            workers,
            (*common, f"--measure={systems[letter]}", f"--workers={workers}", f"--url={url}"),
        )
        for workers in arguments.workers
        for letter, url in urls.items()
        if letter in arguments.systems
    ]


def report(arguments: argparse.Namespace, entries: Sequence[Entry], reference: str, packages: Sequence[str]) -> int:
    """Measure, print, write; the exit code: 1 where every system failed."""
    about: Row = {
        "volume": str(arguments.volume),
        "level": arguments.level,
        "patch_size": arguments.patch,
        "batch": arguments.batch,
        "latency_ms": getattr(arguments, "latency_ms", None),
        "page_cache_warm": warm_page_cache(arguments.volume),
        **describe_machine(packages),
    }
    measure_in_turn(entries, arguments.repeats, arguments.timeout)
    rows = make_rows(entries, about)
    print_about(about, arguments.repeats, arguments.seconds)
    print_table(rows, reference)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if any(row["repeats"] for row in rows) else 1


def measure_here(arguments: argparse.Namespace, measure: Callable[[str, Setup], Any]) -> int:
    """The child: one measurement, then a line of JSON, or one that says what went wrong; the exit code."""
    from bench_systems import Setup

    setup = Setup(
        volume=arguments.url,
        local_volume=str(arguments.volume),
        level=arguments.level,
        patch_zyx=arguments.patch,
        batch=arguments.batch,
        workers=arguments.workers[0],
        seconds=arguments.seconds,
    )
    try:
        print(json.dumps(measure(arguments.measure, setup)))
    except Exception as error:
        traceback.print_exc()
        # An error of a DataLoader's worker has its own traceback for a message; the cause is its last line.
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300])
        return 1
    return 0


def volume_urls(arguments: argparse.Namespace, servers: contextlib.ExitStack) -> dict[str, str]:
    """What each system, by letter, opens: the volume's path, or with a latency its address on a server."""
    path = arguments.volume.resolve()
    if arguments.latency_ms is None:
        return {letter: str(path) for letter in SYSTEMS if letter != "e0"}
    slow, fast = (servers.enter_context(served(path.parent, latency)) for latency in (arguments.latency_ms, 0.0))
    return {letter: f"{fast if letter == 'e0' else slow}/{path.name}" for letter in SYSTEMS}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, SYSTEMS, workers=(1, 2))
    parser.add_argument("--latency-ms", type=float, help="serve the volume over HTTP with this latency per request")
    arguments = parse(parser, SYSTEMS)
    if arguments.measure:
        from bench_systems import measure

        return measure_here(arguments, measure)
    if arguments.volume == PHANTOM:
        ensure_phantom(arguments.volume)
    with contextlib.ExitStack() as servers:
        entries = make_entries(__file__, arguments, SYSTEMS, volume_urls(arguments, servers))
        return report(arguments, entries, "ours", PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
