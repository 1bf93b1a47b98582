"""Input volumes: known voxels, their mask, and the condition; read once, by blocks."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, Triple
from vesuvius.diffusion.randomness import Purpose, sample_noise
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, DataError
from vesuvius.generate.sample_zarr import to_model_values
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.checkpoint.trained import DataFacts
from vesuvius.training.step.feed import StoredCondition, Windows
from vesuvius.volumes.affine import AffineAlignment
from vesuvius.volumes.alignment import ONES, ZEROS, Alignment, Fractions, align, covered_shape, describe_geometry, fits
from vesuvius.volumes.box import Box, box_at, format_box, intersection, is_inside, shape_of, shifted, slices, triple
from vesuvius.volumes.context import ContextAlignment
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.geometry import FloatTriple, Geometry
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import check_labels

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputConfig:
    inpaint: ArrayConfig | None = None  # volume whose known voxels are kept
    mask: ArrayConfig | None = None  # nonzero voxels are filled; None = missing chunks are filled
    condition: ArrayConfig | None = None
    instances: ArrayConfig | None = None  # ids in the voxels of the condition; not seen by the network
    box: Box | None = None  # part of the volumes that is used; None = all


class Inputs:
    """The opened input volumes.  Boxes are in voxels of the generated volume."""

    def __init__(
        self,
        inputs: InputConfig,
        config: DataConfig,
        shape_zyx: Triple | None = None,
        condition_factors: Fractions = ONES,
        condition_offsets: Fractions | None = None,
        missing_chunk: Literal["air", "error"] = "air",
    ) -> None:
        """Reads metadata.  Raises DataError, and ConfigError if shapes differ or the box is outside.

        A voxel of the condition covers `condition_factors` generated voxels, and the first begins at
        `condition_offsets`; None = at 0, and all shapes must match, also the asked `shape_zyx`.
        """
        self._labels, self._context, self._warned = config.class_values, None, False
        self.volumes: dict[str, Volume] = {}
        with ExitStack() as opened:
            for name in ("inpaint", "mask", "condition", "instances"):
                if (spec := getattr(inputs, name)) is not None:
                    nan = {"mask": "air", "condition": config.condition_nan}.get(name, config.nan)
                    volume = open_volume(spec, config.store, missing_chunk, nan)
                    self.volumes[name] = opened.enter_context(volume)
                    if name == "instances" and volume.dtype.kind not in "bui":
                        raise ConfigError(f"--instances {volume.name} is {volume.dtype}, not ids; give integers")
            if condition_offsets is None:
                shape_zyx = _common_shape(self.volumes, inputs.box, shape_zyx, condition_factors)
            self._open = opened.pop_all()
        # None if neither inputs nor arguments define it
        self.shape_zyx = shape_of(inputs.box) if inputs.box else shape_zyx
        self._origin = inputs.box[0] if inputs.box else (0, 0, 0)
        # the condition may be coarser; the other volumes have the voxels of the generated one
        self._alignments: dict[str, Alignment | AffineAlignment] = {}
        for name, volume in self.volumes.items():
            assert shape_zyx is not None
            labels = name in ("condition", "instances")
            placed = (condition_factors, condition_offsets or ZEROS) if labels else (ONES, ZEROS)
            self._alignments[name] = Alignment(shape_zyx, volume.shape_zyx, *placed)
            if name == "condition" and config.context:
                sizes = shape_zyx, volume.shape_zyx
                self._context = ContextAlignment(*sizes, *placed, patch_zyx=config.patch_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for volume in self.volumes.values():
            if volume.nonfinite:
                volume.nonfinite.warn()
        self._open.close()

    @property
    def inpaint(self) -> Volume | None:
        return self.volumes.get("inpaint")

    @property
    def condition(self) -> Volume | None:
        return self.volumes.get("condition")

    def record(self, *, instances: bool = False) -> dict[str, Any]:
        """Return names and fingerprints of the volumes that scans depend on, or of the instances, as plain JSON."""
        record = {}
        for name, volume in self.volumes.items():
            if instances != (name == "instances"):
                continue
            assert self.shape_zyx is not None
            placed = (self._context if name == "condition" else None) or self._alignments[name]
            box = placed.array_box(box_at(self._origin, self.shape_zyx))
            record[name] = [volume.name, metadata_hash(volume.array), volume.stored_stamp(box)]
        return record

    def geometry(self, voxel_size_um: FloatTriple | None) -> Geometry:
        """The geometry of the volume; its voxels have `voxel_size_um` if the inputs give none."""
        name, volume = next(iter(self.volumes.items()), ("", None))
        geometry = volume.geometry if volume is not None else None
        stored = own = geometry.voxel_size_um if geometry is not None else None
        if stored is not None:
            own = triple(um / float(by) for um, by in zip(stored, self._alignments[name].factors, strict=True))
        scale = own or voxel_size_um or (1.0, 1.0, 1.0)
        corner = triple(start * size for start, size in zip(self._origin, scale, strict=True))
        if geometry is not None and stored is not None:
            place = zip(corner, geometry.translation_zyx, geometry.scale_zyx, stored, strict=True)
            corner = triple(shift * um / size + start for start, shift, size, um in place)
        unit = "micrometer" if own or voxel_size_um else None
        return Geometry(scale, corner, (unit, unit, unit), any(corner))

    def read(self, name: str, box: Box) -> NDArray[Any]:
        """Return stored voxels of an input; the condition and its instances are upsampled.  Raises DataError."""
        there, volume = shifted(box, self._origin), self.volumes[name]
        voxels = self._alignments[name].read(there, volume.read)
        if self._labels and name == "condition":
            check_labels(voxels, self._labels, volume.name, there)
        if name == "instances":
            self._check_instances(voxels, box)
        return voxels

    def _check_instances(self, ids: NDArray[Any], box: Box) -> None:
        """Raise DataError for negative ids; warn once if some voxels of class 0 have one (of membranes, all have)."""
        name = self.volumes["instances"].name
        if ids.min() < 0:
            raise DataError(f"--instances {name} has the negative id {ids.min()}; number instances from 1, 0 = none")
        inside = ids[self.read("condition", box) == 0] != 0
        if self._labels and not self._warned and inside.any() and not inside.all():
            self._warned = True
            text = "%d of %d voxels of class 0 in %s have an instance; check that --instances %s has ids, 0 = none"
            log.warning(text, np.count_nonzero(inside), inside.size, format_box(box), name)

    @property
    def context(self) -> ContextAlignment | None:
        """Where the windows of the condition lie; None without context."""
        if self._context is None:
            return None
        offsets = zip(self._context.offsets, self._origin, strict=True)
        return replace(self._context, offsets=triple(offset - start for offset, start in offsets))

    def read_window(self, box: Box) -> NDArray[Any]:
        """Return a box of the condition in its own voxels; it may reach outside.  Raises DataError."""
        assert self._context is not None
        volume = self.volumes["condition"]
        voxels = self._context.read_array(box, volume.read)
        if self._labels:
            check_labels(voxels, self._labels, volume.name, box)
        return voxels

    def gaps(self, box: Box) -> NDArray[np.bool_]:
        """Return which voxels are filled.  Raises DataError."""
        if "mask" in self.volumes:
            masked: NDArray[np.bool_] = self.read("mask", box) != 0
            return masked
        volume, gaps, there = self.volumes["inpaint"], np.zeros(shape_of(box), np.bool_), shifted(box, self._origin)
        for chunk in volume.grid.absent(there):
            gaps[slices(intersection(volume.grid.box_of(chunk), there), there[0])] = True
        return gaps

    def known(self, box: Box, intensity: IntensityRange, schedule: Schedule) -> NDArray[np.float32]:
        """Return known voxels, standardized, with NaN in the gaps.  Raises DataError."""
        voxels = torch.from_numpy(to_model_values(self.read("inpaint", box), intensity))
        values = schedule.standardized(voxels[None])[0].numpy()
        return np.where(self.gaps(box), np.float32(np.nan), values)


class TrainingCondition(Inputs):
    """The condition of a training volume, from which samples get theirs; the data volume itself need not exist."""

    def __init__(self, config: DataConfig, facts: DataFacts, volume_index: int, seed: int) -> None:
        trained, given = facts.volumes[volume_index], InputConfig(condition=config.volumes[volume_index].condition)
        placed = trained.condition_factors, trained.condition_offsets
        super().__init__(given, config, trained.shape_zyx, *placed, config.missing_chunk)
        assert self.condition is not None
        if (transform := trained.condition_transform) is not None:
            sizes, fill = (trained.shape_zyx, self.condition.shape_zyx), self.condition.fill_value
            self._alignments["condition"] = AffineAlignment(*sizes, *transform, fill)
        self.volume, self._patch_zyx, self._seed = self.condition, config.patch_size, seed
        self._box = trained.validation or trained.train
        labels = config.class_values
        low, high = (min(labels), max(labels)) if labels else (0, 0)
        self.intensity = (
            IntensityRange(low, max(low + 1, high)) if labels else facts.intensities.conditions[volume_index]
        )

    def start_zyx(self, sample: int) -> Triple:
        """Return the start of a sample's condition, which depends only on (seed, sample) and is uniform.  Pure."""
        rng = np.random.default_rng((self._seed, int(Purpose.CONDITION_POSITION), sample))
        last = [stop - size for stop, size in zip(self._box[1], self._patch_zyx, strict=True)]
        return triple(rng.integers(self._box[0], last, endpoint=True).tolist())

    def patches(self, samples: Sequence[int]) -> NDArray[Any]:
        """Return the conditions of these samples: [len(samples), Z, Y, X] in the stored dtype.  Raises DataError."""
        boxes = [box_at(self.start_zyx(sample), self._patch_zyx) for sample in samples]
        return np.stack([self.read("condition", box) for box in boxes])

    def seen(self, samples: Sequence[int], noise_std: float) -> StoredCondition:
        """Return what the network sees of the conditions of these samples.  Raises DataError."""
        if (context := self.context) is None:
            return StoredCondition(self.patches(samples)[:, None])
        starts = [*map(self.start_zyx, samples)]
        voxels = np.stack([self.read_window(context.window(start)) for start in starts])[:, None]
        noise = sample_noise(self._seed, samples, (1, *self._patch_zyx), purpose=Purpose.CONDITION_NOISE)
        return StoredCondition(voxels, Windows([*map(context.rows, starts)], noise, [noise_std] * len(samples)))


def _common_shape(
    volumes: dict[str, Volume], box: Box | None, asked_zyx: Triple | None, condition_factors: Fractions
) -> Triple | None:
    if not volumes:
        if box is not None:
            raise ConfigError(
                f"--box {format_box(box)} needs --condition or --inpaint; add one of them, or use --shape"
            )
        return asked_zyx
    factors = dict.fromkeys(volumes, ONES) | dict.fromkeys(("condition", "instances"), condition_factors)
    named, anchor = next(iter(volumes.items()))
    first, shape = f"--{named}", covered_shape(anchor.shape_zyx, factors[named])
    if asked_zyx is not None and box is None:
        first, shape = "--shape", asked_zyx
    for name, volume in volumes.items():
        option, by = f"--{name}", factors[name]
        if not all(map(fits, shape, volume.shape_zyx, by)):
            scaled = "" if by == ONES else f" with the factors of the training run, {format_sizes(by)}"
            raise ConfigError(
                f"The shapes of {first} and {option} do not match{scaled}: {format_sizes(shape)} and "
                f"{format_sizes(volume.shape_zyx)}; give volumes (or levels, PATH@LEVEL) of the same region"
            )
        if name == named or anchor.geometry is None or volume.geometry is None:
            continue
        found = align(anchor, volume, option)
        if (found.factors, found.offsets) != (ONES if named == "condition" else by, ZEROS):
            raise ConfigError(
                f"--{named} and {option} are not aligned: {found.describe()} "
                f"({describe_geometry(anchor)} and {describe_geometry(volume)}); give volumes of the same region"
            )
    if box is not None and not is_inside(box, shape):
        raise ConfigError(f"--box {format_box(box)} is not inside {first} ({format_sizes(shape)}); change --box")
    return shape
