"""`data.*`: volumes, patches, their order, and what is held out."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat

from vesuvius.config.section import NonNegativeInt, PathText, PositiveInt, Section, SizeZYX

_SMALLEST_SHARE = Fraction(1, 10**9)  # of the regions, from one volume


class ArrayConfig(Section):
    """One array of voxels: a level of an OME-Zarr pyramid or a bare zarr array."""

    path: PathText = Field(
        description="zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://"
    )
    level: NonNegativeInt = Field(default=0, description="level of an OME-Zarr pyramid, 0 = finest; 0 for a bare array")
    select: tuple[NonNegativeInt, ...] = Field(
        default=(),
        description="indices that fix the axes before z, y, x; [0, 0] takes time 0, channel 0 of a tczyx array",
    )


class ForegroundConfig(Section):
    """What counts as foreground where `data.min_foreground` is above 0 and a volume names no mask."""

    source: Literal["chunks", "level"] = Field(
        default="chunks",
        description="chunks = chunks that are stored (sidecar or listing); level = a coarse level's voxels",
    )
    level: PositiveInt = Field(default=5, description="which level of the same pyramid, with source: level")
    threshold: float = Field(
        default=0.0, ge=0, description="grey value above which a voxel of that level is foreground"
    )


class VolumeConfig(ArrayConfig):
    """One zarr volume to draw patches from."""

    weight: float = Field(
        default=1.0, gt=0, description="share of the regions drawn from this volume, relative to the others"
    )
    mask: ArrayConfig | None = Field(
        default=None, description="volume whose nonzero voxels are foreground; placed as a condition is"
    )
    min_foreground: float | None = Field(
        default=None, ge=0, le=1, description="data.min_foreground of this entry; null = that of all"
    )
    foreground: ForegroundConfig | None = Field(
        default=None, description="data.foreground of this entry; null = that of all"
    )
    condition: ArrayConfig | None = Field(
        default=None,
        description="labels, a second scan or another level, cut at the same place as a second tensor; placed by OME "
        "scale and translation (docs/volumes.md); patches are drawn where both exist",
    )


class AugmentConfig(Section):
    """Random symmetries, drawn by the plan per sample and applied on the device."""

    flip: bool = Field(default=True, description="mirror along z, y and x at random, each with probability 1/2")
    rot90: bool = Field(
        default=True, description="rotate by 0, 90, 180 or 270 degrees in the y-x plane; needs patch y = x"
    )


class NormalizeConfig(Section):
    """Grey values to model values: low -> -1, high -> +1, linear, not clipped."""

    low: float | None = Field(
        default=None, description="grey value that becomes -1; null = 0.5th percentile of a sample"
    )
    high: float | None = Field(
        default=None, description="grey value that becomes +1; null = 99.5th percentile of a sample"
    )

    def contradictions(self) -> Iterator[str]:
        if (self.low is None) != (self.high is None):
            yield "low and high go together: set both, or neither to have them estimated"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield f"low must be below high; got low={self.low}, high={self.high}"


class ValidationConfig(Section):
    """The part of every volume that training never sees: a slab across one axis."""

    fraction: float = Field(
        default=0.05, ge=0, lt=1, description="share of the split axis held out (at least one patch); 0 = none"
    )
    gap: float = Field(
        default=1.0, ge=0, description="gap between training and validation, in patches; below 1 they may share texture"
    )


class StoreConfig(Section):
    """How chunks are fetched, from disks and from remote stores."""

    requests: PositiveInt = Field(default=16, description="requests in flight per reader on remote stores")
    outage_minutes: float = Field(
        default=60.0,
        ge=0,
        description="how long reads are retried while the network, server or mount is away; then exit 6",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="seconds without a byte after which a request counts as failed"
    )
    anonymous: bool | None = Field(
        default=None,
        description="true = send no credentials; false = always sign s3, gs and az; null = send those that are found",
    )
    forbidden_is_absent: bool = Field(
        default=False, description="treat 403 as a missing chunk, as in S3 buckets that allow reads but no listing"
    )
    cache_dir: PathText | None = Field(
        default=None, description="folder that keeps fetched chunk bytes; null = no cache"
    )
    cache_gib: float = Field(
        default=50.0, gt=0, description="limit on that folder, within 10 %, shared by all readers, GiB"
    )


class DataConfig(Section):
    """Where patches come from and in which order."""

    volumes: tuple[VolumeConfig, ...] = Field(min_length=1, description="the zarr volumes to draw from")
    patch_size: SizeZYX = Field(default=(72, 136, 136), description="voxels (z, y, x) of one training example")
    stream_gib: float = Field(
        default=1.0,
        gt=0,
        description="memory for the regions in flight, GiB; the size of regions, K and M follow from it",
    )
    resident: Literal["auto"] | NonNegativeFloat = Field(
        default="auto",
        description="keep the volumes decoded in memory from their first pass on, once for all ranks of a machine: "
        "auto = where they fit and pay; a number = up to so many GiB; 0 = never",
    )
    patches_per_region: PositiveInt | None = Field(
        default=None,
        description="K, patches cut from each region read; null = 1 to 128, by the size of a region; 1 = a region of "
        "its own for every patch",
    )
    regions_in_flight: PositiveInt | None = Field(
        default=None,
        description="M, regions that samples are mixed from, in the object store; null = 32, or 24 to 64 that fit",
    )
    regions_per_task: PositiveInt | None = Field(
        default=None, description="R, regions that a reader reads in one task; null = 1 to 8, of 128 MiB together"
    )
    region_size: SizeZYX | None = Field(
        default=None, description="voxels (z, y, x) read at once; null = from chunks and patch"
    )
    min_foreground: float = Field(
        default=0.0, ge=0, le=1, description="minimum share of foreground in every patch; 0 = patches from everywhere"
    )
    foreground: ForegroundConfig = Field(default=ForegroundConfig(), description="what is foreground")
    missing_chunk: Literal["air", "error"] = Field(
        default="air", description="missing chunks are treated as air (the fill value), or end the run with exit 6"
    )
    nan: Literal["air", "error"] | float = Field(
        default="air",
        description="what NaN and infinity are read as: air = the fill value, or 0 where that is no number; a number; "
        "error = damage",
    )
    max_quarantined: NonNegativeInt = Field(
        default=32, description="unreadable regions to replace with others; one more ends the run with exit 6"
    )
    store: StoreConfig = Field(default=StoreConfig(), description="how chunks are fetched")
    augment: AugmentConfig = Field(default=AugmentConfig(), description="random symmetries")
    normalize: NormalizeConfig = Field(default=NormalizeConfig(), description="grey values to model values")
    condition_normalize: NormalizeConfig = Field(default=NormalizeConfig(), description="grey values of the condition")
    condition_classes: PositiveInt | None = Field(
        default=None,
        description="the condition holds labels of n classes, shown as n channels of 0 and 1; null = grey values",
    )
    condition_values: tuple[int, ...] | None = Field(
        default=None, description="the stored label of each of the condition_classes, in order; null = 0 ... n-1"
    )
    validation: ValidationConfig = Field(default=ValidationConfig(), description="what is held out")

    @property
    def labels(self) -> tuple[int, ...] | None:
        """The stored label of each class; None where conditions are grey values."""
        return self.condition_values or (tuple(range(self.condition_classes)) if self.condition_classes else None)

    @property
    def condition_nan(self) -> Literal["air", "error"] | float:
        """`nan` for conditions: a number that stands for a grey value is no label."""
        return "air" if self.condition_classes and not isinstance(self.nan, str) else self.nan

    def min_foreground_of(self, volume: VolumeConfig) -> float:
        """The minimum share of foreground in the patches of an entry of `volumes`."""
        return self.min_foreground if volume.min_foreground is None else volume.min_foreground

    def with_patches_from_everywhere(self) -> Self:
        """The same without a minimum of foreground, whose map takes a while to make.  Pure."""
        volumes = tuple(volume.model_copy(update={"min_foreground": 0.0}) for volume in self.volumes)
        return self.model_copy(update={"volumes": volumes})

    def with_store(self, **changes: Any) -> Self:
        """The same with other values of `store`, which are not checked.  Pure."""
        return self.model_copy(update={"store": self.store.model_copy(update=changes)})

    def contradictions(self) -> Iterator[str]:
        if self.augment.rot90 and self.patch_size[1] != self.patch_size[2]:
            yield (
                f"augment.rot90 cannot rotate patches of {list(self.patch_size)} voxels, which are not square in y and "
                "x; set data.augment.rot90=false or make patch_size square"
            )
        total = sum(Fraction(volume.weight) for volume in self.volumes)
        for number, volume in enumerate(self.volumes):
            if Fraction(volume.weight) / total < _SMALLEST_SHARE:
                yield (
                    f"volumes[{number}].weight {volume.weight:g} is too small next to the others: less than one region "
                    f"in a billion would come from {volume.path}; raise it or remove the volume"
                )
        paired = [volume.condition is not None for volume in self.volumes]
        masks = [volume.path for volume in self.volumes if volume.mask and not self.min_foreground_of(volume)]
        if masks:
            yield (
                f"a mask has an effect only with data.min_foreground above 0; got 0 and the mask of {masks[0]}; set "
                "data.min_foreground, that of the volume, or remove the mask"
            )
        if self.condition_normalize.low is not None and (self.condition_classes or not any(paired)):
            yield (
                "condition_normalize is for conditions of grey values; got "
                f"{self.condition_normalize.low:g} to {self.condition_normalize.high:g} and "
                f"{'labels' if self.condition_classes else 'no condition'}; remove data.condition_normalize"
            )
        values = self.condition_values
        if values is not None and (len(set(values)) != len(values) or len(values) != self.condition_classes):
            yield (
                f"condition_values names a label for each class, each once; got {list(values)} and "
                f"condition_classes={self.condition_classes}; set both to as many"
            )
        if self.condition_classes and not any(paired):
            yield (
                f"condition_classes says what the volumes' conditions hold; got {self.condition_classes} and no "
                "condition; add data.volumes[].condition or remove data.condition_classes"
            )
        if any(paired) and not all(paired):
            yield "either every volume has a condition or none; add data.volumes[].condition or remove it"
