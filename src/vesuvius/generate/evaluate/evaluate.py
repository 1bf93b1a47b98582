"""`vesuvius evaluate`: from a checkpoint, or the samples of any program, to a folder with metrics and a page."""

import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.generate.common import base_record, check_volume, run_directory
from vesuvius.generate.evaluate.metrics import COPIES, Comparison, Metric, compare
from vesuvius.generate.evaluate.patches import RealSource, generated_set, open_array, open_generated
from vesuvius.generate.sample_zarr import SAMPLE, SAMPLES, atomic_directory, check_target
from vesuvius.generate.sampling import SampleRequest, default_out, generate_samples
from vesuvius.plan.make_plan import Split
from vesuvius.predict.progress import OnProgress
from vesuvius.report import page
from vesuvius.report.curves import COLORS, Chart, banded, chart
from vesuvius.report.page import FAIL, PASS, Bar, Bars, Picture, RunReport, Table
from vesuvius.runlog.records import replace_nonfinite
from vesuvius.runlog.units import format_percent, format_sizes
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights, read_checkpoint_info
from vesuvius.training.validation.pictures import MontageCell, Scale, draw_grid, middle_slice
from vesuvius.training.validation.texture import HISTOGRAM_EDGES
from vesuvius.volume_tools.partial import check_record, finished_record
from vesuvius.volumes.geometry import FloatTriple

log = logging.getLogger(__name__)

NAME = "evaluation"
_COLUMNS = 8
_SHOWN = 24
_NAMES = {"generated": "generated", "held_out": "held out", "training": "training"}

_HOW = (
    "Generated patches are compared with held-out ones, which training never saw. The floor is the same comparison "
    "with training patches instead of generated ones: a perfect model reaches it. Real patches are mirrored and "
    "rotated as in training. p: probability that some metric of a family is as far off if patches are swapped at "
    "random (overlapping ones together). A metric differs from real if p is below 5 %: so some metric does in about "
    "one of four tables of a perfect model. Metrics that cannot be measured are unknown. Chords and sheets are in "
    "voxels, the Euler number is per million voxels; the std of patch means is in model values; the change at patch "
    "borders is relative to that inside (1 = equal). Distances: Wasserstein between histograms of model values and "
    "between chords; dB between power spectra; between two-point correlations; for copies, the difference of the "
    "shares. KID is around 0 for equal sets (also below), the Frechet distance at its floor; more is worse. "
    "AUCs are lower bounds: a better classifier may find more."
)
_SEARCHED = (
    "The nearest training patches were searched for in {} of the training voxels, at every shift and in every symmetry "
    "used in training. A sample counts as a copy if its distance is below half of the 5th percentile of held-out "
    "patches."
)
_NO_PLACES = (
    "The positions of the conditions of these samples are unknown, so the classifiers test them against training and "
    "held-out patches, and the smaller AUC counts."
)


def evaluate(
    asked: SampleRequest,
    path: Path | None,
    out: Path | None,
    classifier_steps: Sequence[int],
    command: str,
    on_step: OnProgress = lambda what, done, total: None,
) -> tuple[Path, str]:
    """Evaluate a trained model and write the folder; returns it and the table for the terminal.

    `asked` has the checkpoint, the sampler and the number of patches of each kind; `path` existing samples or a volume
    (None = generate samples).  Writes `out` (None = a new folder in the run's reports/), whose page shows `command`.
    Raises ConfigError, DataError, StorageError, and the errors of `generate_samples`: no folder is left.
    """
    info = read_checkpoint_info(find_checkpoint(asked.checkpoint, "RUN"), asked.overrides)
    if path is None:
        check_weights(info.checkpoint, asked.weights)
    check_volume(info, asked.volume_index, "--training-volume")
    if out is not None:
        check_target(out)
    config = info.config
    number = asked.volume_index if config.has_condition or len(config.data.volumes) == 1 else None
    facts, intensity = info.data.volumes[asked.volume_index], info.data.intensities.volumes[asked.volume_index]
    splits = [Split(volume.train, volume.validation) for volume in info.data.volumes]
    stored_as = (intensity, facts.dtype)
    source = RealSource(config.seed, config.data, number, info.data.intensities.volumes, stored_as, splits)
    place_of = 0 if number is not None else asked.volume_index  # among the volumes of `source`
    condition = source.data.conditions[place_of].name if config.has_condition else None
    where = (config.data.patch_size, asked.count, condition, place_of)
    count = asked.count if path is None else len(open_generated(path, *where))
    real = source.read(count)  # before samples are drawn for minutes
    path = path or _samples(replace(asked, checkpoint=info.checkpoint), info, on_step)
    generated = generated_set(open_generated(path, *where), source, config.has_condition)
    volume = open_array(path) if generated.is_cut else None
    unknown = config.has_condition and not generated.is_conditional
    comparison = compare(generated, real, source.data.plan.augment, classifier_steps, volume, from_anywhere=unknown)
    searched = sum(region.size for region in real.searched) / real.training_voxels
    caveats = [_NO_PLACES] * unknown
    notes = [_SEARCHED.format(format_percent(min(1.0, searched))), *caveats]
    described = {
        "checkpoint": str(info.checkpoint),
        "step": str(info.step),
        "generated": f"{len(generated)} from {path}",
        "held out": f"{len(real.held_out)}",
        "training": f"{min(len(real.training), len(generated))}; for the classifier "
        f"{len(real.sides[0])} and {len(real.sides[1])}",
        "patch": format_sizes(config.data.patch_size),
    }
    report = evaluation_page(config.name, str(info.checkpoint), described, comparison, notes)
    folder = out or page.new_folder(run_directory(info.checkpoint) / page.FOLDER)
    with atomic_directory(folder, "evaluations") as staged:
        record = {"facts": described, "notes": notes} | plain(comparison)
        (staged / f"{NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
        rows = {"generated": generated.values, "real": real.held_out.values}
        picture = _montage(staged, rows, config.name, info.data.volumes[asked.volume_index].voxel_size_um)
        page.write_page(staged, NAME, page.render_html([report], page.made_by(command), [picture]))
    return folder, "\n".join((f"{report.tables[0].text}\n", report.headline, *caveats))


def evaluation_page(
    name: str, directory: str, facts: Mapping[str, str], comparison: Comparison, notes: Sequence[str]
) -> RunReport:
    differs = {metric.differs for metric in comparison.metrics}
    return RunReport(
        name=f"{name}: evaluation",
        directory=directory,
        headline=verdict(comparison),
        tone="bad" if True in differs else "good" if False in differs else "",
        facts=facts,
        highlights=("step", "held out", "patch"),
        bars=_bars(comparison.metrics),
        charts=tuple(_charts(comparison)),
        tables=(replace(metric_table(comparison.metrics), note="  ".join([_HOW, *notes])),),
    )


def _samples(asked: SampleRequest, info: CheckpointInfo, on_step: OnProgress) -> Path:
    """Generate samples, or reuse those of an earlier evaluation with the same arguments."""
    asked = replace(asked, batch_size=min(asked.batch_size, asked.count))
    default = default_out(asked, info)
    out = default.with_name(f"{default.name}_{asked.count}")
    if not out.exists():
        generate_samples(replace(asked, out=out), on_step)
        return out
    wanted = {"numbers": [*range(asked.count)], **base_record(info, asked)}
    check_record(out, finished_record(out / SAMPLES, SAMPLE), wanted)
    log.info("Using existing samples: %s", out)
    return out


def _montage(
    folder: Path, rows: dict[str, NDArray[np.float32]], name: str, voxel_size_um: FloatTriple | None
) -> Picture:
    """Write montage.png with middle slices of the first patches of each set in alternating rows; also for the page."""
    scale, kinds = Scale.of_patch(rows["real"].shape[1:], voxel_size_um), " / ".join(rows)
    count = min(_SHOWN, *map(len, rows.values())) // _COLUMNS * _COLUMNS
    cells = [
        MontageCell(f"{kind} {number}", middle_slice(patches[number], scale))
        for first in range(0, count, _COLUMNS)
        for kind, patches in rows.items()
        for number in range(first, first + _COLUMNS)
    ]
    title = f"{name}: {kinds} patches in alternating rows, middle slices across z"
    montage = draw_grid(cells, title, scale, _COLUMNS)
    montage.save(folder / "montage.png", format="PNG")
    small = io.BytesIO()
    montage.convert("RGB").save(small, format="JPEG", quality=85, optimize=True)
    return Picture(title, small.getvalue())


def verdict(comparison: Comparison) -> str:
    """The result in one or two sentences: how many metrics fail and which, and whether training voxels are repeated."""
    metrics = comparison.metrics
    failed, unknown = ([m.name.partition(",")[0] for m in metrics if m.differs is differs] for differs in (True, None))
    measured = len(metrics) - len(unknown)
    found = f"Generated patches pass all {measured} metrics" if measured else "No metric could be measured"
    if failed:
        found = f"Generated patches fail {len(failed)} of {measured} metrics: {', '.join(failed)}"
    found += f" (unknown: {', '.join(unknown)})." if unknown else "."
    copies = next(metric for metric in metrics if metric.key == COPIES)
    if copies.differs:
        shares = "{generated:.0%} of the samples repeat training voxels ({held_out:.0%} by chance)"
        return f"{found} Memorized: {shares.format(**copies.values)}."
    if copies.differs is None:
        return f"{found} Whether training voxels are memorized is unknown: too few patches have texture."
    return f"{found} No sign of memorization in the training voxels that were searched."


def _bars(metrics: Sequence[Metric]) -> Bars:
    bars = []
    for metric in metrics:
        # a distance with an interval may be 0 or negative for training patches
        ratio = abs(metric.distance / metric.floor) if metric.floor and metric.interval is None else math.nan
        if metric.differs is not None and math.isfinite(ratio):
            sign, color = (FAIL, COLORS["data wait"]) if metric.differs else (PASS, COLORS["best"])
            bars.append(Bar(metric.name, ratio, f"{sign}{ratio:.2g}x", color))
    note = "1x: as far from held-out patches as training patches are.  ✗: farther than chance allows."
    return Bars("Distance from held-out patches, relative to training patches", tuple(bars), note, limit=1.0)


def metric_table(metrics: Sequence[Metric]) -> Table:
    rows = [
        (
            m.name,
            {True: f"{FAIL}differs", False: f"{PASS}no difference", None: "? unknown"}[m.differs]
            + (m.note and f"; {m.note}"),
            *(_number(m.values[of]) if of in m.values else "" for of in _NAMES),
            _number(m.distance),
            "" if m.floor is None else _number(m.floor),
            _number(m.p),
        )
        for m in metrics
    ]
    columns = ("metric", "result", *_NAMES.values(), "distance", "floor", "p")
    return Table("Generated against real patches", columns, tuple(rows))


def plain(comparison: Comparison) -> dict[str, Any]:
    """Return all metrics as plain JSON; non-finite values are null."""
    metrics = {
        metric.key: asdict(metric) | {"differs": metric.differs, "reading": metric.reading}
        for metric in comparison.metrics
    }
    found: dict[str, Any] = replace_nonfinite({"verdict": verdict(comparison), "figures": metrics})
    return found


def _charts(comparison: Comparison) -> list[Chart]:
    textures = {_NAMES[of]: texture for of, texture in comparison.textures.items()}
    middles = (HISTOGRAM_EDGES[:-1] + HISTOGRAM_EDGES[1:]) / 2
    intensities = [banded(of, middles, texture.histogram) for of, texture in textures.items()]
    power = [banded(of, texture.frequency, texture.power) for of, texture in textures.items()]
    is_log = all((texture.power > 0).all() for texture in textures.values())
    found = chart("histogram", "Intensities", "share of voxels", intensities, x_label="model value")
    found += chart("spectrum", "Radial power spectrum", "power", power, x_label="cycles per voxel", log=is_log)
    for axis, name in enumerate("zyx"):
        series = [
            banded(of, np.arange(len(texture.correlation[axis])), texture.correlation[axis])
            for of, texture in textures.items()
            if axis < len(texture.correlation)
        ]
        title = f"Two-point correlation along {name}"
        found += chart(f"correlation_{name}", title, "correlation", series, x_label="voxels apart")
    return found


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"
