"""`vesuvius profile`: parts that add up, advice that names settings, layers against closed forms, a real one."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.monitor.test_verdict import CPU, GPU, hungry, window
from tests.support.recorded_runs import run_start, step, write_run
from tests.support.runs import assert_same_weights
from tests.support.tiny import tiny_sections
from vesuvius.commands import profile as command
from vesuvius.commands import train as train_command
from vesuvius.config.load import parse_stored, read_config
from vesuvius.diffusion.network.unet import Execution, build_unet
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK, ConfigError
from vesuvius.monitor.verdict import judge
from vesuvius.monitor.window import Knobs, Thresholds, Window
from vesuvius.profiling.layers import LayerWatch, blocks
from vesuvius.profiling.observer import Observed
from vesuvius.profiling.page import build_profile, counted, with_ema
from vesuvius.profiling.recommend import Advice, leave_alone, recommend
from vesuvius.profiling.session import checkpoint_before, profiled
from vesuvius.profiling.trace import MemoryUse, longest, memory_of
from vesuvius.report.records import read_run
from vesuvius.report.share import shared_out, work_rows
from vesuvius.runlog.records import read_records

CPU_DEVICE = torch.device("cpu")
GOOD = Thresholds()
SLOW_GPU = replace(GPU, amp="off", compile=False, channels_last=False, cudnn_benchmark=False)


def advised(figures: Window, knobs: Knobs) -> list[Advice]:
    return recommend(judge(figures, knobs, GOOD), knobs, GOOD)


def test_what_to_try_on_a_gpu_that_computes_is_each_switch_once_in_turn() -> None:
    found = advised(window(), SLOW_GPU)
    assert [each.overrides for each in found] == [
        ("training.amp=auto",),
        ("training.compile=true",),
        ("training.channels_last=true",),
        ("training.cudnn_benchmark=true",),
    ]
    assert {each.gain for each in found} == {"unknown from one setting: vesuvius tune measures it"}
    assert all(each.risk not in ("", "not known") for each in found)


def test_a_wait_for_data_names_the_setting_and_the_most_that_it_can_gain() -> None:
    found = advised(hungry(), GPU)  # waits for data 60 % of the time
    assert [each.overrides for each in found] == [("training.workers=4",)]  # not 8 and 16 behind that
    assert found[0].gain == "at most 2.50 times the speed"


def test_nothing_to_change_is_said_once() -> None:
    found = advised(window(), CPU)
    assert [(each.overrides, each.gain) for each in found] == [((), "none by a setting")]


DATA, COPIES, HOST = "data loading, readers and prefetch", "copies to the device", "the host's own work"
DEVICE = "use of the device"


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ({}, [DATA, COPIES, HOST, DEVICE]),
        ({"data_s": 40.0}, [COPIES, HOST]),
        ({"h2d_s": 16.0}, [DATA, HOST, DEVICE]),
    ],
)
def test_only_what_is_good_is_to_be_left_alone(waits: dict[str, float], named: list[str]) -> None:
    texts = leave_alone(judge(window(**waits), GPU, GOOD), GOOD)
    assert [text.partition(":")[0] for text in texts] == named


@pytest.mark.parametrize("ema_s", [0.0, 0.01, 0.2])
def test_the_averages_are_taken_out_of_the_optimizers_part(ema_s: float) -> None:
    rows = [("forward", "compute", 1.0, 0.1, 0.2), ("optimizer, clipping, EMA", "compute", 0.5, 0.05, 0.06)]
    parts = shared_out(with_ema(rows, ema_s, steps=10), whole_s=1.5)
    assert math.fsum(part.total_s for part in parts) == pytest.approx(1.5)
    assert math.isnan(parts[-1].p95_s)  # one figure has no distribution
    taken = min(ema_s, 0.05)  # no more than the part has
    assert [part.total_s for part in parts[1:]] == pytest.approx([0.5 - 10 * taken, 10 * taken])


def test_the_table_adds_up_to_the_steps_that_count(tmp_path: Path) -> None:
    totals = [{"decode_s": 0.2 * n, "read_s": None} for n in range(9)]
    steps = [
        step(n, readers=totals[n], feeder={"cut_s": 0.01 * n, "starved_s": 0.0, "full_s": 0.4 * n}) for n in range(1, 9)
    ]
    steps[0] |= {"step_s": 30.0, "data_s": 29.6}
    steps[4] |= {"step_s": 2.5, "other_s": 2.04, "pause_s": 2.0}
    run = write_run(tmp_path / "tiny", [run_start(), *steps, step(9, step_s=100.0)])
    config = parse_stored(tiny_sections("tiny", Path("x")) | {"training": {"workers": 2, "train_batch_size": 4}})
    observed = Observed(warm_steps=3, verdict=judge(window(), GPU, GOOD), ema_s=0.01, device="CPU", amp="off")
    report = build_profile(config, read_run(run), steps[2:], observed, 5, [], ["data"], {"processor": "fast"})
    assert math.fsum(part.total_s for part in report.parts) == pytest.approx(5 * 0.5)  # steps 4 to 8, without the pause
    assert 100 * math.fsum(part.share for part in report.parts) == pytest.approx(100, abs=0.1)
    assert report.facts["step, p50 / p95"] == "500 / 500 ms"
    assert report.facts["samples/s"] == "8.00"
    assert (report.facts["processor"], report.facts["RAM"]) == ("fast", "2.00 GiB of 8.00 GiB")
    (behind,) = [table for table in report.tables if table.title == "Behind the data wait"]
    rows = {row[0]: row[2:4] for row in behind.rows}
    assert "readers: read from the store" not in rows  # on a disk
    assert rows["readers: decode"] == ("200", f"{100 * 5 * 0.2 / (2 * 4.5):.1f} %")  # of two readers' time, pauses too
    assert rows["trainer: cut patches into batches"][0] == "10.0"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 3, 3, padding=1)
        self.acts = nn.ModuleList([nn.ReLU(), nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.acts[0](self.conv(x))
        return out


def test_layers_are_counted_as_their_formulas_say() -> None:
    network, x = Net(), torch.randn(2, 2, 4, 5, 6)
    with LayerWatch(network, CPU_DEVICE) as watch:
        network(x).sum().backward()
    conv, relu = watch.layers()
    assert (conv.name, relu.name) == ("conv", "acts.0")
    assert (conv.flops, relu.flops) == (2 * 2 * 3 * 2 * 27 * 4 * 5 * 6, 0)
    assert (conv.saved_bytes, relu.saved_bytes) == (
        x.nbytes,
        2 * 3 * 4 * 5 * 6 * 4,
    )  # its input, its result; no weights
    assert conv.parameters == 3 * 2 * 27 + 3
    assert conv.forward_s > 0
    network(x)
    assert watch.layers() == [conv, relu]  # nothing is left in the network


def test_each_micro_batch_keeps_its_own_tensors() -> None:
    """What is freed behind the first one may lie where the second one's are: one place, kept twice."""
    network, x = Net(), torch.randn(2, 2, 4, 5, 6)
    found = []
    for micro_batches in (1, 3):
        with LayerWatch(network, CPU_DEVICE) as watch:
            for _ in range(micro_batches):
                network(x).sum().backward()
        found.append([(layer.saved_bytes, layer.flops) for layer in watch.layers()])
    assert found[1] == [(3 * saved, 3 * flops) for saved, flops in found[0]]
    assert found[0][0][0] == x.nbytes


def test_a_block_that_is_computed_again_in_the_backward_pass_counts_once() -> None:
    config = parse_stored(tiny_sections("tiny", Path("x")))
    x, t = torch.randn(1, 1, 8, 16, 16), torch.tensor([3])
    layers = []
    for levels in ((), (0, 1, 2)):
        network = build_unet(config.model, seed=0, execution=Execution(checkpoint_levels=levels))
        network.conv_out.weight.data.normal_()  # zero at first: nothing would flow back
        with LayerWatch(network, CPU_DEVICE) as watch:
            loss = network(x, t).square().sum()
            forward = watch.layers()
            loss.backward()
        assert [each.forward_s for each in watch.layers()] == [each.forward_s for each in forward]
        layers.append({layer.name: layer.flops for layer in watch.layers()})
    assert layers[0] == layers[1]
    assert sum(layers[0].values()) > 0


def test_the_blocks_of_the_network_hold_each_weight_once() -> None:
    config = parse_stored(tiny_sections("tiny", Path("x")))
    network = build_unet(config.model, seed=0)
    weights = [weight for block in blocks(network).values() for weight in block.parameters()]
    assert len(blocks(network)) > 8
    assert len(weights) == len({id(weight) for weight in weights})
    own = {id(weight) for name, weight in network.named_parameters() if not name.startswith("conv_out")}
    assert own <= {id(weight) for weight in weights}


def test_a_long_trace_keeps_its_names_and_its_longest_events() -> None:
    named = [{"ph": "M", "name": "process_name"}]
    events = [*named, *({"ph": "X", "dur": duration} for duration in (5, 1, 9, 3))]
    assert longest(events, 5)[1] == 0
    assert longest(events[::-1], 3) == ([*named, {"ph": "X", "dur": 9}, {"ph": "X", "dur": 5}], 2)


def test_a_profile_changes_nothing_that_a_step_is_made_of() -> None:
    config = parse_stored(tiny_sections("tiny", Path("x")))
    changed = profiled(config, "p", steps=20)
    assert changed.data == config.data
    assert changed.model == config.model
    before, after = config.training.model_dump(), changed.training.model_dump()
    differ = {name for name in before if before[name] != after[name]}
    assert differ <= {"steps_per_epoch", "epochs", "max_steps", "autotune", "save_every", "preview_every"}
    assert changed.stop_step >= 2 * 20


def assert_parts_are_all_of_the_time(run: Path, page: str, first: int, last: int) -> None:
    """Seconds against the steps' own clock: a part that is left out is seen, whatever the shares are divided by."""
    steps = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "step" and first <= r["step"] <= last]
    records = read_run(run)
    parts = work_rows(records, counted(records, first - 1, last - first + 1))
    work_s = math.fsum(step["step_s"] - step["pause_s"] for step in steps)
    assert math.fsum(seconds for _, _, seconds, _, _ in parts) == pytest.approx(work_s, rel=1e-6)
    table = page.partition("## Where the time went")[2].partition("## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if " % | " in line]
    *shares, total = (float(row[3].removesuffix(" %")) for row in rows)
    assert (len(shares), total) == (7, 100.0)
    assert round(math.fsum(shares), 6) == 100.0
    assert float(rows[-1][2]) == pytest.approx(work_s, rel=0.005)  # three digits


def test_a_real_profile_beside_an_existing_run(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_config()
    monkeypatch.chdir(path.parent)
    monkeypatch.delenv("VESUVIUS_RUNS", raising=False)
    run = path.parent / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("kept\n")
    assert command.main(["--config", str(path), "--steps", "6", "--trace"]) == EXIT_OK
    assert sorted(each.name for each in run.iterdir()) == ["metrics.jsonl", "profiles"]
    assert (run / "metrics.jsonl").read_text() == "kept\n"
    (folder,) = (run / "profiles").iterdir()
    assert "VESUVIUS_RUNS" not in os.environ
    assert not (folder / "checkpoints").exists()
    steps = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]
    text = (folder / "profile.md").read_text()
    assert text.rstrip() in capsys.readouterr().out
    warm = int(text.partition(" steps warm up")[0].rpartition("| ")[2])
    assert len(steps) == warm + 6 + 3  # two traced, one for the layers
    log = (folder / "logs" / "train_full.log").read_text()
    assert f"ended after step {len(steps)}: the profile has its steps" in log
    assert "--resume" not in log
    assert "Memory of tensors in the traced steps" in (folder / "profile.html").read_text()
    assert_parts_are_all_of_the_time(folder, text, warm + 1, warm + 6)
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert any("conv" in str(event.get("name")) for event in trace["traceEvents"])
    assert "aten::" in text
    assert re.search(r"\| volume \| .*96x128x128 in chunks of 32x32x32, uint8, \w+", text), text
    assert "| processor | " in text
    assert "| trunk.attention | Attention |" in text
    assert (folder / "profile.html").stat().st_size < 200_000


def test_memory_of_a_trace_is_that_of_the_device_in_order_of_time() -> None:
    def event(ts: float, total: int, kind: int) -> dict[str, Any]:
        args = {"Total Allocated": total, "Total Reserved": 9 * kind, "Device Type": kind, "Bytes": 0}
        return {"name": "[memory]", "ph": "i", "ts": ts, "args": args}

    events = [event(5000, 30, 0), event(1000, 10, 0), {"ph": "X", "name": "conv", "dur": 3}, event(2000, 77, 1)]
    assert memory_of(events, on_gpu=False) == MemoryUse([0.0, 4.0], [10.0, 30.0], [0.0, 0.0])
    assert memory_of(events, on_gpu=True) == MemoryUse([0.0], [77.0], [9.0])
    assert memory_of([], on_gpu=True) == MemoryUse([], [], [])


def test_a_checkpoint_before_a_step_leaves_room_to_warm_up_where_one_does(tmp_path: Path) -> None:
    for step_number in (100, 200, 290, 300):
        (tmp_path / f"step_{step_number:08d}").mkdir()
    assert [checkpoint_before(tmp_path, step, step - 10).name[-3:] for step in (300, 299, 150, 100)] == [
        "200", "200", "100", "100"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"got 99, and in .* those of steps 100, 200, 290, 300;"):
        checkpoint_before(tmp_path, 99, 89)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_steps_around_one_of_a_run_are_those_of_the_run_which_stays_as_it_is(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_config(training={"workers": 0, "epochs": 12, "save_every": 6, "keep_last": 9, "preview_every": 0})
    monkeypatch.chdir(path.parent)
    assert train_command.main(["--config", str(path), "training.max_steps=24"]) == EXIT_OK
    run = path.parent / "runs" / "tiny"
    before = files_of(run)
    assert command.main(["--config", str(path), "--steps", "6", "--at-step", "20"]) == EXIT_OK
    (folder,) = (run / "profiles").iterdir()
    assert {name: text for name, text in files_of(run).items() if folder not in name.parents} == before
    text = (folder / "profile.md").read_text()
    assert "The next 6 count: 18 to 23." in text
    assert "It continued from the run's checkpoint of step 6." in text
    losses = [
        {r["step"]: r["loss"] for r in read_records(place / "metrics.jsonl") if r["kind"] == "step"}
        for place in (run, folder)
    ]
    assert losses[1] == {step_number: loss for step_number, loss in losses[0].items() if 6 < step_number <= 23}
    assert command.main(["--config", str(path), "--at-step", "3"]) == EXIT_CONFIG


def test_a_run_that_ends_before_its_profile_says_so_and_judges_all_steps_that_it_counted(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_config(training={"workers": 0, "epochs": 9}, monitor={"verdict_every": 4})
    monkeypatch.chdir(path.parent)
    run = path.parent / "runs" / "tiny"
    arguments = ["--config", str(path), "training.save_every=1000", "training.validate_every=0"]
    assert train_command.main([*arguments, "training.max_steps=7", "--profile"]) == EXIT_OK
    assert not list((run / "profiles").rglob("*"))
    assert "WARNING the profile was not written: steps" in (run / "logs" / "train_full.log").read_text()
    assert train_command.main([*arguments, "training.max_steps=22", "--resume", "--profile", "13"]) == EXIT_OK
    (page,) = (run / "profiles").glob("*/profile.md")
    assert "The next 9 count: 14 to 22." in page.read_text()
    assert "The run ended before the remaining 11 steps" in page.read_text()
    assert "the verdict is based on" not in page.read_text()
    verdicts = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "verdict" and r["step"] > 13]
    assert [(verdict["step"], verdict["steps"]) for verdict in verdicts] == [(22, 9)]  # none at 16 and 20


@pytest.mark.long
def test_a_profile_in_place_changes_nothing_of_the_run(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_config().parent)
    pages = []
    for name, arguments in (("plain", ()), ("profiled", ("--profile", "9"))):
        path = tiny_config(name, training={"workers": 0, "epochs": 3, "validate_every": 15})
        assert train_command.main(["--config", str(path), *arguments]) == EXIT_OK
        pages.append(list(Path("runs", name, "profiles").glob("*/profile.md")))
    assert_same_weights("plain", "profiled")
    assert [len(found) for found in pages] == [0, 1]
    text = pages[1][0].read_text()
    assert "The next 20 count: 10 to 29." in text
    assert "These are steps of the run itself." in text
    assert "computes" in text
    assert_parts_are_all_of_the_time(Path("runs", "profiled"), text, 10, 29)


def test_a_run_that_cannot_begin_ends_as_train_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("name: tiny\ndata:\n  volumes:\n    - path: nowhere.zarr\n")
    assert read_config(tmp_path / "c.yaml").name == "tiny"
    assert command.main(["--config", "c.yaml"]) == EXIT_DATA
    with pytest.raises(SystemExit):
        command.main(["--config", "c.yaml", "--steps", "4"])
