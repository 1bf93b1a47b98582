"""`data.*`: volumes, patches, their order, and the validation split."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, model_serializer, model_validator

from vesuvius.config.section import NonNegativeInt, PathText, PositiveFloat, PositiveInt, Section, SizeZYX, natural

_TIMEOUT_S = 30.0
_ONLY_ARRAYS = "channels and labels have no weight, mask or condition of their own; use ArrayConfig for them"
_SMALLEST_SHARE = Fraction(1, 10**9)  # of the regions of one volume


class ArrayConfig(Section):
    """One array of voxels: a level of an OME-Zarr pyramid or a bare zarr array."""

    path: PathText
    """zarr group or array: a folder, or an address https://, s3://, gs://, az://, hf://"""
    level: NonNegativeInt = 0
    """level of an OME-Zarr pyramid, 0 = finest; 0 for a bare array"""
    voxel_size_um: PositiveFloat | tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    """picks the level with voxels of this size, in micrometers, within 2 %: one number, or z, y, x"""
    select: tuple[NonNegativeInt, ...] = ()
    """index for each axis before z, y, x; [0, 0] takes time 0, channel 0 of a tczyx array"""
    transform: PathText | None = None
    """transform.json that places a condition, channel or mask relative to its volume, instead of OME metadata
    (docs/volumes.md): a file or an address"""
    interpolation: Literal["nearest", "linear"] | None = None
    """how a transform resamples: nearest for labels, linear for scans; null = nearest for integers and bool, linear for
    floats and channels"""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, given: Any) -> Any:
        if isinstance(given, ArrayConfig) and not isinstance(given, cls):
            return given.given  # an array as a mask or volume
        return natural({"path": given} if isinstance(given, str | os.PathLike) else given)  # JSON's lists are tuples

    def contradictions(self) -> Iterator[str]:
        if self.interpolation is not None and self.transform is None:
            yield f"interpolation of {self.path} has no effect without a transform; add one, or remove it"
        if self.voxel_size_um is not None and "level" in self.model_fields_set:
            yield f"level {self.level} and voxel_size_um {self.voxel_size_um} both pick a level; remove one"

    @model_serializer(mode="wrap")
    def _without_unused_level(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        unused = {"level"} if self.voxel_size_um is not None else set()
        return {key: value for key, value in serialize(self).items() if key not in unused}


class MaskConfig(ArrayConfig):
    """An array that marks foreground: by default its nonzero voxels."""

    labels: tuple[int, ...] = ()
    """voxels of these values are foreground; [] = all but 0"""
    ignore: tuple[int, ...] = ()
    """voxels of all values but these are foreground, 0 included; [] = all but 0"""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.labels and self.ignore:
            yield f"labels {list(self.labels)} and ignore {list(self.ignore)} exclude each other; remove one of them"


class ConditionConfig(ArrayConfig):
    """The condition of a volume."""

    context: int | None = Field(None, ge=2)
    """of a condition that is n times coarser than the volume: n = the network also sees a window of it around the
    patch, n times as long as the patch; null = only at the patch"""

    @model_validator(mode="before")
    @classmethod
    def _from_array(cls, given: Any) -> Any:
        if isinstance(given, ArrayConfig) and type(given) not in (ArrayConfig, cls):
            raise ValueError(_ONLY_ARRAYS)
        return given

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.context and self.transform:
            yield f"context of {self.path} needs an alignment by scale and translation; remove context or transform"


class ForegroundConfig(Section):
    """Definition of foreground for volumes without a mask, used if `data.min_foreground` is above 0."""

    level: PositiveInt | None = None
    """coarser level of the same pyramid whose voxels are counted; null = the stored chunks (sidecar or listing)"""
    threshold: float = Field(0.0, ge=0)
    """intensity above which a voxel of that level is foreground"""


class VolumeConfig(ArrayConfig):
    """One zarr volume to draw patches from, or several: a pattern as the path, `images/*.zarr`, is a volume for each
    match, and `{name}` in the paths of its condition and mask is the name of the match."""

    weight: float = Field(1.0, gt=0)
    """relative weight of this volume when regions are drawn"""
    mask: MaskConfig | None = None
    """its nonzero voxels are foreground; aligned like a condition"""
    min_foreground: float | None = Field(None, ge=0, le=1)
    """overrides data.min_foreground for this volume; null = no override"""
    condition: ConditionConfig | None = None
    """labels, a second scan or another level, cut at the same position as a second tensor; aligned by OME scale and
    translation (docs/volumes.md); patches come from the region that both cover"""
    channels: tuple[ArrayConfig, ...] = ()
    """only for PatchLoader: further channels of the image, aligned like a condition and each normalized by its own
    range"""
    more_labels: tuple[ArrayConfig, ...] = ()
    """only for PatchLoader: further channels of the labels, after the condition"""

    @property
    def images(self) -> tuple[ArrayConfig, ...]:
        """The arrays that are channels of the image."""
        changed = (
            {"interpolation": each.interpolation or "linear"} if each.transform else {} for each in self.channels
        )
        return (self, *(each.model_copy(update=to) for each, to in zip(self.channels, changed, strict=True)))

    @property
    def labels(self) -> tuple[ArrayConfig, ...]:
        """The arrays of the condition or labels."""
        return (*([self.condition] if self.condition else []), *self.more_labels)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.more_labels and not self.condition:
            yield "more_labels need a condition, the first of them; add it"
        if any(isinstance(each, VolumeConfig) for each in (*self.channels, *self.labels)):
            yield _ONLY_ARRAYS
        if self.transform is not None:
            yield f"transform of {self.path} has no effect: it places another array on a volume; set it in that array"


class AugmentConfig(Section):
    """Random symmetries, drawn by the plan per sample and applied on the device."""

    flip: bool = True
    """mirror along z, y and x at random, each with probability 1/2"""
    rot90: bool = True
    """rotate by quarter turns in the y-x plane; needs patch y = x"""


class NormalizeConfig(Section):
    """Intensities to model values: low -> -1, high -> +1, linear, not clipped."""

    low: float | None = None
    """intensity that becomes -1; null = 0.5th percentile"""
    high: float | None = None
    """intensity that becomes +1; null = 99.5th percentile"""

    def contradictions(self) -> Iterator[str]:
        if (self.low is None) != (self.high is None):
            yield "only one of low and high is set; set both, or neither to have them estimated"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield f"low {self.low} is not below high {self.high}; swap or change them"


class ValidationConfig(Section):
    """The held-out part of every volume: a slab across one axis, the same for all entries of one array."""

    fraction: float = Field(0.05, ge=0, lt=1)
    """share held out, at least one patch; 0 = none"""
    gap: float = Field(1.0, ge=0)
    """patches to validation; below 1, they may share texture"""


class StoreConfig(Section):
    """Reading of chunks from disks and remote stores."""

    requests: PositiveInt = 16
    """requests in flight per worker on remote stores"""
    outage_minutes: float = Field(60.0, ge=0)
    """how long reads are retried while the network, server or mount is down; then exit 6"""
    anonymous: bool | None = None
    """true = send no credentials; false = always sign requests to s3, gs and az; null = use credentials if found"""
    forbidden_is_absent: bool = False
    """treat 403 as a missing chunk, as in S3 buckets that allow reads but no listing"""
    cache_dir: PathText | None = None
    """folder that caches fetched chunks; null = no cache"""
    cache_gib: float = Field(50.0, gt=0, le=2**30)
    """size limit of the cache of all workers, GiB (within 10 %)"""

    def contradictions(self) -> Iterator[str]:
        if self.cache_dir and "://" in self.cache_dir:
            yield f"cache_dir {self.cache_dir} is an address; choose a folder on a local disk, or null for no cache"

    @property
    def timeout_s(self) -> float:
        """Seconds without data after which a request counts as failed: a retry must fit into an outage."""
        return min(_TIMEOUT_S, 30 * self.outage_minutes) or _TIMEOUT_S


class ClassWeight(Section):
    """A class that a share of the patches holds."""

    label: int
    """value of the class in the condition"""
    share: float = Field(ge=1e-6, lt=1)
    """at least this share of the patches holds a voxel of the class"""


def _as_weights(given: Any) -> Any:
    """Shares by label, `{1: 0.3}`; keys in YAML are text."""
    if not isinstance(given, Mapping):
        return natural(given)  # JSON's lists are tuples
    labels = (int(label) if re.fullmatch(r"-?\d+", str(label)) else label for label in given)
    return tuple({"label": label, "share": share} for label, share in zip(labels, given.values(), strict=True))


class DataConfig(Section):
    """Source and order of the patches."""

    volumes: tuple[VolumeConfig, ...] = Field(min_length=1)
    """the zarr volumes to draw from; a path such as images/*.zarr is one for each match"""
    patch_size: SizeZYX = (72, 136, 136)
    """voxels (z, y, x) of one training example"""
    stream_gib: float = Field(2.0, gt=0, le=2**30)
    """memory for the regions in flight of all ranks, GiB; the size of regions, K and M follow from it"""
    resident: Literal["auto"] | NonNegativeFloat = "auto"
    """keep the decoded volumes in memory after their first pass, once per machine: auto = if they fit and it saves
    time; a number = up to that many GiB; 0 = never"""
    patches_per_region: PositiveInt | None = None
    """K, patches cut from each region read; null = 1 to 128, by region size; 1 = one region per patch"""
    regions_in_flight: PositiveInt | None = None
    """M, regions from which samples are mixed; null = 64, or 32 or 24 if no more fit; each is read once if M is a
    multiple of the number of ranks"""
    min_foreground: float = Field(0.0, ge=0, le=1)
    """minimum share of foreground in every patch (an estimate for masks of more than 2^30 voxels); 0 = patches from
    everywhere"""
    foreground: ForegroundConfig = ForegroundConfig()
    """definition of foreground"""
    missing_chunk: Literal["air", "error"] = "air"
    """air = missing chunks have the fill value; error = they end the run with exit 6"""
    nan: Literal["air", "error"] | float = "air"
    """value for NaN and infinity: air = the fill value (0 if that is not finite); a number; error = treat as damage"""
    max_quarantined: NonNegativeInt = 32
    """limit on unreadable regions, which are replaced; one more ends the run with exit 6"""
    store: StoreConfig = StoreConfig()
    """how chunks are read"""
    augment: AugmentConfig = AugmentConfig()
    """random symmetries"""
    normalize: NormalizeConfig = NormalizeConfig()
    """scaling of intensities to model values"""
    condition_normalize: NormalizeConfig = NormalizeConfig()
    """the same for the condition"""
    condition_classes: Annotated[int, Field(ge=1, le=2**16)] | tuple[int, ...] | None = None
    """the condition holds labels of n classes, stored as 0 ... n-1 or as the values of a list, and encoded as n
    channels of 0 and 1; null = intensities"""
    class_weights: Annotated[tuple[ClassWeight, ...], BeforeValidator(_as_weights)] = ()
    """classes of the condition that patches hold more often than by chance; {1: 0.3} is short for [{label: 1, share:
    0.3}]"""
    validation: ValidationConfig = ValidationConfig()
    """held-out data"""

    @property
    def class_values(self) -> tuple[int, ...] | None:
        """Stored label of each class; None for conditions of intensities."""
        classes = self.condition_classes
        return tuple(range(classes)) if isinstance(classes, int) else classes

    @property
    def paths(self) -> list[str]:
        """Path or address of each array that readers open, in order; one may occur twice."""
        return [array.path for volume in self.volumes for array in (*volume.images, *volume.labels)]

    @property
    def condition_nan(self) -> Literal["air", "error"] | float:
        """`nan` for conditions: a number is an intensity, not a label."""
        return "air" if self.condition_classes and not isinstance(self.nan, str) else self.nan

    @property
    def context(self) -> int | None:
        """The `context` of the conditions."""
        first = self.volumes[0].condition
        return first.context if first else None

    def min_foreground_of(self, volume: VolumeConfig) -> float:
        return self.min_foreground if volume.min_foreground is None else volume.min_foreground

    def with_patches_from_everywhere(self) -> Self:
        """Return a copy without minimum foreground, whose map takes time to compute.  Pure."""
        volumes = tuple(volume.model_copy(update={"min_foreground": 0.0}) for volume in self.volumes)
        return self.model_copy(update={"volumes": volumes})

    def with_store(self, **changes: Any) -> Self:
        """Return a copy with other, unvalidated values of `store`.  Pure."""
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
                gives = f"gives {volume.path} less than one region in a billion"
                yield f"volumes[{number}].weight {volume.weight:g} {gives}; raise it or remove the volume"
        paired = [volume.condition is not None for volume in self.volumes]
        masks = [volume.path for volume in self.volumes if volume.mask and not self.min_foreground_of(volume)]
        if masks:
            yield f"the mask of {masks[0]} has no effect with min_foreground 0; raise it or remove the mask"
        if self.condition_normalize.low is not None and (self.condition_classes or not any(paired)):
            found = "are labels" if self.condition_classes else "is none"
            yield f"condition_normalize needs a condition of intensities, but there {found}; remove it"
        values = self.class_values
        if values is not None and (not values or len(set(values)) != len(values)):
            yield f"condition_classes {list(values)} are not distinct labels; list each class once"
        if values and not any(paired):
            yield f"condition_classes is {self.condition_classes}, but no volume has a condition; add one or remove it"
        if len({(len(volume.images), len(volume.more_labels)) for volume in self.volumes}) > 1:
            yield "the volumes have different numbers of channels or labels; give each as many, in the same order"
        labels = [each.label for each in self.class_weights]
        if labels and not all(paired):
            yield "class_weights need labels; give every volume a condition or remove data.class_weights"
        if len(set(labels)) != len(labels) or sum(each.share for each in self.class_weights) >= 1:
            yield (
                f"class_weights {', '.join(f'{each.label}: {each.share:g}' for each in self.class_weights)} are not "
                "distinct classes whose shares sum to less than 1; the rest of the patches comes from everywhere"
            )
        if all(paired) and len({each.condition.context for each in self.volumes if each.condition}) > 1:
            yield "the conditions have different contexts; set the same data.volumes[].condition.context in all"
        if any(paired) and not all(paired):
            yield "only some volumes have a condition; give every one a data.volumes[].condition, or none"
