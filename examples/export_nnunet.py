"""nnU-Net: export boxes of the pairs of `vesuvius sample --condition LABELS --out PAIRS` as a raw data set.

python examples/export_nnunet.py PAIRS nnUNet_raw/Dataset501_Pairs 64,128,128 sheet ignore
"""

import json
import sys
from itertools import product
from pathlib import Path

import nibabel
import numpy as np

import vesuvius


def main(pairs: str, out: str, box: str, *classes: str) -> int:
    """Write boxes that cover all pairs, the last one along an axis overlapping the one before; returns their number.

    Args:
        box: voxels z,y,x; a shorter axis of a pair is not cut.
        classes: names of the labels 1, 2, ...; the last one is `ignore` if it marks unlabelled voxels.
    """
    images, targets = Path(out, "imagesTr"), Path(out, "labelsTr")
    images.mkdir(parents=True, exist_ok=True)
    targets.mkdir(exist_ok=True)
    for path in sorted(Path(pairs, "images").glob("*.zarr")):
        scan = vesuvius.open_volume(path)
        labels = vesuvius.open_volume(Path(pairs, "labels", f"{path.stem}_labels.zarr"))
        size = [min(int(most), length) for most, length in zip(box.split(","), scan.shape_zyx, strict=True)]
        axes = zip(size, scan.shape_zyx, strict=True)
        starts = [sorted({*range(0, length - side, side), length - side}) for side, length in axes]
        spacing_zyx = [um / 1000 for um in scan.voxel_size_um or (1000, 1000, 1000)]  # NIfTI counts in mm
        affine = np.diag([*spacing_zyx[::-1], 1]) * [-1, -1, 1, 1]  # vesuvius's volumes are LPS, NIfTI's space is RAS
        for start in product(*starts):
            where = tuple(slice(first, first + side) for first, side in zip(start, size, strict=True))
            name = "_".join(map(str, (path.stem, *start)))
            # NIfTI stores x, y, z
            nibabel.save(nibabel.Nifti1Image(scan[where].T, affine), images / f"{name}_0000.nii.gz")
            nibabel.save(nibabel.Nifti1Image(labels[where].T.astype(np.uint8), affine), targets / f"{name}.nii.gz")
    count = len([*targets.iterdir()])
    names = {name: number for number, name in enumerate(("background", *classes))}
    about = {"channel_names": {"0": "CT"}, "labels": names, "numTraining": count, "file_ending": ".nii.gz"}
    Path(out, "dataset.json").write_text(json.dumps(about, indent=2))
    return count


if __name__ == "__main__":
    print(f"{main(*sys.argv[1:])} boxes in {sys.argv[2]}")
