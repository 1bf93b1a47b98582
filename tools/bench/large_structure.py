"""Structure beyond a patch of generated volumes, relative to a real one.

    python tools/bench/large_structure.py --real volumes/scroll.zarr --patch 32 fine_1.zarr fine_2.zarr ...

Power along y and x at wavelengths of 4, 2, 1 and 1/2 patches, over that of real boxes of the same shape; and how well
the orientation of sheets at 1, 2, 3 and 4 patches follows from that here: the correlation of the doubled angle of the
structure tensor, weighted with its coherence (1 = straight parallel sheets).  Both of means over z, so that volumes
should be as thin as a patch.  Standard errors are over volumes.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
import zarr
from scipy import ndimage

Plane = np.ndarray[Any, Any]


def power(plane: Plane, patch: int) -> list[float]:
    """Mean power of the waves of 1, 2, 4 and 8 periods in the first four patches."""
    cut = plane[: 4 * patch, : 4 * patch] - plane[: 4 * patch, : 4 * patch].mean()
    frequency = np.fft.fftfreq(4 * patch)
    periods = (np.hypot(*np.meshgrid(frequency, frequency, indexing="ij")) * 4 * patch).round()
    found = np.abs(np.fft.fft2(cut)) ** 2 / cut.size
    return [float(found[periods == count].mean()) for count in (1, 2, 4, 8)]


def orientation(plane: Plane, patch: int) -> list[float]:
    """Correlation of the sheets' orientation with that at 1, 2, 3 and 4 patches along y and x."""
    smooth = ndimage.gaussian_filter(plane, 1.0)
    dy, dx = ndimage.sobel(smooth, 0), ndimage.sobel(smooth, 1)
    doubled = ndimage.gaussian_filter(dx * dx - dy * dy, 4) + 2j * ndimage.gaussian_filter(dx * dy, 4)
    doubled /= ndimage.gaussian_filter(dx * dx + dy * dy, 4) + 1e-6
    found = []
    for lag in (patch, 2 * patch, 3 * patch, 4 * patch):
        pairs = (doubled[lag:], doubled[:-lag]), (doubled[:, lag:], doubled[:, :-lag])
        products = np.concatenate([(here * there.conj()).real.ravel() for here, there in pairs])
        found.append(float(products.mean() / np.mean(np.abs(doubled) ** 2)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", required=True, help="OME-Zarr volume; its level 0 is used")
    parser.add_argument("--patch", type=int, required=True, help="edge length in voxels")
    parser.add_argument("generated", nargs="+", help="OME-Zarr volumes of equal shape, longer than four patches")
    arguments = parser.parse_args()

    def level_0(path: str) -> Any:
        return zarr.open_array(f"{path}/0", mode="r")

    real, generated = level_0(arguments.real), [level_0(path) for path in arguments.generated]
    shape = generated[0].shape
    corners = itertools.product(*(range(0, of - size + 1, size) for of, size in zip(real.shape, shape, strict=True)))
    boxes = [real[tuple(slice(lo, lo + size) for lo, size in zip(at, shape, strict=True))] for at in corners]

    def of(measure: Any, volumes: list[Any]) -> Plane:
        return np.array([measure(volume[...].astype(np.float32).mean(0), arguments.patch) for volume in volumes])

    def text(values: Plane, errors: Plane | None = None) -> str:
        shown = [f"{value:.2f}" for value in values]
        return "  ".join(shown if errors is None else (f"{v} ({e:.2f})" for v, e in zip(shown, errors, strict=True)))

    true_power, found = of(power, boxes).mean(0), of(power, generated)
    error = max(len(generated) - 1, 1) ** -0.5
    print(
        "power over real at 4, 2, 1, 1/2 patches:", text(found.mean(0) / true_power, found.std(0) / true_power * error)
    )
    turned = of(orientation, generated)
    print("orientation at 1, 2, 3, 4 patches:      ", text(turned.mean(0), turned.std(0) * error))
    print(f"the same in {len(boxes)} real boxes:           ", text(of(orientation, boxes).mean(0)))


if __name__ == "__main__":
    main()
