"""A synthetic scroll for demos, tests and benchmarks, in place of a real volume.

A spiral of papyrus sheets around a wandering umbilicus, crushed by smooth noise, with gaps, touching sheets,
delaminated layers, two crossed fiber layers per sheet, CT noise, and masked air outside.  Content is a pure function of
(seed, shape, voxel coordinates): it uses only hashes of coordinates and exactly rounded arithmetic, so chunk size,
order of writing and machine do not change a voxel.  Only `write_phantom` does I/O, in the layout of published scrolls.
"""

import math
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.volume_tools.partial import PartialCopy, check_name, has_partial, is_finished, partial_path
from vesuvius.volume_tools.pyramid import Pyramid
from vesuvius.volumes.box import Box, triple
from vesuvius.volumes.geometry import Geometry

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]
Coords = NDArray[np.int64]
Key = tuple[int, ...]

PITCH_VOXELS = 12.0  # from sheet to sheet, before the crush
ARC_VOXELS = 38  # about pi x pitch; an integer, so that arc lengths of far windings stay exact
RIM_PITCHES = 0.4  # unmasked air around the outermost sheet
TABLE = 512  # period in voxels of the texture tables along the sheet and along z; a power of two
DEPTHS = 12  # fiber tables across one pitch; a multiple of 4
PAPYRUS_INTENSITY, GAP_INTENSITY = 128.0, 62.0
NOISE_INTENSITY = 20.0  # standard deviation before the point spread, which reduces it to 23 %
SLAB = 16  # z planes computed at once, so that temporaries stay in the CPU's cache

UNIT_VARIANCE = 1.4443281 / 6  # normalizes cubic B-spline noise, per axis, averaged over the cell
# atan(a) / 2 pi on [0, 1] as an odd polynomial, minimax fit, error below 3e-7 turns
TURN_POLYNOMIAL = (0.15915132, -0.05293857, 0.03080291, -0.01852984, 0.00837908, -0.00186516)

# Streams: the second word of every hash key after the seed
FIBERS, GAPS, CENTER, CRUSH, WAVE, MOTTLE, CT_NOISE = range(7)


def _mix(h: NDArray[np.uint32]) -> None:
    """Scramble in place (32-bit finalizer of MurmurHash3), so that neighboring inputs give unrelated outputs."""
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)


def _white(key: Key, zs: Coords, ys: Coords, xs: Coords) -> Float32:
    """White noise (z, y, x), mean 0, variance 1, at integer coordinates: a sum of four hashed bytes, near Gaussian."""
    per_axis = []
    for axis, coords in enumerate((zs, ys, xs)):
        salt = np.random.SeedSequence((*key, axis)).generate_state(1, np.uint32)
        h = (coords & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0x9E3779B1) + salt
        _mix(h)
        per_axis.append(h)
    h = per_axis[0][:, None, None] + per_axis[1][:, None] + per_axis[2]
    _mix(h)
    sums = h & np.uint32(0x00FF00FF)  # sums two pairs of bytes at once
    h >>= np.uint32(8)
    h &= np.uint32(0x00FF00FF)
    sums += h
    noise: Float32 = ((sums & np.uint32(0xFFFF)) + (sums >> np.uint32(16))).astype(np.float32)
    noise -= np.float32(510)
    noise *= np.float32(1 / math.sqrt((256**2 - 1) / 3))
    return noise


def _smooth(key: Key, spacing_zyx: tuple[float, float, float], zs: Coords, ys: Coords, xs: Coords) -> Float32:
    """Smooth noise (z, y, x), mean 0, variance about 1: cubic B-splines over a hashed lattice.

    Coordinates increase by 1.  Only the lattice nodes around them are computed, so memory is independent of the volume.
    """
    nodes, firsts, weights = [], [], []
    for coords, spacing in zip((zs, ys, xs), spacing_zyx, strict=True):
        position = coords / spacing
        cell = np.floor(position).astype(np.int64)
        f = position - cell
        g, f2 = 1 - f, f * f  # products, not powers: pow() differs between machines
        f3 = f2 * f
        taps = np.stack([g * g * g, 3 * f3 - 6 * f2 + 4, 3 * (f + f2 - f3) + 1, f3])
        nodes.append(np.arange(cell[0] - 1, cell[-1] + 3))
        firsts.append(cell - cell[0])
        weights.append((taps * UNIT_VARIANCE).astype(np.float32))
    field = _white(key, *nodes)
    for axis in (2, 1, 0):  # z last, because the long axis in memory is cheapest
        shape = [1, 1, 1]
        shape[axis] = -1
        blended = field.take(firsts[axis], axis) * weights[axis][0].reshape(shape)
        for tap in (1, 2, 3):
            blended += field.take(firsts[axis] + tap, axis) * weights[axis][tap].reshape(shape)
        field = blended
    return field


def _brush(key: Key, index: int, length_s: int, length_z: int) -> Float32:
    """Periodic noise (TABLE s, TABLE z) of unit variance: white noise after three box filters along each axis."""
    side = np.arange(TABLE)
    smeared = _white(key, np.array([index]), side, side)[0].astype(np.float64)
    power = 1.0
    for length in (length_z, length_s):
        box = np.ones(length, np.int64)
        power *= float((np.convolve(np.convolve(box, box), box) ** 2).sum())
        for _ in range(3):
            sums = np.concatenate([smeared[:, -length:], smeared], axis=1).cumsum(axis=1)
            smeared = sums[:, length:] - sums[:, :-length]
        smeared = np.ascontiguousarray(smeared.T)
    unit: Float32 = (smeared / math.sqrt(power)).astype(np.float32)
    return unit


@lru_cache(maxsize=2)  # 0.3 s to make
def _texture_tables(seed: int) -> UInt8:
    """Flat uint8 (DEPTHS + 2, s, z), 128 + 32 per standard deviation; s runs along the winding.

    First the fibers by depth (along z in the middle half of the depths, along s in the others), then the width of the
    gaps between sheets, then that of the seams within sheets.
    """
    tables = np.empty((DEPTHS + 2, TABLE, TABLE), np.uint8)
    for depth in range(DEPTHS):
        along_z = DEPTHS // 4 <= depth < DEPTHS * 3 // 4
        fiber = _brush((seed, FIBERS), depth, *((2, 30) if along_z else (30, 2)))
        fiber += _brush((seed, FIBERS), DEPTHS + depth, *((5, 14) if along_z else (14, 5)))  # fiber bundles
        tables[depth] = _quantize(fiber * np.float32(math.sqrt(0.5)))
    tables[DEPTHS] = _quantize(_brush((seed, GAPS), 0, 24, 36))
    tables[DEPTHS + 1] = _quantize(_brush((seed, GAPS), 1, 16, 28))
    tables.setflags(write=False)
    return tables.ravel()


def _quantize(values: Float32) -> UInt8:
    steps: UInt8 = np.clip(values * 32 + np.float32(128.5), 0, 255).astype(np.uint8)
    return steps


def _turns(dy: Float32, dx: Float32) -> Float32:
    """atan2(dy, dx) / 2 pi in [-0.5, 0.5], with exactly rounded operations only, so identical on every machine."""
    ay, ax = np.abs(dy), np.abs(dx)
    a = np.minimum(ay, ax) / np.maximum(np.maximum(ay, ax), np.float32(1e-6))
    a2 = a * a
    t = np.full_like(a, TURN_POLYNOMIAL[-1])
    for coefficient in TURN_POLYNOMIAL[-2::-1]:
        t *= a2
        t += np.float32(coefficient)
    t *= a
    t = np.where(ay > ax, np.float32(0.25) - t, t)
    t = np.where(dx < 0, np.float32(0.5) - t, t)
    angle: Float32 = np.copysign(t, dy)
    return angle


def _blur(voxels: Float32, axis: int) -> Float32:
    """Point spread of the scanner along one axis: weights 1/4, 1/2, 1/4; shortens the axis by 2."""
    moved = np.moveaxis(voxels, axis, 0)
    out = moved[:-2] + moved[2:]
    out *= np.float32(0.25)
    out += moved[1:-1] * np.float32(0.5)
    return np.moveaxis(out, 0, axis)


class Phantom:
    """The scroll of a (seed, shape): 3.5 MiB of texture tables, and any box of voxels on demand.  Pure."""

    def __init__(self, seed: int, shape_zyx: Triple) -> None:
        _, ny, nx = shape_zyx
        self._seed = seed
        self._shape_zyx = shape_zyx
        squeeze = math.sqrt(min(max(ny / nx, 1 / 1.6), 1.6))  # flattens the scroll in a flat field, up to 1.6 : 1
        self._scale_yx = (1 / squeeze, squeeze)
        self._radius = 0.49 * max(ny / squeeze, nx * squeeze)
        self._windings = max(round(self._radius / PITCH_VOXELS), 2)
        self._tables = _texture_tables(seed)

    def box(self, start_zyx: Triple, stop_zyx: Triple) -> tuple[UInt8, NDArray[np.uint16]]:
        """The voxels (z, y, x) of the half-open box [start, stop).

        Returns intensities, uint8, 0 = masked air, 1..255 elsewhere; and the winding of each voxel of papyrus, uint16,
        1 = the innermost, 0 = gap or air.  Sheets that touch have different numbers.  They change where the angle does,
        from the umbilicus towards -x.
        """
        zs, ys, xs = (np.arange(lo - 1, hi + 1) for lo, hi in zip(start_zyx, stop_zyx, strict=True))
        sharp = np.empty((len(zs), len(ys) - 2, len(xs) - 2), np.float32)
        kind = np.empty(sharp.shape, np.uint16)
        for z in range(0, len(zs), SLAB):
            sharp[z : z + SLAB], kind[z : z + SLAB] = self._slab(zs[z : z + SLAB], ys, xs)
        kind = kind[1:-1]
        intensity = _blur(sharp, 0)
        np.clip(intensity, 1, 255, out=intensity)
        intensity += np.float32(0.5)
        return intensity.astype(np.uint8) * (kind > 0), np.maximum(kind, 1) - np.uint16(1)

    def _slab(self, zs: Coords, ys: Coords, xs: Coords) -> tuple[Float32, NDArray[np.uint16]]:
        """Intensities blurred along y and x but not z, and kinds: 0 masked air, 1 gap, 1 + winding for papyrus.

        The coordinates have a halo of 1 at each end; the result has none in y and x.
        """
        u, turn = self._winding(zs, ys, xs)
        inside = u <= self._windings + RIM_PITCHES
        solid, fiber = self._sheets(u, turn, zs)
        solid *= (u >= 1) & (u <= self._windings)
        mottle = _smooth((self._seed, MOTTLE), (5.0, 5.0, 5.0), zs, ys, xs)
        intensity = fiber * np.float32(9)
        intensity += np.float32(PAPYRUS_INTENSITY - GAP_INTENSITY)
        intensity += mottle * np.float32(3)
        intensity += np.maximum(mottle - np.float32(3.4), 0) * np.float32(250)  # rare bright grains
        intensity *= solid
        intensity += np.float32(GAP_INTENSITY)
        intensity += _white((self._seed, CT_NOISE), zs, ys, xs) * np.float32(NOISE_INTENSITY)
        kind = inside.astype(np.uint16)
        kind += np.where(inside & (solid >= 0.5), np.floor(u), 0).astype(np.uint16)
        return _blur(_blur(intensity, 1), 2), kind[:, 1:-1, 1:-1]

    def _winding(self, zs: Coords, ys: Coords, xs: Coords) -> tuple[Float32, Float32]:
        """Spiral coordinate u, an integer between two sheets, and angle in turns [-0.5, 0.5]; both after the crush."""
        large = self._radius
        origin = np.array([0])
        offsets = []
        for axis, coords in enumerate((ys[:, None], xs)):
            wander = _smooth((self._seed, CENTER, axis), (max(64.0, large), 1, 1), zs, origin, origin)
            center = (self._shape_zyx[1 + axis] - 1) / 2 + 0.03 * min(self._shape_zyx[1:]) * wander
            offset = _smooth((self._seed, CRUSH, axis), (large, large / 2, large / 2), zs, ys, xs)
            offset *= np.float32(0.06 * large)
            offset += _smooth((self._seed, WAVE, axis), (72.0, 24.0, 24.0), zs, ys, xs) * np.float32(3)
            offset += (coords - center).astype(np.float32)
            offset *= np.float32(self._scale_yx[axis])
            offsets.append(offset)
        dy, dx = offsets
        turn = _turns(dy, dx)
        u = np.sqrt(dy * dy + dx * dx)
        u *= np.float32(1 / PITCH_VOXELS)
        u -= turn
        return u, turn

    def _sheets(self, u: Float32, turn: Float32, zs: Coords) -> tuple[Float32, Float32]:
        """Share of papyrus in [0, 1] and fiber texture of unit variance, per voxel.

        In each pitch, the gap between two sheets is at depth 1/4 and the seam between a sheet's layers at 3/4.
        """
        winding = np.floor(u + np.float32(0.25))
        depth = u + np.float32(0.25) - winding
        # Arc length pi x pitch x (winding + turn)^2; its large part is computed in integers
        along = np.floor((winding * 2 + turn) * turn * np.float32(ARC_VOXELS)).astype(np.int32)
        along += winding.astype(np.int32) ** 2 * ARC_VOXELS
        along &= TABLE - 1
        position = along * TABLE + (zs & (TABLE - 1)).astype(np.int32)[:, None, None]
        seam = depth >= 0.5
        fiber = self._look_up((depth * DEPTHS).astype(np.int32), position)
        opening = self._look_up(DEPTHS + seam.astype(np.int32), position)
        half_gap = opening * np.float32(1.6) + np.where(seam, np.float32(-1.6), np.float32(1.5))
        distance = np.abs(depth - np.where(seam, np.float32(0.75), np.float32(0.25))) * np.float32(PITCH_VOXELS)
        solid = (distance - half_gap + fiber * np.float32(0.5)) * np.float32(0.4) + np.float32(0.5)
        return np.clip(solid, 0, 1), fiber

    def _look_up(self, table: NDArray[np.int32], position: NDArray[np.int32]) -> Float32:
        values = self._tables.take(table * (TABLE * TABLE) + position).astype(np.float32)
        values -= np.float32(128)
        values *= np.float32(1 / 32)
        return values


VOXEL_UM = 7.91
MIN_SIZE_VOXELS = 16
LEVELS = 3
PHANTOM = "phantom"


def write_phantom(
    path: Path,
    shape_zyx: Triple,
    seed: int,
    *,
    chunk: int = 128,
    instances: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write a phantom and its sheet labels (OUT.labels.zarr) as OME-Zarr 0.4 groups, or resume.

    With `instances`, OUT.instances.zarr has the winding of each voxel of papyrus.  Memory is the texture tables and
    about 40 chunks for any shape of at least `MIN_SIZE_VOXELS`.  Calls `on_progress` after each chunk of any level with
    the unit, the number done and the total.

    Returns the paths of scan and labels, their shape and levels, the bytes that this process stored, and the seconds it
    took.  Raises ConfigError: the name or the chunk is wrong, or something else is at `path`; StorageError.
    """
    started = time.monotonic()
    check_name(path)
    if chunk < 8 or chunk % 2:
        raise ConfigError(f"A chunk of {chunk} voxels is not an even number of at least 8; use 128, as real scrolls do")
    ids_path = path.with_suffix(".instances.zarr")
    paths = (path, *[ids_path] * instances, path.with_suffix(".labels.zarr"))
    record = {"seed": seed, "shape_zyx": list(shape_zyx), "chunk": chunk}
    plan, phantom = Pyramid(shape_zyx, (chunk, chunk, chunk), LEVELS, 1), Phantom(seed, shape_zyx)
    if has_partial(paths[-1], PHANTOM) and not all(has_partial(each, PHANTOM) or each.exists() for each in paths[:-1]):
        shutil.rmtree(partial_path(paths[-1]))  # labels without the others, whose chunks would be skipped
    stored = done = 0
    with ExitStack() as held:
        unfinished = [each for each in paths if not is_finished(each, record, PHANTOM)]
        about = [(each, record, plan, np.dtype("u2" if each == ids_path else "u1"), 0, PHANTOM) for each in unfinished]
        targets = [held.enter_context(PartialCopy(*each, labels=each[0] == ids_path).locked()) for each in about]

        def count(size: int) -> None:
            nonlocal stored, done
            stored, done = stored + size, done + 1
            on_progress("chunks", done, todo)

        def read(box: Box) -> NDArray[Any]:
            """The voxels of the last target, after those of the others are written."""
            intensity, ids = phantom.box(*box)
            voxels: dict[Path, NDArray[Any]] = {path: intensity, ids_path: ids, paths[-1]: (ids > 0).astype(np.uint8)}
            for other in targets[:-1]:
                count(other.write(0, triple(lo // chunk for lo in box[0]), voxels[other.out]))
            return voxels[targets[-1].out]

        coarser = sum(len(each.missing(level)) for each in targets for level in range(1, LEVELS))
        todo = len(targets) * len(targets[-1].missing(0)) + coarser if targets else 0
        for target in targets[-1:]:
            target.fill(0, read, count)
        for target in reversed(targets):  # the intensities are renamed last, so their name implies that all is complete
            target.fill_coarser(count)
            target.publish(Geometry((VOXEL_UM,) * 3, (0.0, 0.0, 0.0), ("micrometer",) * 3))
    return {
        "path": paths[0],
        "labels_path": paths[-1],
        "shape_zyx": shape_zyx,
        "levels": LEVELS,
        "stored_bytes": stored,
        "seconds": time.monotonic() - started,
    }
