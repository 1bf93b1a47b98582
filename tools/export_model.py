"""Write the averaged weights of a run, with all that sampling needs, as one file to publish:

    python tools/export_model.py runs/scroll/checkpoints/best scroll.safetensors --license CC-BY-4.0

The file holds the config, with the paths in it, and of the training volumes geometry, intensity ranges and power
spectrum.  Prints its SHA-256 sum.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vesuvius.training.checkpoint.format import STATE, digest, find_checkpoint, load_state
from vesuvius.training.checkpoint.model_file import write_model_file
from vesuvius.training.checkpoint.trained import load_weights


def export(run: Path, out: Path, license_name: str) -> str:
    """Write the model file; returns its SHA-256 sum.  Raises as `find_checkpoint` and `load_weights`."""
    checkpoint = find_checkpoint(run)
    state = load_state(checkpoint / STATE)
    for volume in state["volumes"]:  # the folders of this machine are of no use elsewhere
        if "://" not in volume["name"]:
            volume["name"] = volume["name"].rpartition("/")[2]
    write_model_file(out, state, load_weights(checkpoint, "ema"), license_name)
    return digest(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run or checkpoint")
    parser.add_argument("out", type=Path, help="file to write, NAME.safetensors")
    parser.add_argument("--license", required=True, help="SPDX name of the license of the weights")
    arguments = parser.parse_args()
    print(f"{export(arguments.run, arguments.out, arguments.license)}  {arguments.out.name}")
