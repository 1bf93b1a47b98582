"""Run directories as left by a trainer, of any length, without training: records in the real formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.tiny import tiny_sections
from vesuvius.config.load import dump_config, parse_stored
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.session import begin_session, end_session

Record = dict[str, Any]
BEGAN = 1_700_000_000.0
GIB = 2**30


def current_records(records: Iterable[Record]) -> list[Record]:
    """The records of a run as if it had never been interrupted: a session drops the steps, validations and
    previews that it repeats, and nothing else."""
    kept: list[Record] = []
    for record in records:
        if record["kind"] == "run_start":
            step = record["step"]
            last = {"validation": record.get("validated_step", step), "preview": record.get("previewed_step", step)}
            last["step"] = step
            kept = [each for each in kept if each["kind"] not in last or each["step"] <= last[each["kind"]]]
        kept.append(record)
    return kept


def run_start(step: int = 0, session: int = 1, time: float = BEGAN) -> Record:
    return {"kind": "run_start", "time": time, "name": "tiny", "session": session, "step": step}


def run_end(step: int, time: float, exit_code: int = 0, cause: str = "done") -> Record:
    return {"kind": "run_end", "time": time, "exit_code": exit_code, "cause": cause, "step": step}


def step(number: int, *, time: float | None = None, **figures: Any) -> Record:
    """A step of half a second: 0.1 data, 0.01 copies, 0.1 forward, 0.2 backward, 0.05 optimizer, 0.04 host."""
    times = {
        "step_s": 0.5,
        "data_s": 0.1,
        "h2d_s": 0.01,
        "forward_s": 0.1,
        "backward_s": 0.2,
        "optimizer_s": 0.05,
        "comm_s": 0.0,
    }
    record: Record = {
        "kind": "step",
        "time": BEGAN + number if time is None else time,
        "step": number,
        "steps": 100_000,
    }
    record |= times | {"pause_s": 0.0, "other_s": 0.04, "gpu_s": 0.35, "samples": 4, "workers": 2, "mfu": None}
    record |= {"loss": 1 / number, "grad_norm": 1.0, "lr": 1e-4, "total_s": number / 2, "worker_max_bytes": GIB // 4}
    record |= {"ram_used_bytes": 2 * GIB, "ram_limit_bytes": 8 * GIB, "vram_used_bytes": None, "vram_limit_bytes": None}
    # Fields that a report passes over, so that a line is as long as a real one.
    record |= {"readers": dict.fromkeys(("decode_s", "bytes_read", "bytes_fetched", "requests", "retries"), 123456.789)}
    record |= {
        "feeder": dict.fromkeys(("cut_s", "wait_for_readers_s", "idle_s", "batches", "delivered_bytes"), 123456.789)
    }
    record |= {"session_s": 12345.678901, "eta_s": 12345.678901, "sample_index": 4 * number, "finite": True}
    return record | figures


def system(number: int, *, time: float | None = None, used_gib: float = 1.0, **figures: Any) -> Record:
    """A record of the monitor with two readers."""
    used = [int(factor * used_gib * GIB) for factor in (0.9, 1.0, 1.1)]
    record: Record = {"kind": "system", "time": BEGAN + number if time is None else time, "step": number}
    record |= {"limit_bytes": 8 * GIB, "used_bytes": used, "trainer_bytes": used, "shared_bytes": [0, 0, 0]}
    return record | {"readers": {"11": GIB // 4, "12": GIB // 2}, "vram": None, "gpus": [], "cores_busy": 1.5} | figures


def verdict(number: int, **figures: Any) -> Record:
    words = {"evidence": "waited for data 20.0 % of the time", "advice": "try training.workers=4"}
    text = f"data-bound (workers too few): {'; '.join(words.values())}"
    said = {"bound": "data-bound", "cause": "workers too few", "text": text, **words}
    return {"kind": "verdict", "time": BEGAN + number, "step": number, **said, **figures}


def validation(number: int, error: float, **figures: Any) -> Record:
    found = {"relative_error": error, "relative_bins": [error, error / 2]}
    record: Record = {
        "kind": "validation",
        "time": BEGAN + number,
        "step": number,
        "loss": 0.5,
        "relative_error": error,
    }
    return record | {"bin_edges": [0, 500, 1000], "weights": {"raw": found, "ema": found}} | figures


def lines(records: Iterable[Record]) -> Iterator[str]:
    for record in records:
        yield json.dumps(record) + "\n"


def write_run(path: Path, metrics: Iterable[Record], system_records: Iterable[Record] = (), **keys: Any) -> Path:
    """A run directory with a config (`keys` override the top level), an environment, and these records."""
    path.mkdir(parents=True, exist_ok=True)
    config = dump_config(parse_stored(tiny_sections(path.name, Path("/volumes/tiny.zarr")) | keys))
    (path / "config.resolved.yaml").write_text(config)
    environment = {
        "gpus": [],
        "cpus": 2,
        "packages": {"torch": "2.13.0", "vesuvius-diffusion": "0.1.0"},
        "commit": None,
    }
    (path / "env.json").write_text(json.dumps(environment))
    with (path / "metrics.jsonl").open("w") as file:
        file.writelines(lines(metrics))
    if written := list(lines(system_records)):
        (path / "system.jsonl").write_text("".join(written))
    return path


def session_file(run: Path, end: int | str | None) -> None:
    """As a session leaves it that is `running`, has ended with an exit code, or was killed (None)."""
    record = begin_session(run / "session.json", run.name, 1, MemoryPolicy())
    if isinstance(end, int):
        end_session(run / "session.json", record, end)
    elif end is None:
        content = json.loads((run / "session.json").read_text())
        (run / "session.json").write_text(json.dumps(content | {"pid": 2**22 + 1}))


def write_preview(run: Path, number: int, size: tuple[int, int] = (1600, 900)) -> Record:
    """An incompressible picture of noise, and its record."""
    picture = run / "samples" / f"step_{number:08d}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(picture)
    return {"kind": "preview", "time": BEGAN + number, "step": number, "picture": f"samples/{picture.name}"}
