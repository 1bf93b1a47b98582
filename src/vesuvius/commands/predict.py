"""`vesuvius predict --network N --volume V --out O`: evaluate any network on a whole volume."""

import argparse
import json
from pathlib import Path
from typing import Any

from vesuvius.commands.cli import Parser, as_command, full_path, naturals, option, positive, say, triple
from vesuvius.commands.sample import array, box
from vesuvius.errors import EXIT_OK, VesuviusError, needs_extra, one_line
from vesuvius.runlog.progress import Progress


@as_command
def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    from vesuvius.predict.forecast import forecast  # imports torch
    from vesuvius.predict.run import PredictRequest, predict
    from vesuvius.training.stop import StopRequest

    given = {key: value for key, value in vars(arguments).items() if value is not None}
    dry_run, restart = given.pop("dry_run"), given.pop("restart")
    request = PredictRequest(**given | {"resume": not restart})
    if dry_run:
        say(forecast(request))
        return EXIT_OK
    with Progress("predicting") as progress, StopRequest(None) as stop:
        prediction = predict(request, progress.update, stop)
    say(f"wrote {prediction}{_picture(arguments)}")
    return EXIT_OK


def _picture(arguments: argparse.Namespace) -> str:
    """Draw the picture, and say where it is, or why there is none: the volume is complete in any case."""
    picture = arguments.out.with_suffix(".png")
    try:
        with needs_extra("it"):
            from vesuvius.generate.volume.picture import draw_prediction

            draw_prediction(arguments.volume[0], arguments.box, arguments.out, picture)
    except (ImportError, VesuviusError) as error:
        return f"; no picture: {one_line(error)}"
    return f"; middle slices: {picture}"


def _parser() -> Parser:
    parser = Parser(
        prog="vesuvius predict",
        description="Evaluate a network on overlapping tiles of a volume of any size, blend them, and write an "
        "OME-Zarr with a pyramid.  The same command resumes after any stop.",
        examples=(
            "vesuvius predict --network net.pt2 --volume scan.zarr --out ink.zarr --patch-size 64,128,128",
            "vesuvius predict --network nets:unet --volume s3://bucket/scan.zarr@1 --out sheets.zarr --patch-size "
            "96,96,96 --activation argmax --mask mask.zarr --dry-run",
        ),
    )
    network = "file of torch.export or TorchScript, or MODULE:FUNCTION that builds it"
    option(parser, "--network NETWORK", network, required=True)
    volume = "zarr volume, PATH, PATH@LEVEL or PATH@7.91um; several: the channels of the network's input"
    option(parser, "--volume VOLUME", volume, array, nargs="+", required=True)
    option(parser, "--out OUT.zarr", "where to write", full_path, required=True)
    size = triple(1, "64,128,128")
    option(parser, "--patch-size Z,Y,X", "voxels of a tile", size, dest="patch_zyx", required=True)
    option(parser, "--dry-run", "print tiles, bytes, memory and time; write nothing")
    option(parser, "--restart", "delete an unfinished volume and start again")
    values = parser.add_argument_group("values")
    normalize = "auto = as PatchLoader estimates it (default), none, LOW,HIGH, or a JSON file of a PatchLoader's state"
    option(values, "--normalize RANGE", normalize, _normalize)
    activation = "softmax, sigmoid, or argmax (labels), after blending (default: none)"
    option(values, "--activation NAME", activation, choices=("softmax", "sigmoid", "argmax"))
    threshold = "write 1 from this probability on, else 0; with argmax, less certain labels are 0"
    option(values, "--threshold P", threshold, float)
    option(values, "--channels I,...", "channels that are kept (default: all)", naturals)
    option(values, "--dtype NAME", "float32 (default), float16 or uint8; labels: uint8, uint16")
    option(values, "--mirror AXES", "average over flips along these axes, such as zyx")
    where = parser.add_argument_group("where")
    option(where, "--box Z0:Z1,Y0:Y1,X0:X1", "part of the volume (default: all)", box)
    mask = "predict where this volume is not 0; stored = over stored chunks (default: everywhere)"
    option(where, "--mask VOLUME", mask, _mask)
    option(where, "--overlap SHARE", "of neighboring tiles (default: 0.25)", float)
    blend = ("gaussian", "linear", "constant", "crop")
    option(where, "--blend NAME", f"{', '.join(blend)} (default: gaussian)", choices=blend)
    speed = parser.add_argument_group("speed")
    option(speed, "--batch-size N", "tiles computed at once (default: 1 on a CPU, what fits on a GPU)", positive)
    workers = "processes, each with a GPU or core (default: this process, with all cores)"
    option(speed, "--workers N", workers, positive)
    option(speed, "--cluster ADDRESS", "Ray cluster whose nodes share the folder of --out")
    option(speed, "--device DEVICE", "cpu, cuda or cuda:1 (default: the GPU, if there is one)")
    return parser


def _mask(text: str) -> Any:
    return text if text == "stored" else array(text)


def _normalize(text: str) -> Any:
    if text in ("auto", "none"):
        return text == "auto"
    try:
        low, high = map(float, text.split(","))
        return low, high
    except ValueError:
        pass
    try:
        return json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, none, LOW,HIGH or a JSON file of loader.state_dict() ({one_line(error)})"
        ) from None
