"""Opens arrays in HDF5 and in N5, a folder of chunks."""

import json
import logging
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.errors import one_line
from vesuvius.volume_tools.sources.files import Stored, axis_letters, geometry, refuse
from vesuvius.volumes.box import triple
from vesuvius.volumes.geometry import VOXELS, Geometry

log = logging.getLogger(__name__)

_UNIT_BYTES = 2**24  # decoded at once if chunks are smaller
_LISTED = 8
_SPARE_FILES = 64
_ABSENT = (KeyError, OSError, RuntimeError, ValueError)  # what h5py raises for links that lead nowhere
_AXES = ("axistags", "axes", "axis_names", "axis_order", "dimension_names", "dims")  # attributes


def is_hdf5(file: Path) -> bool:
    """Whether a file is HDF5, as those of MATLAB 7.3 (after 512 bytes of its own) and NetCDF 4 are, or named so."""
    with file.open("rb") as stream:
        head = stream.read(520)
    return file.suffix.lower() in (".h5", ".hdf5", ".hdf", ".nxs") or b"\x89HDF\r\n\x1a\n" in (head[:8], head[512:])


def open_hdf5(file: Path, inside: str) -> Stored:
    """Open a dataset, by name unless only one has three axes or more; its attribute element_size_um is z, y, x."""
    with suppress(ImportError):
        import_module("hdf5plugin")  # more filters
    root = _hdf5_file(file)
    name = _dataset_name(root, file, inside.strip("/"))
    data = root[name]
    if not data.shape:
        raise refuse(f"{file}:/{name}", f"it has no voxels: its shape is {data.shape}", "choose another dataset")
    files = sorted(set(_files_of(data, set())))
    (soft, hard), due = resource.getrlimit(resource.RLIMIT_NOFILE), len(files) + _SPARE_FILES
    if 0 <= hard < due:  # HDF5 keeps all parts open, and reads zeros if it cannot
        raise refuse(file, f"it has {len(files)} files, but only {hard} may be open", "raise ulimit -n")
    if 0 <= soft < due:
        resource.setrlimit(resource.RLIMIT_NOFILE, (due, hard))
    names = axis_letters(_hdf5_names(data), data.shape)
    lead = min(map(names.find, "ZYX"))
    unit = data.chunks or [1 if axis <= lead else size for axis, size in enumerate(data.shape)]
    size = _attribute(data, "element_size_um")
    voxel = geometry(None if size is None else np.ravel(size).tolist()[-3:], "um")
    return Stored(files, names, data.shape, data.dtype, data.__getitem__, _at_once(unit, data.shape, data.dtype), voxel)


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
        problem = f"it has no dataset /{name} ({one_line(error)})"
        with suppress(*_ABSENT, AttributeError):
            problem += f", but a link to {root.get(name, getlink=True).filename}"
        name = ""
    found = list(islice(_datasets(root[name or "/"], name, set()), _LISTED + 1))
    if len(found) == 1 and not problem:
        return found[0]
    many = f"more than {_LISTED}" if len(found) > _LISTED else len(found)
    problem = problem or f"/{name} has {many} datasets of three axes or more"
    raise refuse(file, problem, f"choose one: {', '.join(f'{file}:/{each}' for each in found[:_LISTED]) or '-'}")


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
    """The files with the voxels of a dataset: its own, and the parts of a virtual one.

    Raises DataError: one is missing, damaged or too short, or nothing was written; HDF5 would read zeros.
    """
    file = Path(data.file.filename).absolute()
    where = f"{file}:{data.name}"
    yield file
    if (file, data.name) in seen:
        return
    seen.add((file, data.name))
    if data.is_virtual:
        if os.environ.get("HDF5_VDS_PREFIX"):
            raise refuse(where, "HDF5_VDS_PREFIX hides its parts", "unset it and put them next to the file")
        for part in data.virtual_sources():
            with _hdf5_file(_part_file(file, where, part.file_name)) as opened:
                if (source := opened.get(part.dset_name)) is None:
                    problem = f"it has no dataset {part.dset_name}, a part of {where}"
                    raise refuse(opened.filename, problem, "restore the file")
                if not _covers(source.shape, part):
                    problem = f"{part.dset_name} has only {source.shape} voxels, less than {where} takes from it"
                    raise refuse(opened.filename, problem, "finish or repeat the recording, or restore the file")
                yield from _files_of(source, seen)
        with suppress(*_ABSENT):  # unlimited: the parts give the shape
            if (gaps := data.size - sum(part.vspace.get_select_npoints() for part in data.virtual_sources())) > 0:
                words = "%s: %d of %d voxels belong to no part, and are read as %s"
                log.warning(words, where, gaps, data.size, data.fillvalue)
    elif data.external:
        remedy = "import these with --shape and --dtype, or copy it with h5repack"
        raise refuse(where, f"its voxels are in other files ({data.external[0][0]}, ...)", remedy)
    elif data.size and not data.id.get_storage_size():
        raise refuse(where, "nothing was ever written to it: no block is stored", "finish or repeat the recording")
    elif data.chunks:
        due = math.prod(-(-size // step) for size, step in zip(data.shape, data.chunks, strict=True))
        if absent := due - data.id.get_num_chunks():
            log.warning(
                "%s: %d of %d blocks were never written, and are read as %s", where, absent, due, data.fillvalue
            )


def _part_file(master: Path, where: str, name: str) -> Path:
    """The first file in the places where HDF5 looks for a part.  Raises DataError if there is none."""
    if name == ".":
        return master
    folders = master.parent, Path.cwd(), master.resolve().parent
    places = [folder / name for folder in folders]
    if os.path.isabs(name):
        places = [Path(name), *(folder / Path(name).name for folder in folders)]
    if found := [each for each in places if each.is_file()]:
        return found[0]
    raise refuse(where, f"{name}, which holds a part of it, is missing", f"restore it in {master.parent}")


def _covers(shape: tuple[int, ...], part: Any) -> bool:
    """Whether a source of this shape holds all voxels that a virtual dataset takes from it."""
    with suppress(*_ABSENT):  # unlimited
        if part.src_space.get_select_type() == import_module("h5py").h5s.SEL_ALL:
            return bool(math.prod(shape) == part.vspace.get_select_npoints())
        last = part.src_space.get_select_bounds()[1]
        return len(last) == len(shape) and all(end < size for end, size in zip(last, shape, strict=True))
    return math.prod(shape) > 0


def _hdf5_names(data: Any) -> Iterator[Any]:
    """Possible names of the axes: dimension labels or scales, axistags of ilastik, axes of NeXus."""
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
    about = _attributes(path)
    data = _tensorstore(path, about)
    if all(data.shape) and not any(each.is_file() for each in path.glob("/".join(["[0-9]*"] * len(data.shape)))):
        raise refuse(path, "no block of it is stored", "copy the blocks, or correct the path")
    data, dtype = data.T, np.dtype(data.dtype.numpy_dtype)
    names = axis_letters(_n5_names(about), data.shape)
    unit = _at_once(data.chunk_layout.read_chunk.shape, data.shape, dtype)
    voxel = _n5_voxel_size(about, names[::-1])
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
    """Possible names of the axes, slowest first: `axes`, fastest first like the dimensions, or `transform` of COSEM."""
    axes, transform = about.get("axes"), about.get("transform")
    yield axes[::-1] if isinstance(axes, list | str) else None
    if isinstance(transform, dict):
        axes = transform.get("axes")
        yield axes[::-1] if isinstance(axes, list) and transform.get("ordering") == "F" else axes


def _n5_voxel_size(about: dict[str, Any], names: str) -> Geometry:
    """Voxel size by `pixelResolution` or `resolution`, times `downsamplingFactors`; `names` are fastest first."""
    pixel = about.get("pixelResolution") or about.get("resolution") or {}
    described = pixel if isinstance(pixel, dict) else about | {"dimensions": pixel}
    voxel = geometry(described.get("dimensions"), described.get("unit", described.get("units")), names)
    factors = about.get("downsamplingFactors")
    if voxel == VOXELS or factors is None:
        return voxel
    return replace(
        voxel, scale_zyx=triple(np.multiply(voxel.scale_zyx, geometry(factors, None, names).scale_zyx).tolist())
    )


def _at_once(chunks: Sequence[int], shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Extend chunks along the last axis so that a read is worth its overhead."""
    many = max(1, _UNIT_BYTES // max(1, math.prod(chunks) * dtype.itemsize))
    return (*chunks[:-1], min(shape[-1], chunks[-1] * many))
