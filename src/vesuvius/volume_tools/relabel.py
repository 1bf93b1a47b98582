"""Changed copies of labels: deformed, thickened, torn, brought into contact, with instances kept exact.  Pure.

Voxels are moved, never mixed: each has the class and the instance of one voxel of the input, except where an instance
grows into class 0 or leaves class 0 behind.  No id is invented.  Needs scipy.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from vesuvius.errors import ConfigError
from vesuvius.volume_tools import measures
from vesuvius.volume_tools.measures import Faces, Labels, Mask, Topology

log = logging.getLogger(__name__)

Displacement = NDArray[np.float32]

_LEAST_STRETCH = 0.1  # of the Jacobian determinant of a map; at 0 it folds
_LEAST_SQUARE = 1e-35  # of a map before it is scaled; float32 rounds smaller ones to others or to 0
_SLAB = 16  # z planes moved at once
_ROUNDS = 16  # of counts and moves for contacts
_PLACES = 100  # tried in each round, at least
_LEAST_FOUND = 0.03  # of the places of a round, below which it is the last one
_FACES_PER_COLUMN = 1.8
_SLOPE = 0.5  # of the shift of a sheet that is pressed against another one, in voxels per voxel
_RADII = (8.0, 24.0)  # voxels that it is shifted around a place
_SPECK = 0.02  # largest share of an instance in a part that rounding cut off, which is given away
_TRIES = 20  # places tried for each tear
_FAILURES = 10  # tears in a row, after which no more are tried
_TEAR_WIDTH = 4.0
_RANGES = {
    **dict.fromkeys(("deform", "bend", "within"), (0, 10_000)),
    "deform_length": (1, 10_000),
    "contact": (0, 1),
    "thicken": (-100, 100),
}


@dataclass(frozen=True)
class Changes:
    """Changes of labels, done in this order; lengths in voxels."""

    deform: float = 0.0  # root mean square displacement of a smooth random map of the box onto itself
    deform_length: float = 32.0  # correlation length of the map
    bend: float = 0.0  # root mean square displacement of another one, as long as half the box
    thicken: float = 0.0  # instances grow by it into class 0; negative: they shrink
    tear: int = 0  # strips cut out across instances
    contact: float = 0.0  # neighbors come within `within` voxels on at least this share of the surface between them
    within: float = 6.0


@dataclass(frozen=True)
class Changed:
    """Changed labels in the dtypes of the input, and counts of before and after as plain JSON."""

    classes: Labels | None
    instances: Labels | None
    report: dict[str, Any]


def change_labels(classes: Labels | None, instances: Labels | None, changes: Changes, seed: int) -> Changed:
    """Change integer labels (Z, Y, X); the result depends only on the arguments.

    Thickening and moves that would split an instance are not done, nor tears that would not.

    Args:
        classes: 0 where there is nothing; None = there are only instances.
        instances: an id per body or sheet, 0 where there is none; None = unknown, which `deform` and `bend` allow.

    Raises ConfigError: the map would fold, there are no instances to change, ids are negative, an instance has voxels
    of class 0, or a change is out of range.
    """
    given = instances if classes is None else classes
    assert given is not None
    check_changes(changes, instances is not None)
    if classes is not None and instances is not None and (bad := np.count_nonzero((instances != 0) & (classes == 0))):
        raise ConfigError(f"{bad} voxels of class 0 have an instance; give them a class, or take their instance away")
    rng = [np.random.default_rng((seed, purpose)) for purpose in range(4)]
    by = displacement(given.shape, changes.deform, [changes.deform_length] * 3, rng[0])
    by += displacement(given.shape, changes.bend, [size / 2 for size in given.shape], rng[1])
    _check_folds(by, changes)
    report: dict[str, Any] = {}
    new_classes, new_instances = None if classes is None else moved(classes, by), None
    if instances is not None:
        ids, numbers = _numbered(instances)
        if ids.min() < 0:
            raise ConfigError(f"The instance {ids.min()} is negative; number instances from 1, 0 = none")
        before, near = measures.topologies(numbers), measures.facing(numbers)
        numbers = moved(numbers, by)
        del by
        work = _Work(new_classes if new_classes is not None else (numbers != 0).view(np.uint8), numbers, dict(before))
        work.drop_specks()
        work.known = measures.topologies(work.instances)
        if changes.thicken:
            work.thicken(changes.thicken)
        work.tear_all(changes.tear, rng[2])
        if changes.contact:
            work.bring_together(changes.contact, changes.within, rng[3])
        new_instances = ids[numbers]
        report = work.report(ids, before, (near, measures.facing(numbers)), changes.within)
        if changes.contact:
            _tell_contacts(report["instances"], work.pressed, changes)
    if classes is not None and new_classes is not None:
        report["classes"] = _class_rows("before", classes) + _class_rows("after", new_classes)
    return Changed(new_classes, new_instances, report)


def check_changes(changes: Changes, has_instances: bool) -> None:
    """Raise ConfigError if a change is out of range, or needs instances that there are not."""
    for name, (low, high) in _RANGES.items():
        if not low <= (value := getattr(changes, name)) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} is not between {low} and {high}; change it")
    if changes.deform_length != Changes.deform_length and not changes.deform:
        raise ConfigError(f"--deform-length {changes.deform_length:g} has no effect without --deform; add --deform 4")
    if 0 < abs(changes.thicken) < 1:
        raise ConfigError(f"--thicken {changes.thicken:g} is less than a voxel, so it changes nothing; use 1 or more")
    if needing := [name for name in ("thicken", "tear", "contact") if getattr(changes, name) and not has_instances]:
        raise ConfigError(f"--{needing[0]} changes instances, but there are only classes; add --instances VOLUME")


# ---- maps of the box onto itself


def displacement(
    shape_zyx: Sequence[int], rms: float, lengths: Sequence[float], rng: np.random.Generator
) -> Displacement:
    """Random smooth displacement (3, Z, Y, X) in voxels with a Gaussian correlation; voxel x has the label of x + it.

    A sum of cosines, and of sines along the axis of the component, so that no voxel crosses a face of the box.
    """
    by = np.zeros((3, *shape_zyx), np.float32)
    for axis in range(3) if rms else ():
        terms, waves = np.ones((1, 1, 1)), []
        for other, (size, length) in enumerate(zip(shape_zyx, lengths, strict=True)):
            first = int(other == axis)
            modes = np.arange(first, max(first, math.ceil(1.43 * size / length)) + 1)  # beyond, below 1 %
            phases = np.pi / size * np.outer(modes, np.arange(size) + 0.5)
            power = np.where(modes, 2, 1) * np.exp(-np.square(np.pi * length / size * modes) / 2)
            waves.append((np.sin if first else np.cos)(phases).astype(np.float32))
            terms = terms * np.sqrt(power).reshape(-1, *[1] * (2 - other))
        part = (rng.standard_normal(terms.shape) * terms).astype(np.float32)
        for wave in waves:  # einsum alone: a BLAS rounds differently with another number of threads
            part = np.einsum("abc,ax->bcx", part, wave)
        by[axis] = part
    square = np.mean(np.square(by), dtype=np.float64)
    if rms and square < _LEAST_SQUARE:
        raise ConfigError(f"{list(shape_zyx)} voxels are too few for a map as smooth; lower --deform-length")
    return by * np.float32(rms / math.sqrt(3 * square)) if rms else by


def moved(labels: Labels, by: Displacement) -> Labels:
    """Labels (Z, Y, X) after a displacement: each voxel has the label of the one nearest to its source."""
    out, last = np.empty_like(labels), np.reshape(labels.shape, (3, 1, 1, 1)) - 1
    for z in range(0, len(labels), _SLAB):
        part = by[:, z : z + _SLAB]
        source = np.rint(
            part + np.indices(part.shape[1:], np.float32) + np.array([z, 0, 0], np.float32).reshape(3, 1, 1, 1)
        )
        out[z : z + _SLAB] = labels[tuple(np.clip(source, 0, last).astype(np.intp))]
    return out


def _check_folds(by: Displacement, changes: Changes) -> None:
    """Raise ConfigError if the map x + by(x) folds, or nearly."""
    for axis in (axis for axis in (1, 2, 3) if by.shape[axis] == 1):
        by = by.repeat(2, axis)
    for z in range(0, by.shape[1] - 1, _SLAB):
        part = by[:, z : z + _SLAB + 1]
        cells = (slice(None), *(slice(size - 1) for size in part.shape[1:]))
        edges = zip(np.eye(3, dtype=np.float32), (1, 2, 3), strict=True)
        a, b, c = (np.diff(part, axis=axis)[cells] + unit.reshape(3, 1, 1, 1) for unit, axis in edges)
        if (a * np.cross(b, c, axis=0)).sum(0).min(initial=1) < _LEAST_STRETCH:
            asked = [f"--{name} {by:g}" for name in ("deform", "bend") if (by := getattr(changes, name))]
            remedy = f"raise --deform-length {changes.deform_length:g}" if changes.deform else "choose a larger --box"
            raise ConfigError(f"{' and '.join(asked)} voxels would fold the labels; lower them, or {remedy}")


# ---- changes of instances


@dataclass
class _Work:
    """Labels while they are changed in place; instances are numbered from 1, 0 = none."""

    classes: Labels
    instances: NDArray[np.int32]
    known: dict[int, Topology]  # of each instance, as it is or should be
    torn: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)  # not thickened
    pressed: int = 0  # places at which neighbors were brought together

    def clear(self, where: Mask) -> None:
        self.instances[where] = 0
        self.classes[where] = 0

    def drop_specks(self) -> None:
        """Give small parts that an instance did not have before to what is around them."""
        specks = np.zeros(self.instances.shape, np.bool_)
        for number, box in enumerate(ndimage.find_objects(self.instances), start=1):
            if box is not None:
                parts, _ = ndimage.label(self.instances[box] == number, np.ones((3, 3, 3)))
                sizes = np.bincount(parts.ravel())[1:]
                extra = np.argsort(-sizes, kind="stable")[self.known[number].components :]
                specks[box] |= np.isin(parts, 1 + extra[sizes[extra] <= _SPECK * sizes.sum()])
        if specks.any():
            source = tuple(index[specks] for index in measures.nearest(~specks))
            self.instances[specks], self.classes[specks] = self.instances[source], self.classes[source]

    def thicken(self, voxels: float) -> None:
        """Grow into free voxels nearest to an instance, or shrink; except for an instance that this would break."""
        if not self.instances.any():
            return
        instances, classes = self.instances.copy(), self.classes.copy()
        if voxels > 0:
            to = measures.nearest(instances != 0)
            where = (measures.distance(to) <= voxels) & (classes == 0)
            source = tuple(index[where] for index in to)
            self.instances[where], self.classes[where] = instances[source], classes[source]
        else:
            self.clear((instances != 0) & ~measures.peeled(instances, -voxels))
        self.drop_specks()
        after = measures.topologies(self.instances)
        self.kept = {number for number, found in self.known.items() if _is_broken(found, after.get(number))}
        self.known |= {number: after[number] for number in self.known.keys() - self.kept}
        if self.kept:
            numbers = sorted(self.kept)
            self.clear(np.isin(self.instances, numbers))
            where = np.isin(instances, numbers)
            self.instances[where], self.classes[where] = instances[where], classes[where]

    def tear_all(self, count: int, rng: np.random.Generator) -> None:
        """Cut strips, until many in a row split no instance."""
        cut = failed = 0
        for _ in range(count):
            done = self.tear(rng)
            cut, failed = cut + done, 0 if done else failed + 1
            if failed == _FAILURES:
                break
        if cut < count:
            log.warning("%d of %d strips were cut out; the others split no instance", cut, count)

    def tear(self, rng: np.random.Generator) -> bool:
        """Cut a wavy strip across an instance, in a random direction along its surface at a random voxel."""
        voxels = np.flatnonzero(self.instances)
        for start in rng.choice(voxels, _TRIES) if len(voxels) else ():
            at = np.unravel_index(start, self.instances.shape)
            number, (turn, phase) = int(self.instances[at]), rng.uniform(0, 2 * np.pi, 2)
            around = np.argwhere(self.instances[_box(at, 8, self.instances.shape)] == number)
            total = around.sum(0)  # of integers, exact: a flat sheet has no direction of its own, and rounding none
            normal, *along = np.linalg.eigh(len(around) * around.T @ around - np.outer(total, total))[1].T
            across = np.cos(turn) * along[0] + np.sin(turn) * along[1]
            box = ndimage.find_objects(self.instances, number)[number - 1]
            mask = self.instances[box] == number
            wave = np.sin(_along(np.cross(normal, across), box, at) * (np.pi / 4 / _TEAR_WIDTH) + phase)
            strip = mask & (abs(_along(across, box, at) + _TEAR_WIDTH * wave) <= _TEAR_WIDTH / 2)
            parts, _ = ndimage.label(strip, np.ones((3, 3, 3)))
            inside = parts[tuple(i - part.start for i, part in zip(at, box, strict=True))]
            strip = parts == inside
            left = measures.topology(mask & ~strip)
            if inside and left.components > self.known[number].components:
                self.instances[box][strip] = self.classes[box][strip] = 0
                self.known[number] = left
                self.torn.add(number)
                return True
        return False

    def bring_together(self, share: float, within: float, rng: np.random.Generator) -> None:
        """Press neighbors against each other at random places, until enough of the surface between them is near."""
        for _ in range(_ROUNDS):
            faces, gained, pressed = measures.facing(self.instances), 0.0, self.pressed
            far = np.flatnonzero(faces.gaps > within)
            needed = len(far) - (1 - share) * len(faces.gaps) - 1e-9
            places = max(_PLACES, len(faces.gaps) // 1000)
            for n in rng.choice(far, places) if needed > 0 else ():
                ends = faces.ends[:, :, n][:: rng.choice((-1, 1))]
                columns = self._press(ends, within, rng) or self._press(ends[::-1], within, rng)
                gained += _FACES_PER_COLUMN * columns
                self.pressed += columns > 0
                if gained >= needed:
                    break
            if self.pressed - pressed <= _LEAST_FOUND * places:
                break
        self.known = measures.topologies(self.instances)

    def _press(self, ends: NDArray[np.int32], within: float, rng: np.random.Generator) -> int:
        """Shift columns of the instance at one voxel through free voxels, along the axis nearest to the other voxel.

        Around the voxel it comes as near to what is ahead as a random gap up to `within`.  Returns how many more
        columns have a near neighbor; 0, and nothing moved, if none, or if its topology would change.
        """
        number, step = self.instances[tuple(ends[0])], ends[1] - ends[0]
        axis = int(abs(step).argmax())
        turn, most = int(np.sign(step[axis])), 2 * (abs(step[axis]) - 1)
        at, shape = (np.delete(of, axis).tolist() for of in (ends[0], self.instances.shape))
        radius = most / (2 * _SLOPE) + rng.uniform(*_RADII)
        box = _box(at, math.ceil(radius) + 1, shape)
        instances, classes = (np.moveaxis(of, axis, 2)[box][..., ::turn] for of in (self.instances, self.classes))
        parts, _ = ndimage.label(instances == number, np.ones((3, 3, 3)))
        own = parts == parts[..., ::turn][(*(a - part.start for a, part in zip(at, box, strict=True)), ends[0][axis])]
        there, size, z = own.any(2), own.shape[2], np.arange(own.shape[2])
        first, last = own.argmax(2), size - 1 - own[..., ::-1].argmax(2)
        busy = (instances != 0) | (classes != 0)
        ahead, behind = busy & (z > last[..., None]), busy & (z < first[..., None])
        front = np.where(ahead.any(2), ahead.argmax(2), size) - last - 1
        back = first - np.where(behind.any(2), size - 1 - behind[..., ::-1].argmax(2), -1) - 1
        near_axis = sum(np.square(g - c) for g, c in zip(np.ogrid[box], at, strict=True)) <= radius**2
        movable = near_axis & (own.sum(2) == last - first + 1) & (first > 0)  # what a face cuts stays there
        limit = np.where(movable, np.clip(front - rng.integers(int(within) + 1), 0, most), 0.0)
        limit[~there] = np.inf
        for _ in range(math.ceil(most / _SLOPE)):
            limit = np.minimum(limit, ndimage.minimum_filter(limit, 3) + _SLOPE)
        by = np.where(there, limit, 0).astype(np.intp)
        sides = (front, ahead.any(2), -1), (back, behind.any(2), 1)
        near = [sum(np.count_nonzero(has & (gap + d * sign <= within)) for gap, has, sign in sides) for d in (0, by)]
        source, mask = np.maximum(z - by[..., None], 0), instances == number
        new, new_classes = (np.take_along_axis(of, source, 2) for of in (own, classes))
        if number == 0 or near[1] <= near[0] or measures.topology(mask & ~own | new) != measures.topology(mask):
            return 0
        instances[own] = classes[own] = 0
        instances[new], classes[new] = number, new_classes[new]
        return int(near[1] - near[0])

    def report(
        self, ids: Labels, before: dict[int, Topology], faces: tuple[Faces, Faces], within: float
    ) -> dict[str, Any]:
        """Counts of before and after; instances by id."""

        def named(numbers: Iterable[int]) -> list[int]:
            return [int(ids[number]) for number in sorted(numbers)]

        changed = {number for number, found in self.known.items() if found.components != before[number].components}
        rows = []
        for when, known, one in zip(("before", "after"), (before, self.known), faces, strict=True):
            gaps = [gap for gap, _ in measures.approaches(one).values()]
            total = Topology(*(sum(each) for each in zip(*known.values(), Topology(0, 0, 0), strict=True)))
            near = {f"within_{within:g}": sum(gap <= within for gap in gaps), "touching": sum(gap < 1 for gap in gaps)}
            row = {"instances": when, "count": len(known), **total._asdict(), "pairs": len(gaps), **near}
            rows.append({**row, "facing_within": float((one.gaps <= within).mean()) if gaps else 0.0})
        return {
            "instances": rows,
            "lost": named(before.keys() - self.known.keys()),
            "torn": named(self.torn),
            "other_parts": named(changed - self.torn),
            "not_thickened": named(self.kept),
        }


def _tell_contacts(rows: Sequence[dict[str, Any]], pressed: int, changes: Changes) -> None:
    """Log the share of the surface between neighbors that is near, before and after, and what --contact missed."""
    before, after = (row["facing_within"] for row in rows)
    text = f"of the surface between neighbors is within {changes.within:g} voxels, before {before:.1%}"
    if not rows[1]["pairs"]:
        log.warning("no two instances are neighbors, so --contact changes nothing")
    elif after < changes.contact:
        log.warning(f"{after:.1%} {text}; no place was found to bring more together, so try --thicken")
    elif not pressed:
        log.warning(f"{after:.1%} {text}; --contact changes nothing, so raise it or lower --within")
    else:
        log.info(f"{after:.1%} {text}")


def _box(center: Sequence[int], radius: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """The voxels around a center along each axis, clipped."""
    return tuple(
        slice(max(0, int(c) - radius), min(size, int(c) + radius + 1)) for c, size in zip(center, shape, strict=True)
    )


def _is_broken(before: Topology, after: Topology | None) -> bool:
    """Whether an instance is in more parts than before, or gone."""
    return after is None or after.components > before.components


def _along(direction: NDArray[np.float64], box: tuple[slice, ...], origin: Sequence[int]) -> NDArray[np.float64]:
    """Coordinate of the voxels of a box along a direction."""
    total: NDArray[np.float64] = sum(d * (g - o) for d, g, o in zip(direction, np.ogrid[box], origin, strict=True))
    return total


def _numbered(labels: Labels) -> tuple[Labels, NDArray[np.int32]]:
    """The labels by number, 0 first, and the number of each voxel's label."""
    found = np.unique(labels)
    found = found[found != 0]
    numbers = (np.searchsorted(found, labels) + 1) * (labels != 0)
    return np.concatenate([np.zeros(1, labels.dtype), found]), numbers.astype(np.int32)


def _class_rows(when: str, classes: Labels) -> list[dict[str, Any]]:
    """Voxels and topology of each class but 0."""
    labels, numbers = _numbered(classes)
    voxels, found = np.bincount(numbers.ravel()), measures.topologies(numbers).items()
    about = [{"class": labels[n].item(), "voxels": int(voxels[n]), **each._asdict()} for n, each in found]
    return [{"classes": when, **row} for row in about]
