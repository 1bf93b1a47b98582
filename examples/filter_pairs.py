"""Drop pairs of `vesuvius sample --condition LABELS --out PAIRS` whose labels a first segmenter cannot recover.

python examples/filter_pairs.py PAIRS NETWORK 64,128,128 0.6 [IGNORED_LABEL]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import vesuvius


def main(pairs: str, network: Any, patch_size: str, least: float, ignored: int = -1) -> dict[str, float]:
    """Move pairs with a mean Dice of their classes below `least` to PAIRS/dropped; return the Dice of each pair.

    Args:
        network: as of `vesuvius predict`, with a channel per class: a file or MODULE:FUNCTION.  Predictions are kept in
            PAIRS/predicted, so the same command with another threshold is quick.
        patch_size: voxels z,y,x of a tile.
        ignored: label of voxels that do not count.
    """
    scores, tile = {}, tuple(map(int, patch_size.split(",")))
    if not (scans := sorted(Path(pairs, "images").glob("*.zarr"))):
        sys.exit(f"{pairs} has no images/*.zarr; give the --out of `vesuvius sample --condition LABELS --out PAIRS`")
    for scan in scans:
        others = [Path(pairs, kind, f"{scan.stem}_{kind}.zarr") for kind in ("labels", "instances")]
        predicted = Path(pairs, "predicted", scan.name)
        vesuvius.predict_volume(network, scan, predicted, patch_size=tile, activation="argmax")
        truth = vesuvius.open_volume(others[0])[:]
        known = truth != ignored
        truth, found = truth[known], vesuvius.open_volume(predicted)[:][known]
        labels = np.union1d(truth, found)
        both = [2 * np.mean((truth == label) & (found == label)) for label in labels[labels != 0]]
        either = [np.mean(truth == label) + np.mean(found == label) for label in labels[labels != 0]]
        scores[scan.stem] = float(np.mean(np.divide(both, either))) if both else 1.0
        if scores[scan.stem] < least:
            for file in filter(Path.exists, (scan, *others, predicted)):
                (to := Path(pairs, "dropped", file.parent.name)).mkdir(parents=True, exist_ok=True)
                file.rename(to / file.name)
    return scores


if __name__ == "__main__":
    dice = main(*sys.argv[1:4], float(sys.argv[4]), *map(int, sys.argv[5:]))
    for name, value in dice.items():
        print(f"{name}  Dice {value:.3f}{'' if value >= float(sys.argv[4]) else '  dropped'}")
