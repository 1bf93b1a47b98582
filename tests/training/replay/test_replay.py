"""Steps that were not finite: what is recorded and kept of them, and that a replay is the same step again."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tests.conftest import textured, write_array
from tests.support.small_disk import small_disk
from tests.training.stand_ins import FixedMachine, StillStream, run_context
from tests.training.step.test_conditioning import write_group
from vesuvius.commands import train
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, NonFiniteError, StorageError
from vesuvius.monitor.clock import HostClock
from vesuvius.runlog.records import read_records
from vesuvius.runlog.step_times import StepTimes
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.checkpoint.data_facts import DataFacts
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.replay.file import ReplayWriter, read_nonfinite_step
from vesuvius.training.replay.replay import replay
from vesuvius.training.reporting.report import Launched, StepReporter
from vesuvius.training.step.conditioning import Conditioner, volume_scalars
from vesuvius.training.step.device import DeviceFeed
from vesuvius.training.step.network import build_network
from vesuvius.training.step.step import TrainStep
from vesuvius.training.validation.data_spectrum import measure_spectrum

CPU = torch.device("cpu")
WriteConfig = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("of_two_micro_batches")


class LateClock(HostClock):
    """Steps are finished two steps late, as a GPU's are that the host runs ahead of."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[StepTimes] = []

    def finished(self, wait: bool = False) -> list[StepTimes]:
        self._late += super().finished()
        count = len(self._late) if wait else max(len(self._late) - 2, 0)
        done, self._late = self._late[:count], self._late[count:]
        return done


@dataclass
class Session:
    """The steps of a run, with neither checkpoints nor validation."""

    config: Config
    directory: Path
    clock: HostClock = field(default_factory=HostClock)
    replays: Path | None = None
    kept: list[weakref.ref[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.data: PreparedData = prepare_data(config.seed, config.data)
        greys, scalars = self.data.grey_ranges(config.data), volume_scalars(config, self.data)
        spectrum = measure_spectrum(self.data, config.data, greys, self.data.read)
        schedule = Schedule.from_config(config.diffusion, spectrum)
        self.step = TrainStep(config, build_network(config, CPU), schedule, CPU)
        conditioner = Conditioner(config.data.labels, greys.conditions, scalars, CPU)
        self._options = StreamOptions.from_config(config.training, config.cluster)
        self._feed = DeviceFeed(CPU, self._options, self.data.job, greys.volumes, conditioner)
        replays = self.replays or self.directory / "nonfinite"
        self.writer = ReplayWriter(replays, config, DataFacts.of(self.data, greys, spectrum, scalars), self.step)
        run = run_context(config, self.directory)
        self.reporter = StepReporter(run, self.clock, StillStream(self._options), FixedMachine(), self.writer)

    def run(self, steps: int) -> None:
        """Raises NonFiniteError as a run does."""
        config = self.config
        with self._feed.open():
            for number in range(steps):
                batches = []
                timesteps = stratified_timesteps(config.seed, number, config.global_batch, config.diffusion.timesteps)
                for t in np.split(timesteps, config.training.accumulate_steps):
                    batch = self._feed.next(self.clock)
                    self.step.accumulate(batch.x_0, batch.indices, t, batch.condition)
                    batches.append((batch.stored, t))
                    self.kept.append(weakref.ref(batch.stored.patches))
                result = self.step.apply(1e-3)
                self.clock.step_done()
                self.reporter.launched(Launched(number + 1, number * config.global_batch, 1e-3, result, batches))
                del batches, batch
                self.reporter.report()
            self.reporter.report(wait=True)

    def events(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.directory / "metrics.jsonl") if record["kind"] == "event"]


def spoil(path: Path, data: PreparedData, sample: int, value: float) -> None:
    """Give one voxel of a sample this value: one that none of the other first 32 samples sees."""
    starts = [data.plan.sample(index).start_zyx for index in range(32) if index != sample]
    first, size = data.plan.sample(sample).start_zyx, data.plan.patch_zyx
    inside = (np.add(first, offset) for offset in np.ndindex(*size))
    voxel = next(v for v in inside if not any(((v >= s) & (v < np.add(s, size))).all() for s in starts))
    array: Any = zarr.open_array(str(path), mode="r+")
    array[tuple(voxel)] = value


def spoiled_config(
    tiny_config: WriteConfig, sample: int = 6, value: float = 1e30, dtype: str = "float32", **sections: Any
) -> Config:
    """A config on a volume of floats in which one voxel of one sample is spoiled.

    1e30 overflows float32 when squared in the loss: a real infinity.
    """
    path = write_array(Path("floats.zarr").absolute(), textured((96, 128, 128), dtype=dtype))
    data = {
        "volumes": [{"path": str(path)}],
        "normalize": {"low": 0.0, "high": 200.0},
        "augment": {"contrast": 0.2, "brightness": 0.1},
    }
    config = read_config(tiny_config(data=data, **sections))
    spoil(path, prepare_data(config.seed, config.data), sample, value)
    return config


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stop_at_bad_step(config: Config, steps: int = 4) -> tuple[Session, NonFiniteError]:
    session = Session(config, Path.cwd())
    with pytest.raises(NonFiniteError) as error:
        session.run(steps)
    return session, error.value


def test_one_bad_sample_among_four_is_the_one_that_is_named(
    tiny_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = spoiled_config(tiny_config)  # sample 6 is the third of step 2
    session, error = stop_at_bad_step(config)
    (event,) = session.events()
    timesteps = stratified_timesteps(config.seed, 1, 4, 1000).tolist()
    assert (event["step"], event["samples"], event["cause"], event["offending"]) == (2, [4, 8], "loss", [6])
    assert (event["indices"], event["timesteps"]) == ([4, 5, 6, 7], timesteps)
    assert [loss is None for loss in event["losses"]] == [False, False, True, False]
    assert (event["loss"], event["replay"]) == (None, "nonfinite/step_00000002.pt")
    assert f"samples 4 to 7, not finite in 6 (t {timesteps[2]})" in caplog.text
    assert error.step == 2
    assert "vesuvius train --replay" in str(error)


@pytest.mark.parametrize(("amp", "dtype"), [("off", "float32"), ("bf16", "float32"), ("off", "float64")])
def test_a_replay_is_the_same_step_bit_by_bit(tiny_config: WriteConfig, amp: str, dtype: str) -> None:
    session, _ = stop_at_bad_step(spoiled_config(tiny_config, dtype=dtype, training={"amp": amp}))
    replayed = replay(Path("nonfinite/step_00000002.pt"))
    assert [loss if math.isfinite(loss) else None for loss in replayed.outcome.losses] == session.events()[0]["losses"]
    assert replayed.exit_code == 5
    assert replayed.fault is not None
    assert replayed.fault.samples == [6]
    assert replayed.fault.module in dict(session.step.network.named_modules())
    assert 1e27 < replayed.fault.input_max < 1e31, "the spoiled voxel, once normalized and noised"
    assert 0 < len(replayed.bad_gradients) <= replayed.parameters
    assert read_nonfinite_step(Path("nonfinite/step_00000002.pt")).later_steps == 0


def test_a_replay_needs_no_data_and_knows_conditions_and_scalars(tiny_config: WriteConfig, tmp_path: Path) -> None:
    voxels = textured((96, 128, 128), dtype="uint16")
    scan = write_group(tmp_path / "scan.zarr", voxels, [8.0] * 3)
    grey = write_group(tmp_path / "grey.zarr", voxels // 2, [8.0] * 3)
    config = read_config(
        tiny_config(
            data={"volumes": [{"path": str(scan), "condition": {"path": str(grey)}}], "augment": {"contrast": 0.5}},
            model={"scalars": ["voxel_size"]},
        )
    )
    session = Session(config, tmp_path)
    session.run(2)
    # A step that is finite may be kept as well: here is what its losses were.
    path, losses = _keep_step_3(session)
    scan.rename(tmp_path / "elsewhere.zarr")
    replayed = replay(path)
    assert replayed.outcome.losses == losses
    assert replayed.exit_code == 0
    assert replayed.stored.patches.dtype == torch.uint16
    assert "finite now" in replayed.lines()[-1]


def _keep_step_3(session: Session) -> tuple[Path, tuple[float, ...]]:
    config = session.config
    timesteps = stratified_timesteps(config.seed, 2, config.global_batch, config.diffusion.timesteps)
    with session._feed.open(first=8):
        batches = [session._feed.next(session.clock) for _ in range(2)]
    parts = list(zip(batches, np.split(timesteps, 2), strict=True))
    path = session.writer.write(3, 1e-3, 1.0, [(batch.stored, t) for batch, t in parts], 0)
    for batch, t in parts:
        session.step.accumulate(batch.x_0, batch.indices, t, batch.condition)
    assert path is not None
    return path, session.step.apply(1e-3).read().losses


def test_a_replay_in_float32_tells_that_it_was_the_precision(tiny_config: WriteConfig) -> None:
    # A model value of 3e5: more than fp16 holds, whose largest number is 65504, and little for float32.
    config = spoiled_config(tiny_config, value=3e7, training={"amp": "fp16"})
    _, _ = stop_at_bad_step(config)
    path = Path("nonfinite/step_00000002.pt")
    again = replay(path)
    assert again.exit_code == 5
    assert again.fault is not None
    assert again.fault.samples == [6]
    assert again.fault.module in dict(build_network(config, CPU).named_modules())
    assert 0 < again.fault.input_max < math.inf
    assert f"{again.fault.module}, sample 6; largest finite |x|" in "\n".join(again.lines())
    assert replay(path, ["training.amp=off"]).exit_code == 0


def test_a_gradient_that_is_not_finite_is_told_from_a_loss(tiny_config: WriteConfig) -> None:
    session = Session(read_config(tiny_config()), Path.cwd())
    hook = next(session.step.network.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match="samples 0 to 3, each with a finite loss"):
        session.run(1)
    hook.remove()
    (event,) = session.events()
    assert (event["cause"], event["offending"], event["grad_norm"]) == ("gradient", [], None)
    replayed = replay(Path("nonfinite/step_00000001.pt"))
    assert list(replayed.outcome.losses) == event["losses"]
    assert replayed.exit_code == 0, "what was planted is gone"
    assert "finite now" in replayed.lines()[-1]


def test_steps_launched_before_a_bad_one_is_noticed_are_as_if_they_had_not_been(tiny_config: WriteConfig) -> None:
    config = spoiled_config(tiny_config)
    session = Session(config, Path.cwd(), LateClock())
    with pytest.raises(NonFiniteError) as error:
        session.run(8)
    assert error.value.step == 2
    Path("before").mkdir()
    before = Session(config, Path("before"))
    before.run(1)
    torch.testing.assert_close(_lasting(session.step), _lasting(before.step), rtol=0, atol=0)
    assert read_nonfinite_step(Path("nonfinite/step_00000002.pt")).later_steps == 0


def _lasting(step: TrainStep) -> list[Any]:
    state = step.state_dict()
    return [state["model"], state["optimizer"]["state"], state["averages"]]


def test_a_step_noticed_late_says_that_its_weights_may_have_moved(tiny_config: WriteConfig) -> None:
    config = spoiled_config(tiny_config, training={"max_nonfinite": 2})
    Session(config, Path.cwd(), LateClock()).run(4)  # steps 3 and 4 are launched when step 2 is reported
    replayed = replay(Path("nonfinite/step_00000002.pt"))
    assert replayed.stored.later_steps == 2
    assert any("up to 2 later steps" in line for line in replayed.lines())


def test_batches_are_let_go_once_their_step_is_reported(tiny_config: WriteConfig) -> None:
    session = Session(read_config(tiny_config()), Path.cwd(), LateClock())
    session.run(4)
    assert [patches() for patches in session.kept] == [None] * 8


def test_a_run_keeps_three_steps_and_says_when_it_keeps_no_more(
    tiny_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_array(Path("huge.zarr").absolute(), np.full((96, 128, 128), 1e30, np.float32))
    data = {"volumes": [{"path": str(path)}], "normalize": {"low": 0.0, "high": 1.0}}
    session, _ = stop_at_bad_step(
        read_config(tiny_config(data=data, training={"max_nonfinite": 5}, diffusion={"noise": "cosine"})), steps=5
    )
    kept = [f"nonfinite/step_{step:08d}.pt" for step in (1, 2, 3)]
    assert [event["replay"] for event in session.events()] == [*kept, None, None]
    assert sorted(map(str, Path("nonfinite").iterdir())) == kept
    assert "nonfinite already holds 3 steps: step 4 is not kept for replay" in caplog.text


@pytest.mark.parametrize("missing", [False, True], ids=["half written", "too small"])
def test_a_step_that_does_not_fit_the_disk_is_an_error_line_and_leaves_nothing(
    tiny_config: WriteConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: bool
) -> None:
    config = spoiled_config(tiny_config, training={"max_nonfinite": 2})
    Session(config, tmp_path).run(2)
    nbytes = read_nonfinite_step(Path("nonfinite/step_00000002.pt")).nbytes
    (tmp_path / "mount").mkdir()
    # In whole pages: room for the tensors, and not for the file around them.
    with small_disk(tmp_path / "mount", 4 * math.ceil(nbytes / 4096) - 64 * missing) as disk:
        session = Session(config, tmp_path, replays=disk)
        session.run(3)
        assert list(disk.iterdir()) == []
    assert session.events()[-1]["replay"] is None
    (record,) = [record for record in caplog.records if "cannot be kept" in record.message]
    assert record.levelname == "ERROR"
    assert ("must fit on the disk" in record.message) == missing


def test_a_step_that_cannot_be_written_does_not_end_the_run(tiny_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "nonfinite").touch()
    session = Session(spoiled_config(tiny_config, training={"max_nonfinite": 2}), tmp_path)
    session.run(3)
    assert session.events()[0]["replay"] is None


class _Code:
    """A pickle of this runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_a_file_that_is_no_kept_step_is_refused_and_never_executed(tiny_config: WriteConfig) -> None:
    stop_at_bad_step(spoiled_config(tiny_config))
    whole = Path("nonfinite/step_00000002.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    Path("flipped.pt").write_bytes(flipped)
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"model": {}}, "foreign.pt")
    torch.save(_Code(), "code.pt")
    for name, kind, text in (
        ("missing.pt", ConfigError, "which does not exist"),
        ("foreign.pt", ConfigError, "which holds something else"),
        ("flipped.pt", StorageError, "a wrong checksum"),
        ("cut.pt", StorageError, "unchanged since it was written"),
        (
            "code.pt",
            StorageError,
            "got ValueError: a file that holds more than tensors and plain data, which is not loaded for",
        ),
        ("nonfinite", StorageError, "unchanged since it was written"),
    ):
        with pytest.raises(kind, match=text):
            replay(Path(name))
    assert not Path("executed").exists()


def test_overrides_that_make_another_step_of_it_are_refused(tiny_config: WriteConfig) -> None:
    stop_at_bad_step(spoiled_config(tiny_config))
    path = Path("nonfinite/step_00000002.pt")
    for override, text in (
        ("model.channels=[8,32]", r"got .* instead of"),
        ("training.train_batch_size=1", "got a global batch of 2 for 4 samples"),
        ("data.patch_size=[8,32,32]", r"patches of \(8, 16, 16\)"),
        ("diffusion.timesteps=10", "diffusion.timesteps 10 for timestep"),
    ):
        with pytest.raises(ConfigError, match=text):
            replay(path, [override])
    whole = replay(path, ["training.train_batch_size=4", "training.accumulate_steps=1"])
    # The same sums over other batches: float32 rounding.
    np.testing.assert_allclose(whole.outcome.losses, replay(path).outcome.losses, rtol=1e-5)


def test_the_door_prints_the_replay_and_ends_with_5_or_0(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at_bad_step(spoiled_config(tiny_config, value=3e7, training={"amp": "fp16"}))
    file = "nonfinite/step_00000002.pt"
    capsys.readouterr()  # what the run has said
    assert train.main(["--replay", file]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 2 of tiny: occurred on cpu with amp fp16, replayed on cpu with amp fp16"
    assert [line.split()[:2] for line in lines[1:5]] == [["sample", str(index)] for index in (4, 5, 6, 7)]
    assert lines[3].endswith("loss nan")
    assert lines[-1].startswith("not finite again: the loss")
    assert train.main(["--replay", file, "training.amp=off"]) == 0
    assert "finite now" in capsys.readouterr().out
    assert train.main(["--replay", "nowhere.pt"]) == 2
    with pytest.raises(SystemExit, match="2"):
        train.main(["--replay", file, "--resume"])


def test_a_run_stops_keeps_its_bad_step_and_saves_the_weights_from_before_it(tiny_config: WriteConfig) -> None:
    config = spoiled_config(tiny_config)
    assert train.main(["--config", "tiny.yaml"]) == 5
    run = Path("runs/tiny")
    (event,) = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "event"]
    replayed = replay(run / event["replay"])
    stored = replayed.stored.config
    assert stored["training"]["lean_norm"] is True, "what auto is on a CPU"
    stored["training"]["lean_norm"] = "auto"
    assert stored == config.model_dump(mode="json")
    assert [loss if math.isfinite(loss) else None for loss in replayed.outcome.losses] == event["losses"]
    state = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    assert state["step"] == event["step"] == 2
    torch.testing.assert_close(state["model"], replayed.stored.weights, rtol=0, atol=0)
