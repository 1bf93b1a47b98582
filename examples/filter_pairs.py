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
            PAIRS/predicted, so the same command with a higher threshold is quick.
        patch_size: voxels z,y,x of a tile.
        ignored: label of voxels that do not count.
    """
    scores, tile = {}, tuple(map(int, patch_size.split(",")))
    dropped = {scan.stem for scan in Path(pairs, "dropped/images").glob("*.zarr")}
    scans = sorted(Path(pairs, "images").glob("*.zarr"))
    if twice := [scan.name for scan in scans if scan.stem in dropped]:
        sys.exit(f"{pairs} and {pairs}/dropped both have images/{twice[0]}; remove or rename one of these pairs")
    for name in dropped:  # by a command that may have been killed
        drop(pairs, name)
    if not scans:
        out = "draw more with" if dropped else "give the --out of"
        was = f", as all {len(dropped)} were dropped" if dropped else ""
        sys.exit(f"{pairs} has no images/*.zarr{was}; {out} `vesuvius sample --condition LABELS --out PAIRS`")
    for scan in scans:
        labels, predicted = Path(pairs, "labels", f"{scan.stem}_labels.zarr"), Path(pairs, "predicted", scan.name)
        vesuvius.predict_volume(network, scan, predicted, patch_size=tile, activation="argmax")
        truth = vesuvius.open_volume(labels)[:]
        known = truth != ignored
        truth, found = truth[known], vesuvius.open_volume(predicted)[:][known]
        labels = np.union1d(truth, found)
        both = [2 * np.mean((truth == label) & (found == label)) for label in labels[labels != 0]]
        either = [np.mean(truth == label) + np.mean(found == label) for label in labels[labels != 0]]
        scores[scan.stem] = float(np.mean(np.divide(both, either))) if both else 1.0
        if scores[scan.stem] < least:
            drop(pairs, scan.stem)
    return scores


def drop(pairs: str, name: str) -> None:
    """Move what is left of a pair to PAIRS/dropped, the scan first: the next command then moves the rest."""
    for file in (f"images/{name}", f"labels/{name}_labels", f"instances/{name}_instances", f"predicted/{name}"):
        old, new = Path(pairs, f"{file}.zarr"), Path(pairs, "dropped", f"{file}.zarr")
        if old.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            old.rename(new)


if __name__ == "__main__":
    dice = main(*sys.argv[1:4], float(sys.argv[4]), *map(int, sys.argv[5:]))
    for name, value in dice.items():
        print(f"{name}  Dice {value:.3f}{'' if value >= float(sys.argv[4]) else '  dropped'}")
