"""`vesuvius sample --checkpoint RUN_OR_FILE`, also `python -m vesuvius.sample`: draw from a trained model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vesuvius.commands.arguments import sample as sample_arguments
from vesuvius.commands.command import as_command, say
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.runlog.units import format_sizes

if TYPE_CHECKING:
    from vesuvius.generate.sampling import SampleSummary
    from vesuvius.generate.volume.draw import VolumeSummary


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and sample.  Returns the exit code."""
    parser = sample_arguments.parser()
    arguments = parser.parse_args(argv)
    if problem := sample_arguments.check_options(arguments):
        parser.error(problem)
    common = {name: getattr(arguments, name) for name in ("checkpoint", "weights", "seed", "batch_size", "volume")}
    common["overrides"] = sample_arguments.overrides_of(arguments)
    draw = _volume if sample_arguments.wants_volume(arguments) else _patches
    return draw(arguments, common)


def _patches(arguments: argparse.Namespace, common: dict[str, Any]) -> int:
    # torch takes seconds to import: not for --help
    from vesuvius.generate.sampling import SampleRequest, draw_samples

    request = SampleRequest(
        **common,
        count=16 if arguments.count is None else arguments.count,
        out=arguments.out,
        overwrite=arguments.overwrite,
        condition=arguments.condition,
        box=arguments.box,
        npy=arguments.npy,
    )
    with Progress("sampling") as progress:
        report = draw_samples(request, progress.tell)
    say(_text(report))
    return EXIT_OK


def _volume(arguments: argparse.Namespace, common: dict[str, Any]) -> int:
    from vesuvius.generate.volume.draw import VolumeRequest, draw_volume, forecast_volume
    from vesuvius.generate.volume.inputs import GivenVolumes

    options = {name: getattr(arguments, name) for name in ("overlap", "blend", "workers", "rounds")}
    request = VolumeRequest(
        **common,
        out=arguments.out,
        shape_zyx=arguments.shape,
        given=GivenVolumes(arguments.inpaint, arguments.mask, arguments.condition, arguments.box),
        **{name: value for name, value in options.items() if value is not None},
    )
    if arguments.dry_run:
        forecast = forecast_volume(request)
        say(forecast.text())
        forecast.check_space(request.out)
        return EXIT_OK
    with Progress("sampling") as progress:
        report = draw_volume(request, progress.tell)
    say(_volume_text(report))
    return EXIT_OK


def _volume_text(report: VolumeSummary) -> str:
    shape = format_sizes(report.shape_zyx)
    if report.already:
        return f"{report.out} is already there: {shape} {report.dtype}, drawn with the same arguments"
    known = "" if report.known is None else f"; {report.known} known voxels kept, compared bit by bit"
    coarse = ""
    if report.differences is not None:
        rms, std = report.differences
        share = f", {rms / std:.2g} of its standard deviation" if std else ""
        coarse = f"; downsampled, it differs from --condition by {rms:.3g} grey values (rms){share}"
    written = f"wrote {report.out}: {shape} {report.dtype}, {report.levels} level(s), in {report.seconds:.1f} s"
    return f"{written}{known}{coarse}"


def _text(report: SampleSummary) -> str:
    """What is printed at the end."""
    each = report.seconds / report.count
    return (
        f"wrote {report.out}: {report.count} samples of {format_sizes(report.shape_zyx)} {report.dtype} in "
        f"{report.seconds:.1f} s ({each:.2f} s each), {report.evaluations} network evaluations per sample"
    )
