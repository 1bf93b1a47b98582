"""First stop of a patch: open one level of a zarr volume and read boxes of it.

Reads zarr v2 and v3, sharded or not, OME-Zarr groups (levels looked up in their metadata) and bare arrays.  Chunks are
decoded by the zarrs codec pipeline where it supports the array, by zarr-python otherwise, on one thread per reader.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import blosc
from numpy.typing import NDArray

from vesuvius.config import Triple, VolumeConfig
from vesuvius.errors import DataError

SUPPORTED_DTYPES = ("uint8", "uint16", "float32")

Box = tuple[Triple, Triple]
"""(start_zyx, stop_zyx) in voxels, half open."""


@dataclass(frozen=True)
class Volume:
    """One level of one volume, opened for reading.

    Attributes:
        name: path and level as the user gave them, for messages.
        shape_zyx: voxels.
        chunk_zyx: voxels of the unit that is decoded at once (the inner chunk of a sharded array).
        dtype: stored dtype; one of uint8, uint16, float32.
        voxel_size_um: edge lengths (z, y, x) where the metadata give them in micrometres, else None.
    """

    name: str
    array: zarr.Array[Any]
    select: tuple[int, ...]
    voxel_size_um: tuple[float, float, float] | None

    @cached_property
    def shape_zyx(self) -> Triple:
        z, y, x = self.array.shape[-3:]
        return z, y, x

    @cached_property
    def chunk_zyx(self) -> Triple:
        z, y, x = self.array.chunks[-3:]
        return z, y, x

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype).newbyteorder("=")

    @property
    def fill_value(self) -> float:
        """Grey value of an absent chunk: air."""
        return float(self.array.fill_value or 0)

    @property
    def codec_pipeline(self) -> str:
        """Which library decodes the chunks: 'zarrs' or 'zarr-python'."""
        return "zarrs" if getattr(self.array.async_array.codec_pipeline, "impl", None) is not None else "zarr-python"

    def read(self, box: Box) -> NDArray[Any]:
        """Read and decode a box; absent chunks come as the fill value.

        Returns:
            array of the stored dtype, shape stop - start.

        Raises:
            DataError: a chunk cannot be read or decoded, or holds NaN or infinity; names the volume and the box.
        """
        (z0, y0, x0), (z1, y1, x1) = box
        try:
            selection: Any = (*self.select, slice(z0, z1), slice(y0, y1), slice(x0, x1))
            voxels = np.asarray(self.array[selection])
        except Exception as error:  # codecs and stores raise whatever they like; each means: this box is unreadable
            raise DataError(
                f"every chunk of a volume must be readable; got {type(error).__name__}: {one_line(error)} in volume "
                f"{self.name}, region {format_box(box)}; restore the chunk from its source or remove it (absent = air)"
            ) from error
        if voxels.dtype.kind == "f" and not np.isfinite(voxels).all():
            raise DataError(
                f"voxels must be finite; got NaN or infinity in volume {self.name}, region {format_box(box)}; "
                "write a volume without them"
            )
        return voxels.astype(self.dtype, copy=False)


def open_volume(spec: VolumeConfig) -> Volume:
    """Open what `data.volumes[]` names.  Reads metadata only.

    Raises:
        DataError: nothing there, not a zarr, no such level, not three axes z, y, x, or a dtype that is not supported.
    """
    _use_one_codec_thread()
    with warnings.catch_warnings():
        # Where zarrs does not support an array it falls back to zarr-python and warns on every open;
        # `Volume.codec_pipeline` says which one is at work, and the run's log repeats it once.
        warnings.filterwarnings("ignore", message="Array is unsupported by ZarrsCodecPipeline")
        return _open_volume(spec)


def _open_volume(spec: VolumeConfig) -> Volume:
    node = _open_node(spec.path)
    voxel_size_um = None
    if isinstance(node, zarr.Group):
        array, axes, voxel_size_um = _pick_level(node, spec)
    else:
        array, axes = node, None
        if spec.level:
            raise DataError(
                f"a bare array has level 0 only; got level {spec.level} of {spec.path}; set level to 0 or point path "
                "at the OME-Zarr group"
            )
    if not np.dtype(array.dtype).isnative:  # zarrs decodes native byte order only, and says so at the first read
        with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}):
            array = zarr.open_array(array.store_path, mode="r")
    name = spec.path if not isinstance(node, zarr.Group) else f"{spec.path} level {spec.level}"
    _check_axes(name, array, axes, spec.select)
    if np.dtype(array.dtype).newbyteorder("=").name not in SUPPORTED_DTYPES:
        raise DataError(
            f"voxels must be one of {', '.join(SUPPORTED_DTYPES)}; got {array.dtype} in {name}; convert the volume"
        )
    return Volume(name, array, spec.select, voxel_size_um)


def format_box(box: Box) -> str:
    """'z 0:128, y 0:256, x 128:256'."""
    return ", ".join(f"{axis} {lo}:{hi}" for axis, lo, hi in zip("zyx", *box, strict=True))


def one_line(error: BaseException, limit: int = 200) -> str:
    """The text of an error without line breaks, shortened."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _use_one_codec_thread() -> None:
    """Set zarr's process-wide configuration: readers are processes, so a pool of threads in each would only contend."""
    blosc.set_nthreads(1)
    settings: dict[str, Any] = {"threading.max_workers": 1, "async.concurrency": 4}
    if importlib.util.find_spec("zarrs") is not None:
        settings |= {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.chunk_concurrent_maximum": 1}
    zarr.config.set(settings)


def _open_node(path: str) -> zarr.Array[Any] | zarr.Group:
    if "://" in path:
        raise DataError(f"volumes are read from disk for now; got {path}; copy the part you need to a local zarr")
    if not Path(path).exists():
        raise DataError(f"a volume must exist; got {path}, which is not there; {_how_to_get_data(path)}")
    try:
        return zarr.open(path, mode="r")
    except FileNotFoundError as error:
        raise DataError(
            f"a volume must be a zarr array or group; got {path}, which is neither; point path at the "
            "zarr itself (it holds .zarray, .zgroup or zarr.json)"
        ) from error
    except Exception as error:  # malformed metadata and unknown codecs raise many types
        raise DataError(
            f"a volume's metadata must be readable; got {type(error).__name__}: {one_line(error)} in {path}; check its "
            "codec and metadata, or install the codec's package"
        ) from error


def _how_to_get_data(path: str) -> str:
    return (
        f"write a synthetic scroll there with `vesuvius volume synth {path}`, download a real one (its address is in "
        'configs/exp001_full.yaml), or name another: "data.volumes=[{path: PATH.zarr, level: 0}]"'
    )


def _pick_level(
    group: zarr.Group, spec: VolumeConfig
) -> tuple[zarr.Array[Any], list[str] | None, tuple[float, float, float] | None]:
    """The array of one level of an OME-Zarr group, its axis names, and its voxel size where given in micrometres."""
    attributes: Any = group.attrs.asdict()
    ome = attributes.get("ome", attributes)  # OME-Zarr 0.5 nests its metadata under "ome", 0.4 does not
    try:
        multiscale = ome["multiscales"][0]
        datasets = list(multiscale["datasets"])
        paths = [str(dataset["path"]) for dataset in datasets]
        axes = [axis if isinstance(axis, str) else dict(axis) for axis in multiscale.get("axes", [])]
    except (KeyError, IndexError, TypeError) as error:
        arrays = ", ".join(sorted(name for name, _ in group.arrays())) or "none"
        raise DataError(
            f"a group must be an OME-Zarr with multiscales metadata, or path must name an array in it; got the group "
            f"{spec.path} without them (arrays in it: {arrays}); set path to {spec.path.rstrip('/')}/ARRAY"
        ) from error
    if spec.level >= len(paths):
        raise DataError(
            f"level must be one of 0..{len(paths) - 1}; got {spec.level} of {spec.path}; change data.volumes[].level"
        )
    try:
        array = group[paths[spec.level]]
    except Exception as error:
        raise DataError(
            f"each level in the metadata must exist; got {type(error).__name__}: {one_line(error)} for level "
            f"{spec.level} ({paths[spec.level]!r}) of {spec.path}; copy the missing level or choose another"
        ) from error
    if not isinstance(array, zarr.Array):
        raise DataError(f"a level must be an array; got a group at {spec.path}/{paths[spec.level]}; check its metadata")
    names = [axis if isinstance(axis, str) else str(axis.get("name")) for axis in axes] or None
    return array, names, _voxel_size_um(axes, datasets[spec.level])


def _voxel_size_um(axes: list[Any], dataset: Any) -> tuple[float, float, float] | None:
    units = [axis.get("unit") if isinstance(axis, dict) else None for axis in axes[-3:]]
    for transform in dataset.get("coordinateTransformations", []):
        if transform.get("type") == "scale" and units == ["micrometer"] * 3:
            z, y, x = (float(scale) for scale in transform["scale"][-3:])
            return z, y, x
    return None


def _check_axes(name: str, array: zarr.Array[Any], axes: list[str] | None, select: tuple[int, ...]) -> None:
    leading = array.ndim - 3
    axes_text = f"axes {', '.join(axes)}" if axes else f"{array.ndim} axes"
    if leading < 0:
        raise DataError(
            f"a volume has three axes z, y, x; got {axes_text} of shape {array.shape} in {name}; stack its slices into "
            "one array (Z, Y, X)"
        )
    if axes is not None and axes[-3:] != ["z", "y", "x"]:
        raise DataError(
            f"a volume needs axes z, y, x as its last three; got {axes_text} of shape "
            f"{array.shape} in {name}; rewrite it in that order"
        )
    if len(select) != leading:
        raise DataError(
            f"a volume has three axes z, y, x, and `select` fixes each axis before them; got {axes_text} of shape "
            f"{array.shape} in {name} with select={list(select)}; set data.volumes[].select to {leading} "
            f"{'index' if leading == 1 else 'indices'}, e.g. {[0] * leading}"
        )
    for index, size in zip(select, array.shape, strict=False):
        if index >= size:
            raise DataError(
                f"select must lie inside the array; got {list(select)} for shape {array.shape} in {name}; lower it"
            )
