"""A volume on disk equals one in memory, with the same bits for any workers, order of tasks and number of kills."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.generate.volume.fields import (
    active_voxels,
    box_noise,
    drawn,
    exact_estimate,
    falling,
    field_levels,
    filled,
    runner_of,
    tiled,
)
from tests.support.forked import in_child
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.diffusion.sampler import NoiseLevel, sample
from vesuvius.errors import NonFiniteError, VesuviusError
from vesuvius.generate.volume.passes import START, STEP, SamplingJob, block_noise, make_passes
from vesuvius.generate.volume.run import state_bytes
from vesuvius.generate.volume.steps import State, active_blocks
from vesuvius.predict import ray_workers
from vesuvius.predict.progress import ProgressReporter
from vesuvius.predict.tasks import BlockArray, RollingRun, delete_unflushed
from vesuvius.predict.tiling import even_tiling
from vesuvius.training.stop import StopRequest
from vesuvius.volumes.box import slices

PATCH = (4, 6, 6)
TILING = even_tiling((7, 13, 12), PATCH, 0.5)
ALL = ((0, 0, 0), TILING.shape_zyx)
FIELD = falling(1.5)
LEVELS = field_levels(FIELD, PATCH, 4)
ESTIMATE = exact_estimate(FIELD, PATCH)


def job(method: str = "dpmpp2m", *, batch_size: int = 1, **options: object) -> SamplingJob:
    return SamplingJob(TILING, batch_size, 7, LEVELS, method, **options)  # type: ignore[arg-type]


def first_noise() -> torch.Tensor:
    return box_noise(7, START, 0, TILING, ALL)[None, None]


@pytest.mark.parametrize("method", ["dpmpp2m", "ddim", "ddpm", "heun"])
def test_passes_over_files_equal_a_sampler_with_tiles_in_memory(tmp_path: Path, method: str) -> None:
    found = drawn(job(method, batch_size=4), tmp_path, ESTIMATE)
    expected = sample(
        tiled(TILING, ESTIMATE),
        LEVELS,
        first_noise(),
        method,  # type: ignore[arg-type]
        step_noise=lambda k: box_noise(7, STEP, k - 1, TILING, ALL)[None, None],
    )
    np.testing.assert_allclose(
        found, expected[0, 0].numpy(), atol=2e-5
    )  # matrices of other batch sizes round otherwise
    last = "00007" if method == "heun" else "00004"  # which takes two passes per step, and one for the last
    assert sorted(path.name for path in tmp_path.iterdir()) == [last], "older states are deleted"
    assert not (tmp_path / last / "tiles").exists()
    np.testing.assert_array_equal(BlockArray(tmp_path / last / "x", TILING).read(ALL), found)


def test_noise_is_white_and_depends_only_on_seed_step_and_block() -> None:
    wide = even_tiling((8, 12, 18), PATCH, 0.25)
    np.testing.assert_array_equal(block_noise(7, STEP, 3, wide, 0), block_noise(7, STEP, 3, TILING, 0))
    # block 1, 1, 1 is the 10th of 12 here, and the 8th of 12 there, where it is cut
    here, there = (block_noise(7, STEP, 3, t, b) for t, b in ((wide, 10), (TILING, 9)))
    assert wide.block_index(10) == TILING.block_index(9) == (1, 1, 1)
    np.testing.assert_array_equal(here[:3], there)
    draws = {block_noise(*key, wide, block).numpy().tobytes() for key in ((7, 1, 3), (7, 1, 4), (7, 2, 3), (8, 1, 3))
             for block in range(12)}  # fmt: skip
    assert len(draws) == 4 * 12
    many = torch.stack([block_noise(1, START, 0, even_tiling((4, 6, 6000), PATCH, 0.0), b) for b in range(1000)])
    assert float(many.mean()) == pytest.approx(0, abs=0.01)
    assert float(many.std()) == pytest.approx(1, abs=0.01)
    covariance = torch.cov(many.flatten(1).T)
    assert float((covariance - torch.eye(len(covariance))).abs().max()) < 0.2, "5 sigma is 0.16"


def test_any_order_of_tasks_gives_the_same_bits(tmp_path: Path) -> None:
    expected = drawn(job(batch_size=3), tmp_path / "in order", ESTIMATE)
    runner, rng = runner_of(job(batch_size=3), tmp_path / "mixed", ESTIMATE), random.Random(0)
    blocks, batches = list(range(TILING.blocks)), list(range(-(-TILING.tiles // 3)))
    for block in rng.sample(blocks, len(blocks)):
        runner.write_block(-1, block)
    for number in range(4):
        for batch in rng.sample(batches, len(batches)):
            runner.evaluate_tiles(number, batch)
        for block in rng.sample(blocks, len(blocks)):
            runner.write_block(number, block)
    np.testing.assert_array_equal(State(tmp_path / "mixed", TILING, 4).x.read(ALL), expected)


def killed_after(renames: int, before: bool, act: Callable[[], object]) -> None:
    """Act until so many files have got, or are about to get, their names; then die of SIGKILL."""
    replace, left = Path.replace, [renames]

    def counting(self: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] == 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = replace(self, target)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = counting  # type: ignore[method-assign]
    act()


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_process_killed_repeatedly_gives_the_same_bits(tmp_path: Path, kills: int) -> None:
    work = job("ddpm", batch_size=2)
    expected = drawn(work, tmp_path / "once", ESTIMATE)
    rng, died = random.Random(kills), 0
    folder = tmp_path / "killed"
    for _ in range(kills):
        renames, before = rng.randint(1, 350 // kills), rng.random() < 0.5
        code = in_child(lambda: killed_after(renames, before, lambda: drawn(work, folder, ESTIMATE)))  # noqa: B023
        died += code < 0
    assert died == kills, "each has died before the end"
    np.testing.assert_array_equal(drawn(work, folder, ESTIMATE), expected)


@pytest.mark.long
@pytest.mark.parametrize("deadly", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ray_actors_give_the_same_bits_and_are_replaced_unless_they_keep_dying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadly: bool
) -> None:
    expected = drawn(job(), tmp_path / "one", ESTIMATE)
    victim = tmp_path / "victim"

    def dying(x: torch.Tensor, level: NoiseLevel) -> tuple[torch.Tensor, torch.Tensor]:
        if deadly or (level == LEVELS[2] and not victim.exists()):
            victim.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ESTIMATE(x, level)

    told: list[tuple[int, int]] = []
    progress = ProgressReporter(on_progress=lambda what, done, total: told.append((done, total)))
    if deadly:
        monkeypatch.setattr(ray_workers, "_RETRIES", 0)  # each takes the start of an actor
        with pytest.raises(VesuviusError, match=r"killed its worker 1 time.*run the same command again to resume"):
            drawn(job(), tmp_path / "two", dying, workers=2)
        return
    np.testing.assert_array_equal(drawn(job(), tmp_path / "two", dying, workers=2, progress=progress), expected)
    assert victim.exists()
    assert told == [(n + 1, 4 * TILING.tiles) for n in range(4 * TILING.tiles)]


def test_a_stop_keeps_finished_tiles_and_the_next_call_resumes(tmp_path: Path) -> None:
    expected = drawn(job(), tmp_path / "once", ESTIMATE)
    calls = [0]

    def counting(x: torch.Tensor, level: NoiseLevel) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += 1
        return ESTIMATE(x, level)

    class Stop(StopRequest):
        def is_requested(self) -> bool:
            if calls[0] >= 50:
                self.request(75, "SIGTERM")
            return self.exit_code is not None

    folder = tmp_path / "stopped"
    with pytest.raises(VesuviusError, match="sampling stopped") as stopped:
        drawn(job(), folder, counting, progress=ProgressReporter(Stop(None)))
    assert stopped.value.exit_code == 75
    assert calls[0] == 50
    np.testing.assert_array_equal(drawn(job(), folder, counting), expected)
    assert calls[0] == 4 * TILING.tiles, "no tile is computed twice"


def test_tiles_are_recomputed_after_a_crash_of_the_machine(tmp_path: Path) -> None:
    expected = drawn(job(), tmp_path / "once", ESTIMATE)
    folder = tmp_path / "crashed"
    runner, state = runner_of(job(), folder, ESTIMATE), State(folder, TILING, 0)
    for block in range(TILING.blocks):
        runner.write_block(-1, block)
    state.tiles.file(3).parent.mkdir()
    # its name has reached the disk, and its voxels have not
    state.tiles.file(3).write_bytes(bytes(4 * math.prod(PATCH)))
    (folder / "boot").write_text("another")
    delete_unflushed(folder, "*/tiles")
    np.testing.assert_array_equal(drawn(job(), folder, ESTIMATE), expected)


def test_a_state_is_deleted_only_after_the_next_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stamp(stat: os.stat_result) -> tuple[int, int]:
        return stat.st_ino, stat.st_mtime_ns  # numbers of files that are deleted are used again

    flushed, deleted, flush, delete = set(), [], os.fsync, State.delete

    def flushing(descriptor: int) -> None:
        flush(descriptor)
        flushed.add(stamp(os.fstat(descriptor)))

    def deleting(state: State) -> None:
        after = State(tmp_path, TILING, state.step + 1)
        paths = [path for path in after.path.rglob("*") if not path.match("tiles*")]
        fields = 2 if 0 <= state.step < 2 else 1
        assert len(paths) == fields * (1 + TILING.blocks)
        assert all(stamp(path.stat()) in flushed for path in paths)
        deleted.append(state.step)
        delete(state)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(State, "delete", deleting)
    drawn(job(), tmp_path, ESTIMATE)
    assert deleted == [-1, 0, 1, 2, 3]


def write_known(folder: Path, values: np.ndarray) -> None:
    field = BlockArray(folder / "known", TILING)
    for block in range(TILING.blocks):
        box = TILING.block_box(block)
        field.write(block, values[tuple(slice(lo, hi) for lo, hi in zip(*box, strict=True))])


def test_blocks_are_active_within_half_a_patch_of_a_gap() -> None:
    rng = np.random.default_rng(0)
    for patch, shape in (((4, 6, 6), (11, 25, 19)), ((1, 3, 5), (2, 7, 11))):
        tiling = even_tiling(shape, patch, 0.5)
        gaps = rng.random(shape) < 0.004
        found = active_blocks(tiling, lambda box: gaps[slices(box)], ProgressReporter())  # noqa: B023
        for block in range(tiling.blocks):
            lo, hi = tiling.block_box(block)
            near = tuple(slice(max(0, a - p // 2), b + p // 2) for a, b, p in zip(lo, hi, patch, strict=True))
            assert (block in found) == gaps[near].any()
        assert 0 < len(found) < tiling.blocks


def test_rounds_of_a_volume_on_disk_equal_those_in_memory(tmp_path: Path) -> None:
    known = torch.randn(TILING.shape_zyx, generator=torch_generator(5, Purpose.NOISE))
    known[4:6, 9:11, 3:5] = torch.nan
    live, tiles = active_voxels(TILING, known.isnan())
    assert not live.all(), "some blocks are too far from the gap"
    work = job("dpmpp2m", inpaint=True, rounds=3)
    write_known(tmp_path, known.numpy())
    passes = make_passes(LEVELS, "dpmpp2m", rounds=3)
    assert len(passes) == 12
    expected = filled(passes, tiled(TILING, ESTIMATE, tiles), first_noise()[0, 0], known, live)
    np.testing.assert_allclose(drawn(work, tmp_path, ESTIMATE), expected.numpy(), atol=1e-4)


def test_a_nonfinite_estimate_is_refused_with_its_tile(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"NaN .* for tile z 0:4, y 0:6, x \d:\d in sampling pass 0"):
        drawn(job(), tmp_path, lambda x, level: (torch.full_like(x, torch.nan), x))


def test_planning_and_starting_a_volume_takes_constant_memory(tmp_path: Path) -> None:
    """A byte per block would be 450 MiB here; what is kept per tile of an axis is a MB."""
    edge, peaks = 10_000, []
    for attempt in map(str, range(3)):  # threads that other tests left may allocate meanwhile, so the least counts
        tracemalloc.start()
        try:
            work = SamplingJob(even_tiling((edge,) * 3, (8, 16, 16), 0.5), 4, 1, LEVELS, "dpmpp2m")
            every = range(work.tiling.blocks)
            on_disk = state_bytes(work, every, 1)
            state = State(tmp_path / attempt, work.tiling, 1)
            state.x.write(0, np.zeros((8, 16, 16), np.float32))
            rolling = RollingRun(work, state.tiles, 1, every, State(tmp_path / attempt, work.tiling, 2).x.has)
            found = list(itertools.islice(rolling.run(every, 16, lambda tasks: iter(tasks)), 64))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert all(task.kind == "tiles" for task in found[:9])
    assert on_disk >= 2 * edge**3 * 4
    assert min(peaks) < 8 * 2**20
