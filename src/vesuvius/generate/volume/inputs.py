"""The volumes that a drawing is given: known voxels and their mask, and the condition.  Reads them once, by blocks."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError
from vesuvius.stream.start.prepare import GreyRange
from vesuvius.training.step.grey_values import grey_scales, normalised
from vesuvius.volumes.box import Box, format_box, intersection, shape_of, slices
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.volume import Volume, metadata_hash, open_volume

_HASHED_BYTES = 2**26


@dataclass(frozen=True)
class GivenVolumes:
    """What the command line names.

    Attributes:
        inpaint: the volume whose known voxels are kept.
        mask: nonzero where it is to be filled; None = where chunks are not stored.
        condition: what the network is shown.
        box: the part of all of them that is used; None = all.
    """

    inpaint: ArrayConfig | None = None
    mask: ArrayConfig | None = None
    condition: ArrayConfig | None = None
    box: Box | None = None


class Inputs(AbstractContextManager["Inputs"]):
    """The given volumes, opened.  Boxes are in voxels of the drawing.

    Attributes:
        shape_zyx: of the drawing, where a volume or a box says it.
    """

    def __init__(self, given: GivenVolumes, store: StoreConfig) -> None:
        """Reads metadata.  Raises DataError, and ConfigError where shapes differ or the box is outside."""
        named = {"--inpaint": given.inpaint, "--mask": given.mask, "--condition": given.condition}
        with ExitStack() as opened:
            volumes = {}
            for option, spec in named.items():
                if spec is not None:
                    volumes[option] = opened.enter_context(closing(open_volume(spec, store)))
            self.shape_zyx = _common_shape(volumes, given.box)
            self._open = opened.pop_all()
        self.volumes: dict[str, Volume] = volumes
        self._origin = given.box[0] if given.box else (0, 0, 0)

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def inpaint(self) -> Volume | None:
        """The volume whose known voxels are kept."""
        return self.volumes.get("--inpaint")

    @property
    def condition(self) -> Volume | None:
        """What the network is shown."""
        return self.volumes.get("--condition")

    def record(self) -> dict[str, Any]:
        """The volumes and what identifies their arrays and what is stored in them, as plain JSON."""
        assert self.shape_zyx is not None or not self.volumes
        return {
            option.strip("-"): [
                volume.name,
                metadata_hash(volume.array),
                _stored_stamp(volume, self._shifted(((0, 0, 0), self.shape_zyx))),  # type: ignore[arg-type]
            ]
            for option, volume in self.volumes.items()
        }

    def space(self, voxel_size_um: FloatTriple | None) -> tuple[FloatTriple, str | None, FloatTriple | None]:
        """Edge lengths of voxels, their unit, and where the drawing begins: where its voxels lie in the given volumes.

        Args:
            voxel_size_um: of the training volume, where the given ones do not say theirs.
        """
        volume = next(iter(self.volumes.values()), None)
        geometry = volume.geometry if volume is not None else None
        own = geometry.voxel_size_um if geometry is not None else None
        z, y, x = scale = own or voxel_size_um or (1.0, 1.0, 1.0)
        oz, oy, ox = self._origin
        corner = (oz * z, oy * y, ox * x)
        if geometry is not None and own is not None:
            place = zip(geometry.translation_zyx, geometry.scale_zyx, own, strict=True)
            tz, ty, tx = (shift * um / size for shift, size, um in place)
            corner = (tz + corner[0], ty + corner[1], tx + corner[2])
        return scale, "micrometer" if own or voxel_size_um else None, corner if any(corner) else None

    def read(self, volume: Volume, box: Box) -> NDArray[Any]:
        """Stored voxels.  Raises DataError."""
        return volume.read(self._shifted(box))

    def gaps(self, box: Box) -> NDArray[np.bool_]:
        """Which voxels are to be filled.  Raises DataError."""
        mask = self.volumes.get("--mask")
        if mask is not None:
            masked: NDArray[np.bool_] = self.read(mask, box) != 0
            return masked
        volume = self.inpaint
        assert volume is not None
        gaps, there = np.zeros(shape_of(box), np.bool_), self._shifted(box)
        for chunk in volume.grid.absent(there):
            gaps[slices(intersection(volume.grid.box_of(chunk), there), there[0])] = True
        return gaps

    def known(self, box: Box, grey: GreyRange, schedule: Schedule) -> NDArray[np.float32]:
        """Known voxels as the sampler has them, NaN in the gaps.  Raises DataError."""
        assert self.inpaint is not None
        stored = torch.from_numpy(self.read(self.inpaint, box)[None])
        values = schedule.standardised(normalised(stored, grey_scales([grey])))[0].numpy()
        return np.where(self.gaps(box), np.float32(np.nan), values)

    def _shifted(self, box: Box) -> Box:
        (z0, y0, x0), (z1, y1, x1) = ([v + o for v, o in zip(end, self._origin, strict=True)] for end in box)
        return (z0, y0, x0), (z1, y1, x1)


def _stored_stamp(volume: Volume, box: Box) -> str | None:
    """What changes when voxels of a box are written anew: of few bytes their content, else sizes and times of files.

    None for a remote volume: of that only the metadata are compared.
    """
    if volume.source.remote:
        return None
    root, found = Path(volume.source.address), hashlib.sha256()
    files = sorted({root / volume.grid.key_of(chunk) for chunk in volume.grid.chunks_of(box)})
    stats = [(file, file.stat()) for file in files if file.exists()]
    small = sum(stat.st_size for _, stat in stats) <= _HASHED_BYTES
    for file, stat in stats:
        found.update(f"{file.relative_to(root)} {stat.st_size} {'' if small else stat.st_mtime_ns}\n".encode())
        if small:
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _common_shape(volumes: dict[str, Volume], box: Box | None) -> Triple | None:
    """The shape that all volumes, or the box in them, have."""
    if not volumes:
        if box is not None:
            raise ConfigError(
                f"--box is a part of --condition or --inpaint; got {format_box(box)} and neither; use --shape"
            )
        return None
    shapes = {option: volume.shape_zyx for option, volume in volumes.items()}
    first, shape = next(iter(shapes.items()))
    for option, other in shapes.items():
        if other != shape:
            raise ConfigError(
                f"{first} and {option} must have one shape; got {_text(shape)} and {_text(other)}; give volumes (or "
                "levels, PATH@LEVEL) of the same region"
            )
    if box is None:
        return shape
    if any(not 0 <= lo < hi <= size for lo, hi, size in zip(*box, shape, strict=True)):
        raise ConfigError(
            f"--box must lie inside the volume; got {format_box(box)} in {_text(shape)} of {first}; change --box"
        )
    return shape_of(box)


def _text(shape: Triple) -> str:
    return ",".join(map(str, shape))
