"""Opens arrays in HDF5 and in N5, a folder of chunks."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import one_line
from vesuvius.volume_tools.sources.files import Stored, axis_letters, geometry, refuse

log = logging.getLogger(__name__)

_UNIT_BYTES = 2**24  # decoded at once if chunks are smaller
_LISTED = 8
_ABSENT = (KeyError, OSError, RuntimeError, ValueError)  # what h5py raises for links that lead nowhere
_AXES = ("axistags", "axes", "axis_names", "axis_order", "dimension_names", "dims")  # attributes


def open_hdf5(file: Path, inside: str) -> Stored:
    """Open a dataset, which needs a name unless it is the only one of three axes or more.

    Its attribute element_size_um is z, y, x.
    """
    with suppress(ImportError):
        import_module("hdf5plugin")  # more filters
    root = _hdf5_file(file)
    name = _dataset_name(root, file, inside.strip("/"))
    data = root[name]
    if not data.shape:
        raise refuse(f"{file}:/{name}", f"it has no voxels: its shape is {data.shape}", "choose another dataset")
    files = sorted({file, *_files_of(data, set())})
    names = axis_letters(_hdf5_names(data), data.shape)
    lead = min(map(names.find, "ZYX"))
    unit = data.chunks or [1 if axis <= lead else size for axis, size in enumerate(data.shape)]
    size = _attribute(data, "element_size_um")
    voxel = geometry([] if size is None else np.ravel(size).tolist()[-3:], ["um"] * 3)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if data.is_virtual else 0

    def get(index: tuple[Any, ...]) -> NDArray[Any]:
        nonlocal root, data
        voxels: NDArray[Any] = data[index]
        if most > 0 and (there := len(os.listdir("/proc/self/fd"))) > most // 2:
            # HDF5 keeps the parts of a virtual dataset open, and reads zeros if it cannot open more.
            if there > most - 16:
                raise refuse(file, f"a slice needs more than the {most} files that may be open", "raise ulimit -n")
            data = None
            root.close()
            root = _hdf5_file(file)
            data = root[name]
        return voxels

    return Stored(files, names, data.shape, data.dtype, get, _at_once(unit, data.shape, data.dtype), voxel)


def _hdf5_file(file: Path) -> Any:
    """Open for reading.  Raises DataError that names the file."""
    try:
        return import_module("h5py").File(file, "r")
    except OSError as error:
        if isinstance(error, BlockingIOError) or "h5clear" in str(error):
            problem, remedy = "another program is writing it, or was killed", f"wait, or run h5clear -s {file}"
            raise refuse(file, f"{problem} ({one_line(error)})", remedy) from error
        raise refuse(file, f"{type(error).__name__}: {one_line(error)}", "copy it again if it is damaged") from error


def _dataset_name(root: Any, file: Path, name: str) -> str:
    """The path of a dataset: `name`, or the only one in the group of this name."""
    problem = ""
    try:
        if not hasattr(root[name or "/"], "keys"):
            return name
    except _ABSENT as error:
        name, problem = "", f"it has no dataset /{name}{_broken_link(root, name)} ({one_line(error)})"
    found = list(islice(_datasets(root[name or "/"], name, set()), _LISTED + 1))
    if len(found) == 1 and not problem:
        return found[0]
    many = f"more than {_LISTED}" if len(found) > _LISTED else len(found)
    problem = problem or f"/{name} has {many} datasets of three axes or more"
    raise refuse(file, problem, f"choose one: {', '.join(f'{file}:/{each}' for each in found[:_LISTED]) or '-'}")


def _broken_link(root: Any, name: str) -> str:
    """': /a is a link to FILE:/b' for the first link along a path that leads nowhere."""
    parts = name.split("/")
    for path in ("/".join(parts[:end]) for end in range(1, len(parts) + 1)):
        with suppress(*_ABSENT):
            link = root.get(path, getlink=True)
            try:
                root[path]
            except _ABSENT:
                target = f"{getattr(link, 'filename', '')}:{getattr(link, 'path', '')}"
                return f": /{path} is a link to {target}" if target != ":" else ""
    return ""


def _datasets(group: Any, path: str, seen: set[tuple[str, int]]) -> Iterator[str]:
    """The paths of all datasets of three axes or more, each once, also behind links, which may form cycles."""
    for key in group:
        with suppress(*_ABSENT):
            item = group[key]
            identity = os.path.realpath(item.file.filename), import_module("h5py").h5o.get_info(item.id).addr
            if identity in seen:
                continue
            seen.add(identity)
            if hasattr(item, "keys"):
                yield from _datasets(item, f"{path}/{key}".strip("/"), seen)
            elif len(getattr(item, "shape", None) or ()) > 2:
                yield f"{path}/{key}".strip("/")


def _files_of(data: Any, seen: set[tuple[Path, str]]) -> Iterator[Path]:
    """The files with the voxels of a dataset: its own, the parts of a virtual one, raw files.

    Raises DataError: one is missing, damaged or too short, or nothing was written; HDF5 would read zeros.
    """
    file = Path(data.file.filename).absolute()
    where = f"{file}:{data.name}"
    yield file
    if (file, data.name) in seen:
        return
    seen.add((file, data.name))
    if data.is_virtual:
        for part in data.virtual_sources():
            yield from _files_of_part(data, file, part, seen)
    elif data.external:
        left, prefix = data.nbytes, _prefix("HDF5_EXTFILE_PREFIX", file)
        for name, offset, size in data.external:
            raw = Path(prefix, name).absolute()
            due, left = offset + min(size, left), left - min(size, left)
            if not raw.is_file() or raw.stat().st_size < due:
                remedy = "restore it, or set HDF5_EXTFILE_PREFIX to its folder"
                raise refuse(where, f"its raw file {raw} is missing or shorter than {due} bytes", remedy)
            yield raw
    elif data.size and not data.id.get_storage_size():
        raise refuse(where, "nothing was ever written to it: no block is stored", "finish or repeat the recording")
    elif data.chunks:
        there = data.id.get_num_chunks()
        if there < (due := math.prod(-(-size // step) for size, step in zip(data.shape, data.chunks, strict=True))):
            log.warning(
                "%s: %d of %d blocks were never written, and are read as %s", where, due - there, due, data.fillvalue
            )


def _files_of_part(data: Any, file: Path, part: Any, seen: set[tuple[Path, str]]) -> Iterator[Path]:
    """The files of a mapping of a virtual dataset, which is one dataset, or a series with %b in its names."""
    numbers: Sequence[int] = [0]
    if "%b" in part.file_name + part.dset_name:
        start, stride, blocks, _ = part.vspace.get_regular_hyperslab()
        axis = max(range(data.ndim), key=blocks.__getitem__)  # the unlimited one
        first = -(-(data.shape[axis] - start[axis]) // stride[axis])  # HDF5 ends the series at a missing file
        later = [i for i in range(first, first + 1000) if _part_file(file, part.file_name.replace("%b", str(i)))]
        numbers = range(max(1, first, *(i + 1 for i in later if "%b" in part.file_name)))
    for number in numbers:
        name, inside = (each.replace("%b", str(number)).replace("%%", "%") for each in (part.file_name, part.dset_name))
        if (found := file if name == "." else _part_file(file, name)) is None:
            remedy = f"restore it in {file.parent}, or set HDF5_VDS_PREFIX to its folder"
            raise refuse(f"{file}:{data.name}", f"{name}, which holds a part of it, is missing", remedy)
        with _hdf5_file(found) as opened:
            try:
                source = opened[inside]
                fits = _covers(source.shape, part)
            except _ABSENT as error:
                problem = f"it has no dataset {inside}, a part of {file}:{data.name} ({one_line(error)})"
                raise refuse(found, problem, "restore the file") from error
            if not fits:
                problem = f"{inside} has only {source.shape} voxels, less than {file}:{data.name} takes from it"
                raise refuse(found, problem, "finish or repeat the recording, or restore the file")
            yield from _files_of(source, seen)


def _covers(shape: tuple[int, ...], part: Any) -> bool:
    """Whether a source of this shape holds all voxels that a virtual dataset takes from it."""
    with suppress(*_ABSENT):  # unlimited
        if part.src_space.get_select_type() == import_module("h5py").h5s.SEL_ALL:
            return bool(math.prod(shape) == part.vspace.get_select_npoints())
        last = part.src_space.get_select_bounds()[1]
        return len(last) == len(shape) and all(end < size for end, size in zip(last, shape, strict=True))
    return math.prod(shape) > 0


def _part_file(master: Path, name: str) -> Path | None:
    """The first file in the places where HDF5 looks for a part."""
    prefixes = [*os.environ.get("HDF5_VDS_PREFIX", "").split(":"), _prefix("HDF5_VDS_PREFIX", master)]
    folders = [*filter(None, prefixes), str(master.parent), os.getcwd(), str(master.resolve().parent)]
    searched = [Path(folder, os.path.basename(name) if os.path.isabs(name) else name) for folder in folders]
    return next((each for each in (*[Path(name)] * os.path.isabs(name), *searched) if each.is_file()), None)


def _prefix(variable: str, master: Path) -> str:
    """A folder set by the user, in which ${ORIGIN} is that of the master file."""
    value = os.environ.get(variable, "")
    return value.replace("${ORIGIN}", str(master.parent), 1) if value != "." else ""


def _hdf5_names(data: Any) -> Iterator[Any]:
    """What may name the axes: dimension labels or scales, axistags of ilastik, axes of NeXus."""
    with suppress(*_ABSENT):
        yield [each.label or (each[0].name.rpartition("/")[2] if len(each) else "") for each in data.dims]
    yield from (_attribute(data, key) for key in _AXES)
    yield _attribute(data.parent, "axes")


def _attribute(node: Any, key: str) -> Any:
    """The value of an attribute; None if absent or of a type that h5py cannot read."""
    try:
        return node.attrs.get(key)
    except (*_ABSENT, TypeError):
        return None


# ---- N5


def open_n5(folder: Path, inside: str) -> Stored:
    """Open a dataset, which needs a name unless it is the only one; stored (X, Y, Z) unless it names its axes."""
    path = folder / inside.strip("/")
    found = list(islice(_n5_datasets(path if path.is_dir() else folder), _LISTED))
    if len(found) != 1 or not path.is_dir():
        problem = f"{path} is a group of several datasets" if path.is_dir() and found else f"it has no dataset {inside}"
        listed = ", ".join(f"{folder}:/{each.relative_to(folder)}" for each in found) or "-"
        raise refuse(folder, problem, f"choose one: {listed}")
    (path,) = found
    parents = takewhile(lambda each: each != folder.parent, (path, *path.parents))
    attributes = [_attributes(each) for each in parents]
    data = _tensorstore(path, attributes[0])
    if all(data.shape) and not any(each.is_file() for each in path.glob("/".join(["[0-9]*"] * len(data.shape)))):
        raise refuse(path, "no block of it is stored", "copy the blocks, or correct the path")
    data, dtype = data.T, np.dtype(data.dtype.numpy_dtype)
    names = axis_letters(_n5_names(attributes[0]), data.shape)
    unit = _at_once(data.chunk_layout.read_chunk.shape, data.shape, dtype)
    voxel = geometry(*_n5_voxel_size(attributes, path.name, names))
    files = [path / "attributes.json"]
    return Stored(files, names, data.shape, dtype, lambda index: data[index].read().result(), unit, voxel)


def _attributes(folder: Path) -> dict[str, Any]:
    file = folder / "attributes.json"
    try:
        found = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise refuse(file, f"it is no JSON ({one_line(error)})", "restore it") from error
    return found if isinstance(found, dict) else {}


def _n5_datasets(folder: Path) -> Iterator[Path]:
    """A folder that is a dataset, else all below it."""
    if "dimensions" in _attributes(folder):
        yield folder
    else:
        inner = (each for each in sorted(folder.iterdir()) if each.is_dir() and not each.is_symlink())
        yield from (found for each in inner for found in _n5_datasets(each))


def _tensorstore(path: Path, about: dict[str, Any]) -> Any:
    """Open the dataset in a folder, hiding optional attributes, because tensorstore refuses malformed ones."""
    codec = about.get("compression")
    codec = codec.get("type") if isinstance(codec, dict) else codec
    if codec not in ("raw", "gzip", "bzip2", "xz", "blosc", "zstd"):
        raise refuse(path, f"tensorstore cannot decode its blocks, compressed with {codec}", "store them with gzip")
    library = import_module("tensorstore")
    context, memory = library.Context(), {"driver": "memory", "path": "attributes.json"}
    needed = {key: about.get(key) for key in ("dimensions", "blockSize", "dataType", "compression")}
    library.KvStore.open(memory | {"path": ""}, context=context).result()["attributes.json"] = json.dumps(needed)
    layers = [{"base": {"driver": "file", "path": f"{path.resolve()}/"}}, {"base": memory, "exact": "attributes.json"}]
    spec = {"driver": "n5", "kvstore": {"driver": "kvstack", "layers": layers}}
    return library.open(spec, read=True, context=context).result()


def _n5_names(about: dict[str, Any]) -> Iterator[Any]:
    """What may name the axes, slowest first: `axes`, fastest first like the dimensions, or `transform` of COSEM."""
    axes, transform = about.get("axes"), about.get("transform")
    yield axes[::-1] if isinstance(axes, list | str) else None
    if isinstance(transform, dict):
        axes = transform.get("axes")
        yield axes[::-1] if isinstance(axes, list) and transform.get("ordering") == "F" else axes


def _n5_voxel_size(attributes: Sequence[dict[str, Any]], level: str, names: str) -> tuple[list[Any], list[Any]]:
    """Voxel size and units z, y, x, from the attributes of a dataset and of the groups that contain it.

    `pixelResolution` or `resolution` is that of the finest level where factors of this level are given.
    """
    keys = ("pixelResolution", "resolution")
    known = ((depth, each, each[key]) for depth, each in enumerate(attributes) for key in keys if each.get(key))
    depth, about, pixel = next(known, (0, {}, []))
    if isinstance(pixel, dict):
        about, pixel = pixel, pixel.get("dimensions")
    factors = attributes[0].get("downsamplingFactors")
    if factors is None and depth:
        with suppress(IndexError, TypeError, ValueError):
            of_levels: Any = attributes[1].get("scales", attributes[1].get("downsamplingFactors"))
            factors = of_levels[int(level.removeprefix("s"))]

    def along(values: Any, default: Any = None) -> list[Any]:
        """Of values along the axes, or along x, y and z alone, fastest first, those of z, y and x."""
        values = values if isinstance(values, list) else [default if values is None else values] * 3
        letters = [letter for letter in names[::-1] if len(values) == len(names) or letter in "XYZ"]
        by_letter = dict(zip(letters, values, strict=False))
        return [by_letter.get(letter) for letter in "ZYX"]

    sizes: list[Any] = along(pixel) if isinstance(pixel, list) and pixel else [pixel] if pixel else []
    with suppress(TypeError):
        sizes = [size * factor for size, factor in zip(sizes, along(factors, 1), strict=False)]
    return sizes, along(about.get("unit", about.get("units")))


def _at_once(chunks: Sequence[int], shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Extend chunks along the last axis so that a read is worth its overhead."""
    many = max(1, _UNIT_BYTES // max(1, math.prod(chunks) * dtype.itemsize))
    return (*chunks[:-1], min(shape[-1], chunks[-1] * many))
