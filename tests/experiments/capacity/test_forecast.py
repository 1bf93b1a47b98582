"""`vesuvius plan`: reads are those of the plan, what is unknown stays unknown, and figures follow from each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
import zarr

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from tests.support.recorded_runs import run_start, step, write_run
from tests.support.tiny import tiny_sections
from vesuvius.commands.cli import main
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

GIVEN = ("--decode-gb-s", "0.5", "--compression", "2")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a volume of which only the metadata exist."""
    zarr.create_array(tmp_path / "empty.zarr", shape=(96, 128, 128), chunks=(32, 32, 32), dtype="uint8")
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tiny_sections("tiny", tmp_path / "empty.zarr")))
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main(["plan", "--cores", "8", *map(str, arguments), "--json"]) == EXIT_OK
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.parametrize("gpus", [1, 2, 3, 16])
def test_the_total_is_what_the_readers_of_all_ranks_read(
    config: Path, capsys: pytest.CaptureFixture[str], gpus: int
) -> None:
    facts = planned(capsys, config, "--gpus", gpus, *GIVEN, "training.steps_per_epoch=160")
    data = prepare_data(0, read_config(config).data)
    grid, samples, requests = data.arrays[0][0].grid, 320 * 2 * gpus, 0
    for rank in range(gpus):
        slots = (slot for task in data.plan.tasks(0, samples, rank, gpus) for slot in task)
        requests += sum(grid.count_requests(data.plan.visit(slot).region)[1] for slot in slots)
    assert facts["total"]["requests"] == pytest.approx(requests, rel=0.1)  # a mean over other visits
    assert facts["total"]["decoded_bytes"] == pytest.approx(requests * 32**3, rel=0.1)
    assert facts["total"]["fetched_bytes"] == pytest.approx(requests * 32**3 / 2, rel=0.1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "options"),
    [((128, 256, 256), {}), ((128, 256, 256), {"zarr_format": 3, "shards": (64, 64, 64)}), ((64, 96, 96), {})],
    ids=["chunks", "shards", "small"],
)
def test_a_stream_over_http_asks_for_what_was_planned(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    server: ChunkServer,
    tmp_path: Path,
    shape: tuple[int, int, int],
    options: dict[str, Any],
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(shape), **options)
    more = [f"data.volumes=[{{path: '{server.url_of(path)}'}}]", "training.steps_per_epoch=300"]
    total = planned(capsys, config, "--gpus", 1, *GIVEN, *more)["total"]
    job = prepare_data(0, read_config(config, more).data).job
    with PatchStream(job, StreamOptions(2, 1), stop=1200) as stream:
        assert sum(len(batch.samples) for batch in stream) == 1200
        assert stream.reader_totals.requests == pytest.approx(total["requests"], rel=0.15)
        assert stream.reader_totals.bytes_read == pytest.approx(total["decoded_bytes"], rel=0.1)


def test_money_and_hours_follow_from_steps_bytes_and_requests(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = ("--price-gpu-hour", 3, "--price-gb", 0.1, "--price-1000-requests", 0.01)
    facts = planned(capsys, config, "--gpus", 4, "--nodes", 2, "--step-s", 90, *GIVEN, "--store", "s3", *prices)
    total, cost = facts["total"], facts["cost"]
    assert total["hours"] == pytest.approx(20 * 90 / 3600)  # with a data wait of 0
    assert facts["result"]["data_wait_percent"] == 0
    assert cost["gpu_hour"] == pytest.approx(4 * 3 * total["hours"])
    assert cost["gb"] == pytest.approx(0.1 * total["fetched_bytes"] / 1e9, rel=1e-3)
    assert cost["requests_1000"] == pytest.approx(0.01 * total["requests"] / 1000, rel=0.01)
    assert cost["sum"] == pytest.approx(sum(cost[name] for name in cost if name != "sum"), rel=1e-3)


@pytest.mark.parametrize(
    ("workers", "patch", "limit"),
    [
        *[(8, 40, "latency"), (64, 24, "network"), (0, 40, "decoding: readers")],
        *(
            pytest.param(workers, patch, limit, marks=pytest.mark.long)
            for workers in (1, 4, 16, 64)
            for patch in (24, 40, 96)
            for limit in ("latency", "network", "requests/s", "decoding: readers")
        ),
    ],
)
def test_available_is_what_the_first_limit_allows_and_the_rest_is_waited_for(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, workers: int, patch: int, limit: str
) -> None:
    path = tmp_path / "large.zarr"
    zarr.create_array(path, shape=(1024, 2048, 2048), chunks=(64, 64, 64), dtype="uint8")
    slow = {"latency": ("--latency-ms", 5000), "network": ("--node-gb-s", 1e-3), "requests/s": ("--requests-s", 2)}
    step_s = 0.01 if workers == 8 else 0.001  # for shorter ones hundreds of readers are simulated, in seconds
    arguments = ("--store", "s3", "--step-s", step_s, *slow.get(limit, ("--decode-gb-s", 1e-4)))
    more = ["data.regions_in_flight=16", "data.patches_per_region=32", f"training.workers={workers}"]
    facts = planned(
        capsys, config, "--gpus", 1, *GIVEN, *arguments, "--cores", 96,
        f"data.volumes=[{{path: {path}}}]", f"data.patch_size=[{patch},{patch},{patch}]", *more,
    )  # fmt: skip
    result, most = facts["result"], {row["limit"]: row["patches_s"] for row in facts["limits"]}
    assert result["first_limit"] == limit
    # Less where readers wait for the one whose regions have more chunks (64 readers, regions of 1 to 8 chunks).
    assert 0.87 < result["available_patches_s"] / most[limit] <= 1.001
    got = result["needed_patches_s"] * (1 - result["data_wait_percent"] / 100)
    assert got == pytest.approx(result["available_patches_s"], rel=0.1)


def test_the_first_limit_is_raised_by_its_remedy(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def result(*more: str) -> tuple[str, float, str]:
        facts = planned(capsys, config, "--gpus", 2, "--step-s", "0.1", *GIVEN, "--latency-ms", "400", *more)
        first = min(facts["limits"], key=lambda limit: limit["patches_s"] or 1e99)
        assert facts["result"]["first_limit"] == first["limit"]
        return first["limit"], facts["result"]["data_wait_percent"], first["raised_by"]

    limit, wait, remedy = result("--store", "http", "training.workers=1", "data.store.requests=1")
    assert (limit, wait > 50) == ("latency", True)
    requests, workers = (part.strip() for part in remedy.split(", or "))
    for more in ([requests, "training.workers=1"], [workers, "data.store.requests=1"]):
        assert result("--store", "http", *more)[1] < 5


def test_where_readers_are_not_the_limit_no_number_of_them_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned_with(requests_s: int) -> dict[str, Any]:
        store = ("--store", "http", "--latency-ms", "10", "--requests-s", requests_s)
        return planned(capsys, config, "--gpus", 2, "--step-s", "0.1", *GIVEN, *store, "training.workers=1")

    millions = ("--step-s", "1e-6", "--store", "http", "--latency-ms", "1000")
    assert planned(capsys, config, "--gpus", 1, *millions)["result"]["readers_needed_per_node"] is None
    few, many = planned_with(2), planned_with(2000)
    assert few["result"]["first_limit"] == "requests/s"
    assert few["result"]["readers_needed_per_node"] is None
    assert many["result"]["readers_needed_per_node"] == 2
    for facts in (few, many):
        for limit in facts["limits"]:
            assert limit["raised_by"].startswith("enough") == ((limit["of_needed"] or 0) >= 1.2)
            if limit["limit"] == "network":
                assert limit["raised_by"] == "unknown; give --node-gb-s and --compression"
    assert "enough; the GPUs limit the run" in [limit["raised_by"] for limit in many["limits"]]


def test_a_slow_request_is_not_called_latency_and_no_remedy_is_refused_by_the_plan(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, name, remedy in ((1e-9, "rate of a request", "not by 512 readers per GPU"), (85, "latency", "")):
        slow = ("--gpus", 1, "--step-s", "1e-3", "--store", "s3", "--request-mb-s", rate, *GIVEN)
        rows = {row["limit"]: row["raised_by"] for row in planned(capsys, config, *slow)["limits"]}
        assert remedy in rows[name]


def test_a_run_that_only_waits_takes_as_long_as_its_data_and_free_bytes_cost_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ("--step-s", "1e-9", "--store", "http", "--latency-ms", 0, "--requests-s", "1e-6", "--price-gb", 0)
    facts = planned(capsys, config, "--gpus", 2, *GIVEN, *slow, "training.steps_per_epoch=1000")
    patches_s = facts["result"]["available_patches_s"]
    assert facts["total"]["hours"] == pytest.approx(2000 * 4 / patches_s / 3600, rel=0.01)
    assert facts["cost"]["sum"] == 0
    assert main(["plan", str(config), "--gpus", "8", "--cores", "8", *GIVEN, "cluster.worker_nodes=any"]) == EXIT_OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "not", "simulated:", "cluster.worker_nodes=any"] in lines, "a warning per line"
    few_cores = planned(capsys, config, "--gpus", 8, *GIVEN, "cluster.worker_nodes=any")["reading"]["warnings"]
    assert [text.partition(";")[0] for text in few_cores] == [
        "the trainers of 8 GPUs take all 8 cores of a node",
        "not simulated: cluster.worker_nodes=any",
    ]


def test_volumes_of_several_stores_are_planned_for_the_remote_one_with_a_warning_and_a_disk_costs_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], server: ChunkServer, tmp_path: Path
) -> None:
    local = tmp_path / "empty.zarr"
    mixed = f"data.volumes=[{{path: {local}}}, {{path: '{server.url_of(local)}'}}]"
    prices = ("--price-gb", 0.1, "--price-1000-requests", 0.01)
    for facts, costs in (
        (planned(capsys, config, "--gpus", 1, *GIVEN, *prices, *more), more) for more in ([], [mixed])
    ):
        warned = any("volumes of several stores" in text for text in facts["reading"]["warnings"])
        assert (warned, facts["store"]["latency_ms"] > 0, facts["cost"]["sum"] > 0) == (bool(costs),) * 3


def test_a_store_that_cannot_be_reached_ends_the_plan_before_an_outage_would_end_a_run(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vesuvius.experiments.capacity.forecast._GIVE_UP_MINUTES", 0.002)
    arguments = [config, "--gpus", 1, "data.volumes=[{path: 'http://127.0.0.1:9/v.zarr'}]"]
    assert main(["plan", *map(str, arguments)]) == EXIT_DATA
    out, err = capsys.readouterr()
    assert "Cannot reach the store" in err
    assert not out


def test_what_depends_on_an_unknown_figure_is_unknown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        config,
        "--gpus",
        2,
        "--step-s",
        1,
        "--price-gb",
        0.1,
        "--price-1000-requests",
        0.01,
        "--store",
        "http",
    )
    facts = planned(capsys, *arguments)
    assert "not measured: No chunk of" in facts["reading"]["source"]
    unknown = ("available_patches_s", "first_limit", "data_wait_percent", "readers_needed_per_node")
    assert {name: facts["result"][name] for name in unknown} == dict.fromkeys(unknown)
    assert {limit["patches_s"] for limit in facts["limits"]} == {None}
    assert (facts["total"]["fetched_bytes"], facts["total"]["hours"]) == (None, None)
    assert (facts["cost"]["gb"], facts["cost"]["sum"]) == (None, None)
    assert main(["plan", *map(str, arguments)]) == EXIT_OK
    assert "  data_wait_percent        unknown\n" in capsys.readouterr().out


def test_decoding_is_measured_on_the_stored_chunks(
    config: Path, capsys: pytest.CaptureFixture[str], written_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vesuvius.experiments.capacity.rates._READ_S", 0.1)
    reading = planned(capsys, config, "--gpus", 1, f"data.volumes=[{{path: {written_volume}}}]")["reading"]
    assert reading["source"].startswith("measured here, on ")
    assert 0.01 < reading["decode_gb_s"] < 50
    chunks = [path for path in written_volume.rglob("*") if path.is_file() and path.name.isdecimal()]
    stored = sum(path.stat().st_size for path in chunks)
    assert reading["compression"] == pytest.approx(len(chunks) * 32**3 / stored, rel=0.05)


def test_a_recorded_step_counts_without_its_data_wait_for_as_many_patches(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slow = step(1) | {"step_s": 30.0}  # the first one starts the readers
    run = write_run(tmp_path / "run", [run_start(), slow, *(step(n) for n in range(2, 9))])
    facts = planned(capsys, config, "--gpus", 1, *GIVEN, "--step-from", run)
    assert facts["run"]["step_s"] == pytest.approx((0.5 - 0.1) * 2 / 4)  # 4 samples were recorded, 2 are planned


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "3", "--nodes", "2"], "3 GPUs cannot be shared evenly by 2 nodes; change --gpus or --nodes"),
        (["--gpus", "1000000000000"], "are too many: at most 100000, 256 a node"),
        (["--gpus", "1", "training.workers=100000"], "training.workers=100000 is too large to plan for: at most 512"),
        (["--gpus", "1", "--step-from", "/nowhere"], "/nowhere has no records of steps"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["plan", str(config), *arguments]) == EXIT_CONFIG
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--decode-gb-s", "1e308"), ("--compression", "1e-300"), ("--price-gb", "1e300")]
)
def test_a_rate_that_no_machine_has_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(config), "--gpus", "1", *arguments])
    assert f"{arguments[0]}: '{arguments[1]}' is not a number from 1e-9 to 1e9" in capsys.readouterr().err
