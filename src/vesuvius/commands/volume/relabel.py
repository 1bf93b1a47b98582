"""`vesuvius volume relabel`: changed copies of labels."""

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from vesuvius.commands.cli import full_path, natural, number_from_0, positive_number
from vesuvius.commands.sample import array, box
from vesuvius.commands.volume.shared import Commands, print_facts
from vesuvius.errors import EXIT_OK, needs_extra

_CHANGES: dict[str, tuple[float, Callable[[str], float], str, str]] = {
    "deform": (0.0, number_from_0, "A", "smooth random deformation; root mean square displacement"),
    "deform_length": (32.0, positive_number, "L", "correlation length of --deform"),
    "bend": (0.0, number_from_0, "A", "deformation as long as half the box; root mean square displacement"),
    "thicken": (0.0, float, "V", "grow each instance into class 0; negative: shrink it"),
    "tear": (0, natural, "N", "strips of 4 voxels cut across instances"),
    "contact": (0.0, number_from_0, "SHARE", "move instances until this share of neighboring pairs is --within"),
    "within": (6.0, number_from_0, "V", "gap between two instances that counts as contact; 0 = touching"),
}


def add_relabel(commands: Commands) -> None:
    relabel = commands.add_parser(
        "relabel",
        help="deform, thicken and tear labels, or bring sheets into contact; instances stay exact",
        description="Change labels at random: OUT.zarr gets the classes, OUT.instances.zarr the ids.  Lengths are in "
        "voxels.  The result depends only on --seed, the labels and the options, and is computed in memory, about "
        "90 bytes a voxel.  Prints topology and contacts of before and after.",
        examples=(
            "vesuvius volume relabel scan.labels.zarr new.zarr --instances scan.instances.zarr --deform 4 --contact 1",
            "vesuvius volume relabel bodies.zarr membranes.zarr --boundary --deform 4 --deform-length 24 --seed 1",
        ),
    )
    relabel.add_argument("labels", type=array, metavar="LABELS", help="classes, 0 = nothing: PATH or PATH@LEVEL")
    relabel.add_argument("out", type=full_path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    instances = "ids of the same voxels, one per sheet or body, 0 = none; needed by all but --deform and --bend"
    relabel.add_argument("--instances", type=array, metavar="VOLUME", help=instances)
    boundary = "LABELS are ids of bodies; OUT.zarr gets 1 at their boundaries and at id 0"
    relabel.add_argument("--boundary", action="store_true", help=boundary)
    relabel.add_argument("--box", type=box, metavar="Z0:Z1,Y0:Y1,X0:X1", help="part to change (default: all)")
    relabel.add_argument("--seed", type=natural, default=0, help="seed of the changes (default: 0)")
    changes = relabel.add_argument_group("changes, in this order")
    for name, (default, kind, metavar, meaning) in _CHANGES.items():
        text = f"{meaning} (default: {default:g})"
        changes.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, metavar=metavar, help=text)
    relabel.set_defaults(run=_relabel)


def _relabel(arguments: argparse.Namespace) -> int:
    with needs_extra("`vesuvius volume relabel`"):
        from vesuvius.volume_tools.relabel import Changes
        from vesuvius.volume_tools.relabel_volume import relabel_volume

    changes = Changes(**{name: getattr(arguments, name) for name in _CHANGES})
    given = {name: getattr(arguments, name) for name in ("labels", "out", "instances", "boundary", "box", "seed")}
    with redirect_stdout(sys.stderr):  # the log
        report = relabel_volume(**given, changes=changes)
    print_facts({"out": arguments.out} | report, arguments)
    return EXIT_OK
