"""Opens arrays in HDF5."""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.errors import one_line
from vesuvius.volume_tools.sources.files import Stored, axis_letters, geometry, refuse

log = logging.getLogger(__name__)

_UNIT_BYTES = 2**24  # decoded at once if chunks are smaller
_LISTED = 8
_SPARE_FILES = 64
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


def _at_once(chunks: Sequence[int], shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Extend chunks along the last axis so that a read is worth its overhead."""
    many = max(1, _UNIT_BYTES // max(1, math.prod(chunks) * dtype.itemsize))
    return (*chunks[:-1], min(shape[-1], chunks[-1] * many))
