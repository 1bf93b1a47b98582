"""`vesuvius volume`: import, inspect, copy, list, verify, synthesize and relabel volumes."""

from vesuvius.commands.cli import Parser, as_command
from vesuvius.commands.volume.look import add_info, add_occupancy, add_verify
from vesuvius.commands.volume.make import add_copy, add_import, add_synth
from vesuvius.commands.volume.relabel import add_relabel


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius volume",
        description="Import, inspect, copy, list, verify, synthesize and relabel volumes.",
        examples=("vesuvius volume info scroll.zarr", "vesuvius volume import --help"),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_synth, add_info, add_copy, add_import, add_relabel, add_occupancy, add_verify):
        add(commands)
    arguments = parser.parse_args(argv)
    exit_code: int = arguments.run(arguments)
    return exit_code
