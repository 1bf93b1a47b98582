"""`vesuvius predict --network N --volume V --out O`: evaluate any network on a whole volume."""

import argparse
import json
from pathlib import Path
from typing import Any

from vesuvius.commands.cli import Parser, as_command, full_path, naturals, positive, say, triple
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
    parser.add_argument("--network", required=True, metavar="NETWORK", help=network)
    volume = "zarr volume, PATH, PATH@LEVEL or PATH@7.91um; several: the channels of the network's input"
    parser.add_argument("--volume", type=array, nargs="+", required=True, metavar="VOLUME", help=volume)
    parser.add_argument("--out", type=full_path, required=True, metavar="OUT.zarr", help="where to write")
    size = triple(1, "64,128,128")
    parser.add_argument(
        "--patch-size", dest="patch_zyx", type=size, required=True, metavar="Z,Y,X", help="voxels of a tile"
    )
    parser.add_argument("--dry-run", action="store_true", help="print tiles, bytes, memory and time; write nothing")
    parser.add_argument("--restart", action="store_true", help="delete an unfinished volume and start again")
    values = parser.add_argument_group("values")
    normalize = "auto = as PatchLoader estimates it (default), none, LOW,HIGH, or a JSON file of a PatchLoader's state"
    values.add_argument("--normalize", type=_normalize, metavar="RANGE", help=normalize)
    activation = "softmax, sigmoid, or argmax (labels), after blending (default: none)"
    values.add_argument("--activation", choices=("softmax", "sigmoid", "argmax"), metavar="NAME", help=activation)
    threshold = "write 1 from this probability on, else 0; with argmax, less certain labels are 0"
    values.add_argument("--threshold", type=float, metavar="P", help=threshold)
    values.add_argument("--channels", type=naturals, metavar="I,...", help="channels that are kept (default: all)")
    dtype = "float32 (default), float16 or uint8; labels: uint8, uint16"
    values.add_argument("--dtype", metavar="NAME", help=dtype)
    values.add_argument("--mirror", metavar="AXES", help="average over flips along these axes, such as zyx")
    where = parser.add_argument_group("where")
    where.add_argument("--box", type=box, metavar="Z0:Z1,Y0:Y1,X0:X1", help="part of the volume (default: all)")
    mask = "predict where this volume is not 0; stored = over stored chunks (default: everywhere)"
    where.add_argument("--mask", type=_mask, metavar="VOLUME", help=mask)
    where.add_argument("--overlap", type=float, metavar="SHARE", help="of neighboring tiles (default: 0.25)")
    blend = ("gaussian", "linear", "constant", "crop")
    where.add_argument("--blend", choices=blend, metavar="NAME", help=f"{', '.join(blend)} (default: gaussian)")
    speed = parser.add_argument_group("speed")
    batch = "tiles computed at once (default: 1 on a CPU, what fits on a GPU)"
    speed.add_argument("--batch-size", type=positive, metavar="N", help=batch)
    workers = "processes, each with a GPU or core (default: this process, with all cores)"
    speed.add_argument("--workers", type=positive, metavar="N", help=workers)
    speed.add_argument("--cluster", metavar="ADDRESS", help="Ray cluster whose nodes share the folder of --out")
    speed.add_argument("--device", help="cpu, cuda or cuda:1 (default: the GPU, if there is one)")
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
