"""Write the averaged weights of a run, with all that sampling needs, as one file to publish:

    python tools/export_model.py runs/scroll/checkpoints/best scroll.safetensors --license CC-BY-4.0

The file holds the config, with the paths in it, and of the training volumes geometry, intensity ranges and power
spectrum.  Prints its SHA-256 sum.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from safetensors.torch import save_file

from vesuvius.training.checkpoint.format import STATE, digest, find_checkpoint, load_state
from vesuvius.training.checkpoint.model_file import FORMAT, OWN, SPECTRUM, Description
from vesuvius.training.checkpoint.trained import load_weights


def export(run: Path, out: Path, license_name: str) -> str:
    """Write the model file; returns its SHA-256 sum.  The same arguments give the same bytes.

    Raises OSError, and as `find_checkpoint` and `load_weights`.
    """
    checkpoint = find_checkpoint(run)
    state = load_state(checkpoint / STATE)
    for volume in state["volumes"]:  # the folders of this machine are of no use elsewhere
        if "://" not in volume["name"]:
            volume["name"] = volume["name"].rpartition("/")[2]
    spectrum = dict(state["spectrum"])
    tensors = load_weights(checkpoint, "ema") | {SPECTRUM: spectrum.pop("power")}
    described = state | {"format": FORMAT, "license": license_name, "spectrum": spectrum}
    header = {OWN: json.dumps({key: described[key] for key in ("format", *Description.model_fields)}, sort_keys=True)}
    staged = out.with_name(f".{out.name}.{os.getpid()}")
    save_file({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, staged, header)
    staged.chmod(0o644)  # safetensors makes files that only their owner can read
    staged.replace(out)
    return digest(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run or checkpoint")
    parser.add_argument("out", type=Path, help="file to write, NAME.safetensors")
    parser.add_argument("--license", required=True, help="SPDX name of the license of the weights")
    arguments = parser.parse_args()
    print(f"{export(arguments.run, arguments.out, arguments.license)}  {arguments.out.name}")
