"""What `vesuvius volume` prints: facts and figures in, text out.  Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel

from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.copy import CopyFigures
from vesuvius.volume_tools.grey_statistics import PERCENTILES, GreyStatistics
from vesuvius.volume_tools.info import LevelFacts, Occupancy, SidecarFacts, VolumeFacts
from vesuvius.volume_tools.phantom_zarr import LEVELS, PhantomReport
from vesuvius.volume_tools.verify import VerifyFigures
from vesuvius.volumes.alignment import Alignment, geometry_words
from vesuvius.volumes.box import format_box
from vesuvius.volumes.format.axes import spatial
from vesuvius.volumes.geometry import Geometry
from vesuvius.volumes.volume import Volume

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def synth_text(report: PhantomReport) -> str:
    """One line about a phantom that was written."""
    shape = ",".join(str(size) for size in report.shape_zyx)
    return (
        f"{report.path} (sheets: {report.labels_path.name}) shape {shape} levels {LEVELS} "
        f"stored_mib {report.stored_bytes / 2**20:.1f} seconds {report.seconds:.1f}"
    )


def info_json(facts: VolumeFacts) -> str:
    """All facts; null = unknown."""
    return json.dumps(asdict(facts), indent=2, default=_plain)


def info_text(facts: VolumeFacts) -> str:
    """All facts, for a person."""
    lines = [_title(facts), "", *_level_table(facts)]
    lines += [f"  {path}: cannot be opened: {reason}" for path, reason in facts.broken]
    lines += ["", f"level {facts.chosen.level}", *_rows(_level_rows(facts))]
    lines += ["", f"patches of {format_sizes(facts.patch_zyx)}", *_rows(_patch_rows(facts))]
    if facts.region:
        lines += ["", f"`vesuvius init {facts.spec.path}` writes a config for it"]
    return "\n".join(lines)


def alignment_text(volume: Volume, array: Volume, found: Alignment) -> str:
    """How an array lies in a volume."""
    rows = [
        (volume.name, geometry_words(volume)),
        (array.name, geometry_words(array)),
        ("known from", found.caveat or "scale and translation"),
        ("voxels covered by one", " x ".join(map(str, found.factors))),
        (
            "its first voxel at",
            ", ".join(f"{axis} {offset}" for axis, offset in zip("zyx", found.offsets, strict=True)),
        ),
        ("both exist in", f"{format_box(found.covered)}, of {found.volume_zyx}"),
    ]
    return "\n".join(_rows(rows))


def alignment_json(found: Alignment) -> str:
    """The same for programs; factors and offsets in voxels of the volume."""
    facts = asdict(found) | {"covered": found.covered}
    return json.dumps(facts, indent=2, default=float)


def sidecar_text(facts: SidecarFacts) -> str:
    """A sidecar that was written."""
    return f"{facts.path}: grid {format_sizes(facts.grid_zyx)}, {_stored(facts.occupancy)}"


def copy_line(figures: CopyFigures) -> str:
    """How a copy goes."""
    failed = f"{len(figures.failures)} FAILED, " if figures.failures else ""
    return f"{failed}{_rates(figures)}"


def _rates(figures: CopyFigures) -> str:
    """Megabytes per second of voxels, and of what came over the network."""
    seconds = max(figures.seconds, 1e-3)
    rates = f"{figures.raw_bytes / 1e6 / seconds:.1f} MB/s of voxels"
    if figures.fetched_bytes is None:
        return rates
    return f"{rates}, {figures.fetched_bytes / 1e6 / seconds:.1f} MB/s fetched"


def copy_text(figures: CopyFigures, out: Path, source: str) -> str:
    """A copy that has ended, whole or not."""
    head = f"{out}: box {format_box(figures.source_box)} of {source}"
    if figures.before == figures.chunks and not figures.seconds:
        return f"{head}\n  is already there and complete: nothing was done"
    before = f"; {figures.before} were done earlier" if figures.before else ""
    fetched = "" if figures.fetched_bytes is None else f"{_bytes(figures.fetched_bytes)} fetched, "
    rows = [
        ("chunks", f"{figures.written} written, {figures.air} air, {len(figures.failures)} failed{before}"),
        ("bytes", f"{_bytes(figures.raw_bytes)} of voxels, {fetched}{_bytes(figures.stored_bytes)} stored"),
        ("time", f"{figures.seconds:.1f} s, {_rates(figures)}"),
    ]
    return "\n".join([head, *_rows(rows)])


def verify_json(figures: VerifyFigures) -> str:
    """A verification that has ended."""
    return json.dumps(asdict(figures), indent=2)


def verify_line(figures: VerifyFigures) -> str:
    """How a verification goes."""
    return f"{figures.chunks} chunks read, {len(figures.broken)} broken"


def verify_text(figures: VerifyFigures) -> str:
    """A verification that has ended: what is broken, a line each."""
    since = (
        time.strftime(", since %Y-%m-%d %H:%M", time.localtime(figures.before_since)) if figures.before_since else ""
    )
    before = f" ({figures.before} of {figures.objects} objects by earlier processes{since})" if figures.before else ""
    head = f"{figures.volume}: {figures.chunks} chunks read{before} in {figures.seconds:.1f} s"
    if not figures.broken:
        return f"{head}: all are intact"
    rows = [(f"chunk {list(b.chunk)}", f"{b.key}, voxels {format_box(b.box)}: {b.cause}") for b in figures.broken]
    return "\n".join([f"{head}: {len(figures.broken)} are broken; restore them from their source", *_rows(rows)])


def _title(facts: VolumeFacts) -> str:
    kind = f"OME-Zarr {facts.ome_version or '?'}" if facts.chosen.path else "bare array"
    title = f" {facts.title!r}" if facts.title else ""
    axes = ", ".join(name or "(no name)" for name in facts.axes) if facts.axes else "not named"
    if not facts.axes or not spatial(facts.axes):
        axes += ", the last three taken as z, y, x" if len(facts.chosen.shape) > 3 else ", taken as z, y, x"
    return f"{facts.spec.path}: {kind}{title}, zarr v{facts.chosen.zarr_format}, axes {axes}"


def _level_table(facts: VolumeFacts) -> list[str]:
    header = ("", "level", "path", "shape", "chunk", "shard", "dtype", "raw", "voxel size")
    rows = [header, *(_level_cells(level, facts.chosen) for level in facts.levels)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _level_cells(level: LevelFacts, chosen: LevelFacts) -> tuple[str, ...]:
    return (
        "*" if level.level == chosen.level else "",
        str(level.level),
        level.path or "-",
        format_sizes(level.shape),
        format_sizes(level.chunk_zyx),
        format_sizes(level.shard_zyx) if level.shard_zyx else "-",
        level.dtype,
        _bytes(level.raw_bytes),
        _voxel_size(level.geometry),
    )


def _level_rows(facts: VolumeFacts) -> Iterator[tuple[str, str]]:
    yield "codec", facts.chosen.codec
    corner = _corner(facts.chosen)
    if corner:
        yield "corner", corner
    occupancy = facts.occupancy
    yield "stored", _stored(occupancy)
    if facts.grey is not None and facts.grey.tried is not None:
        yield "", f"of {facts.grey.tried} chunks asked for at random {facts.grey.found} are stored"
    if facts.grey is not None:
        yield from _grey_rows(facts.grey)


def _grey_rows(grey: GreyStatistics) -> Iterator[tuple[str, str]]:
    unreadable = f"; {grey.unreadable} more could not be read" if grey.unreadable else ""
    places = "1 random stored box" if grey.places == 1 else f"{grey.places} random stored boxes"
    where = f"{grey.voxels / 1e6:.1f} M voxels at {places}{unreadable}"
    if grey.mean is None or grey.std is None or grey.percentiles is None or grey.air_share is None:
        yield "grey values", f"unknown: only air in {where}"
        return
    yield (
        "grey values",
        f"{grey.minimum:g} to {grey.maximum:g}, mean {grey.mean:.1f}, standard deviation {grey.std:.1f}",
    )
    yield "percentiles", ", ".join(f"{p:g} %: {v:g}" for p, v in zip(PERCENTILES, grey.percentiles, strict=True))
    yield "", f"of {where}; {_percent(grey.air_share)} are air and left out"


def _patch_rows(facts: VolumeFacts) -> Iterator[tuple[str, str]]:
    if facts.region is None:
        yield "in regions", f"none: {facts.no_region}"
        return
    region = facts.region
    yield (
        "in regions",
        f"{region.amplification:.2f} bytes decoded per byte of patch, with {region.patches_per_region} patches (K) "
        f"from each of {region.regions} regions",
    )
    yield (
        "",
        f"of up to {format_sizes(region.region_zyx)} voxels, {region.regions_in_flight} regions (M) mixed at a time",
    )
    yield (
        "memory",
        f"{_bytes(region.regions_bytes)} for the M decoded regions, plus the readers and their prefetched blocks",
    )


def _stored(occupancy: Occupancy) -> str:
    if occupancy.present is None:
        return f"unknown: {occupancy.unknown}"
    share = _percent(occupancy.present / occupancy.total)
    return f"{occupancy.present} of {occupancy.total} {occupancy.unit} ({share}), from a {occupancy.source}"


def _voxel_size(geometry: Geometry | None) -> str:
    if geometry is None:
        return "unknown"
    sizes = [f"{size:g}" for size in geometry.scale_zyx]
    return " ".join(["x".join(sizes) if len(set(sizes)) > 1 else sizes[0], *_unit(geometry)])


def _corner(level: LevelFacts) -> str | None:
    """Where the level begins, unless at 0."""
    if level.geometry is None or not any(level.geometry.translation_zyx):
        return None
    parts = [f"{axis} {offset:g}" for axis, offset in zip("zyx", level.geometry.translation_zyx, strict=True)]
    return " ".join([", ".join(parts), *_unit(level.geometry)])


def _unit(geometry: Geometry) -> list[str]:
    units = {unit for unit in geometry.units_zyx if unit}
    return [next(iter(units))] if len(units) == 1 else [f"{geometry.units_zyx}"] if units else ["of no unit"]


def _rows(rows: Sequence[tuple[str, str]] | Iterator[tuple[str, str]]) -> list[str]:
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs)
    return [f"  {name.ljust(width)}  {text}" for name, text in pairs]


def _percent(share: float) -> str:
    """A share that is neither 0 nor 1 is not rounded to it."""
    text = f"{100 * share:.1f} %"
    return "below 0.1 %" if share and text == "0.0 %" else "above 99.9 %" if share < 1 and text == "100.0 %" else text


def _bytes(size: int) -> str:
    return next((f"{size / unit:.1f} {name}" for unit, name in _UNITS if size >= unit), f"{size} B")


def _plain(value: object) -> object:
    assert isinstance(value, BaseModel)
    return value.model_dump()
