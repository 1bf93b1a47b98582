"""`vesuvius evaluate`: from a checkpoint, or samples of any program, to a folder with figures, pictures and a page."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vesuvius.config import ArrayConfig, AugmentConfig, Triple
from vesuvius.errors import ConfigError
from vesuvius.generate.described import check_volume, run_of
from vesuvius.generate.evaluate.figures import Judgement, judge
from vesuvius.generate.evaluate.memorisation import TrainingSearch
from vesuvius.generate.evaluate.page import SHOWN, build_page, figure_table, montage_cells, plain, seam_table, verdict
from vesuvius.generate.evaluate.patches import (
    GeneratedPatches,
    PatchSet,
    RealPatches,
    RealSource,
    cut_generated,
    generated_set,
    open_generated,
    qualifying,
)
from vesuvius.generate.evaluate.seams import Seam, face_planes, plane_differences, seam_statistics
from vesuvius.generate.sample_zarr import SAMPLE, SAMPLES, published_when_whole
from vesuvius.generate.sampling import SampleRequest, default_out, describe, draw_samples
from vesuvius.generate.volume.output import DRAWING
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.generate.watch import OnProgress
from vesuvius.report.content import Picture, Table
from vesuvius.report.page import FOLDER, new_folder, write_pages
from vesuvius.runlog.units import format_duration, format_percent, format_sizes
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights, read_checkpoint_info
from vesuvius.training.validation.charts import draw_charts
from vesuvius.training.validation.montage import draw_grid, magnification
from vesuvius.volume_tools.partial import finished_record
from vesuvius.volumes.box import moved, shape_of, shifted, triple
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

NAME = "evaluation"
_COLUMNS = 8
_UNTURNED = AugmentConfig(flip=False, turn=False)


@dataclass(frozen=True)
class EvaluationRequest:
    """What is asked for."""

    run: Path  # as `find_checkpoint` takes it
    weights: str
    # overrides, weights, seed, batch_size: of samples that are drawn, as in `SampleRequest`
    overrides: tuple[str, ...]
    count: int  # generated patches, and real ones of each kind
    seed: int
    batch_size: int
    generated: Path | None  # samples that are there already; None = they are cut from `volume`, or drawn
    training_volume: int  # whose grey values generated patches have
    volume: Path | None  # a volume drawn by `vesuvius sample`, for its seams, and for patches without `generated`
    out: Path | None  # the folder to write; None = a new one in the run's reports/
    classifier_steps: int  # of each of the two classifiers
    command: str  # for the page


def evaluate(request: EvaluationRequest, on_step: OnProgress = lambda what, done, total: None) -> tuple[Path, str]:
    """Judge a trained model and write the folder.

    Args:
        on_step: as in `draw_samples`.

    Returns:
        The folder, and the table for the terminal.

    Raises:
        ConfigError: what is asked for does not fit the run, or nothing is held out.
        DataError: volumes cannot be read.
        StorageError, and what `draw_samples` raises: as they say; no folder is left.
    """
    info = read_checkpoint_info(find_checkpoint(request.run, "RUN"), request.overrides)
    _check(request, info)
    config = info.config
    own = config.has_condition or info.data.scalars.shape[1] > 0
    number = request.training_volume if own or len(config.data.volumes) == 1 else None
    facts, grey = info.data.volumes[request.training_volume], info.data.greys.volumes[request.training_volume]
    source = RealSource(config.seed, config.data, number, info.data.greys.volumes, (grey, facts.dtype))
    patch = config.data.patch_size
    place_of = 0 if number is not None else request.training_volume  # among the volumes of `source`
    condition = source.data.conditions[place_of].name if config.has_condition else None
    count, found, path = request.count, None, request.generated
    with ExitStack() as opened:
        tiled = None if request.volume is None else opened.enter_context(_TiledVolume(request.volume, patch))
        if path is not None:
            found = open_generated(path, patch, count, condition)
        elif tiled is not None:
            path, found = tiled.path, tiled.cut(patch, count, condition, source.data, place_of)
        started = time.monotonic()
        real = source.read(count if found is None else len(found.stored))  # before samples are drawn for minutes
        reading_s = time.monotonic() - started
        if found is None:
            path = _samples(request, info, on_step)
            found = open_generated(path, patch, count, condition)
        started = time.monotonic()
        seams = [] if tiled is None else tiled.seams(source.data.volumes[place_of])
    found = qualifying(found, source, place_of)
    halves = None if found.starts_zyx is None else [source.half_of(place_of, start) for start in found.starts_zyx]
    augment, oriented = config.data.augment, config.has_condition or found.places is not None
    generated = generated_set(found, grey, facts.dtype, halves, augment if oriented else _UNTURNED)
    search = TrainingSearch(real.searched, config.data.patch_size, config.data.augment)
    judgement = judge(generated, real.held_out, real.training, real.sides, search, request.classifier_steps)
    seconds = reading_s + time.monotonic() - started
    notes = _notes(generated, real, search, config.has_condition)
    if found.places is not None and (augment.contrast or augment.brightness):
        notes.append(
            "Training varies contrast or brightness from patch to patch, and a volume is one draw of them: its grey "
            "values and the standard deviation of patch means differ from those of real patches also if the model is "
            "perfect."
        )
    described = {
        "checkpoint": str(info.checkpoint),
        "step": str(info.step),
        "generated": f"{len(generated)} from {path}",
        "held out": f"{len(real.held_out)}",
        "training": f"{len(real.training)}; for the classifier {len(real.sides[0])} and {len(real.sides[1])}",
        "patch": format_sizes(config.data.patch_size),
        "time without sampling": format_duration(seconds),
    } | ({} if request.volume is None else {"tiled volume": str(request.volume)})
    report = build_page(f"{config.name}: evaluation", str(info.checkpoint), described, judgement, seams, notes)
    folder = request.out or new_folder(run_of(info.checkpoint) / FOLDER)
    with published_when_whole(folder, "evaluations") as staged:
        record = {"facts": described, "notes": notes, "seconds": seconds} | plain(judgement, seams)
        (staged / f"{NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
        first = generated.values[:SHOWN]
        if found.starts_zyx is not None or found.labels is not None:  # beside its label, which is not turned
            first = generated_set(
                replace(found, stored=found.stored[:SHOWN]), grey, facts.dtype, None, _UNTURNED
            ).values
        rows = _rows(source, place_of, found, first, real.held_out, config.data.labels)
        picture = _pictures(staged, rows, judgement, config.name)
        made = f"Made {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by: {request.command}"
        write_pages(staged, NAME, [report], made, [picture])
    tables = [figure_table(judgement.figures), *([seam_table(seams)] if seams else [])]
    text = "\n".join(map(_terminal, tables)) + f"\n{verdict(judgement, [seam for seam, _ in seams])}"
    return folder, text


def _check(request: EvaluationRequest, info: CheckpointInfo) -> None:
    if request.generated is None and request.volume is None:
        check_weights(info.checkpoint, request.weights)
    check_volume(info, request.training_volume, "--training-volume")
    if request.out is not None and os.path.lexists(request.out):
        raise ConfigError(
            f"an evaluation does not replace files; got {request.out}, which exists; choose another --out"
        )


def _samples(request: EvaluationRequest, info: CheckpointInfo, on_step: OnProgress) -> Path:
    """Draw samples, or find those that an evaluation has drawn with the same arguments."""
    asked = SampleRequest(
        checkpoint=info.checkpoint,
        weights=request.weights,
        overrides=request.overrides,
        seed=request.seed,
        batch_size=min(request.batch_size, request.count),
        volume=request.training_volume,
        count=request.count,
        out=None,
        overwrite=False,
    )
    place = default_out(asked, info)
    out = place.with_name(f"{place.name}_{request.count}")
    if out.exists():
        wanted = describe(asked, info, "off", 0)
        there = finished_record(out / SAMPLES, SAMPLE) or {}
        differing = [k for k in wanted if k not in ("amp", "evaluations_per_sample") and there.get(k) != wanted[k]]
        if differing:
            raise ConfigError(
                f"existing samples are reused only if they were drawn with the same arguments; got "
                f"{out} with a different {differing[0]}; remove it, or name other samples with --generated"
            )
        log.info("using the existing samples: %s", out)
        return out
    draw_samples(replace(asked, out=out), on_step)
    return out


class _TiledVolume(AbstractContextManager["_TiledVolume"]):
    """A volume that `vesuvius sample` has drawn, with its tiles."""

    def __init__(self, path: Path, patch_zyx: Triple) -> None:
        """Raises ConfigError where its tiles are not known, and DataError."""
        record = finished_record(path, DRAWING)
        if not isinstance(record, dict) or not {"shape_zyx", "overlap"} <= record.keys():
            raise ConfigError(
                f"--volume must be drawn by `vesuvius sample --shape`, whose record says where the tiles are; got "
                f"{path}, which has none; name another"
            )
        tiling = Tiling(triple(record["shape_zyx"]), triple(record.get("patch_zyx", patch_zyx)), record["overlap"])
        self._faces = [
            face_planes(starts, patch) for starts, patch in zip(tiling.starts, tiling.patch_zyx, strict=True)
        ]
        self.path, self._record = path, record
        self._first_zyx: Triple = tuple((record.get("box") or [[0, 0, 0]])[0])
        self._volume = open_volume(ArrayConfig(path=str(path)))

    def __exit__(self, *_: object) -> None:
        self._volume.close()

    def cut(
        self, patch_zyx: Triple, count: int, condition: str | None, data: PreparedData, number: int
    ) -> GeneratedPatches:
        """Patches of it.  Raises ConfigError and DataError.

        Args:
            condition: name of the training's condition, which is that of volume `number` of `data`.
        """
        shown, first = (self._record.get("given") or {}).get("condition", [None])[0], None
        if condition is not None and shown == condition:
            first = moved(self._first_zyx, map(int, data.array("condition", number)[1].offsets))
        return cut_generated(self._volume, patch_zyx, count, first)

    def seams(self, real: Volume) -> list[tuple[Seam, Seam | None]]:
        """The statistic along each axis, beside that of the same planes of a real volume.  Raises DataError."""
        drawn, first = self._volume, self._first_zyx
        found = seam_statistics(plane_differences(drawn.read, drawn.shape_zyx), self._faces)
        if any(lo >= size for lo, size in zip(first, real.shape_zyx, strict=True)):  # a box of another volume
            first = (0, 0, 0)
        shape = triple(map(min, drawn.shape_zyx, shape_of((first, real.shape_zyx))))
        differences = plane_differences(lambda box: real.read(shifted(box, first)), shape)
        beside = {seam.axis: seam for seam in seam_statistics(differences, self._faces)}
        return [(seam, beside.get(seam.axis)) for seam in found]


def _notes(generated: PatchSet, real: RealPatches, search: TrainingSearch, conditional: bool) -> list[str]:
    share = min(1.0, search.voxels / real.training_voxels)
    notes = [
        f"Nearest places of training were looked for in {format_percent(share)} of the training voxels, at every shift "
        "and in every symmetry that training draws. A sample counts as a copy where its distance is below half of that "
        "which 5 % of held-out patches are below."
    ]
    if real.side_by_side < len(real.held_out):
        notes.append(
            f"Held-out voxels hold {real.side_by_side} patches side by side; {len(real.held_out)} overlapping ones "
            "were compared. All intervals rest on that little."
        )
    if conditional and generated.half is None:
        notes.append(
            "The places of the conditions of these samples are not known. If they are held-out ones, the AUC may be "
            "too low."
        )
    return notes


def _rows(
    source: RealSource,
    number: int,
    found: GeneratedPatches,
    generated: NDArray[np.float32],
    held_out: PatchSet,
    classes: tuple[int, ...] | None,
) -> dict[str, NDArray[np.float32]]:
    """Patches for the montage: generated and real ones, of the same places where these are known, and their labels."""
    rows, starts = {"generated": generated}, (found.starts_zyx or [])[:SHOWN]
    rows["real"] = source.values_at(number, starts) if starts else held_out.values[:SHOWN]
    labels = found.labels
    if labels is None and starts:
        labels = source.labels_at(number, starts)
    if labels is not None:
        shown = np.asarray(labels[:SHOWN], np.float32)
        low, high = (min(classes), max(classes)) if classes else (shown.min(), shown.max())
        rows["label"] = (2 * (shown - low) / max(high - low, 1e-9) - 1).astype(np.float32)
    return rows


def _pictures(folder: Path, rows: dict[str, NDArray[np.float32]], judgement: Judgement, name: str) -> Picture:
    """Write montage.png and curves.png; the montage for the page."""
    scale = magnification(rows["real"].shape[1:])
    kinds = " / ".join(rows)
    montage = draw_grid(montage_cells(rows, scale, _COLUMNS), f"{name}: {kinds}, middle slices across z", _COLUMNS)
    montage.save(folder / "montage.png", format="PNG")
    curves = draw_charts(1080, judgement.textures["generated"], judgement.textures["held_out"])
    Image.fromarray(curves).save(folder / "curves.png", format="PNG")
    small = io.BytesIO()
    montage.convert("RGB").save(small, format="JPEG", quality=85, optimize=True)
    return Picture(f"Rows of patches by turns: {kinds}; middle slices across z", small.getvalue())


def _terminal(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, *lines, ""])
