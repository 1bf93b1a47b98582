"""Records of months stay small on disk, and none is lost or doubled, whenever the process dies."""

from __future__ import annotations

import gzip
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_disk import small_disk
from vesuvius.runlog import rotated
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.rotated import ROTATE_BYTES, RotatedFile, iter_rotated

MONTH_RECORDS = 30 * 24 * 3600 // 10


def rotated_records(path: Path, rotate_bytes: int) -> JsonLines:
    return JsonLines(RotatedFile(path, rotate_bytes))


def numbers(path: Path) -> list[int]:
    return [record["n"] for record in iter_rotated(path)]


def test_records_are_read_back_in_order_over_all_parts_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    for session in range(3):
        lines = rotated_records(path, 1000)
        for n in range(100):
            lines.write("system", n=100 * session + n, filler="x" * 40)
        lines.close()
    assert len(list(tmp_path.glob("system.0*.jsonl.gz"))) > 5
    assert not list(tmp_path.glob(".*")), "nothing partial is left"
    assert path.stat().st_size < 1200
    assert numbers(path) == list(range(300))


class Died(BaseException):
    pass


@pytest.mark.parametrize("call", ["rename", "open", "copyfileobj", "unlink"])
def test_a_kill_inside_a_rotation_loses_nothing_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "system.jsonl"
    file = RotatedFile(path, 10**9)
    lines = JsonLines(file)
    for n in range(20):
        lines.write("system", n=n)
    with monkeypatch.context() as dying:

        def die(*_: Any, **__: Any) -> None:
            raise Died

        place = {"rename": rotated.os, "open": gzip, "copyfileobj": rotated.shutil, "unlink": Path}[call]
        dying.setattr(place, call, die)
        file._rotate_bytes = 0
        with pytest.raises(Died):
            lines.write("system", n=20)
    assert numbers(path) == list(range(21))
    after = rotated_records(path, 0)  # the next session rotates with every record, and tidies up
    after.write("system", n=21)
    after.close()
    assert numbers(path) == list(range(22))
    assert not [part for part in tmp_path.glob("system.0*.jsonl") if part.with_name(part.name + ".gz").exists()]


def test_a_full_disk_keeps_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path, 64) as disk, caplog.at_level(logging.WARNING):
        path = disk / "system.jsonl"
        lines = rotated_records(path, 40_000)
        (disk / "filler").write_bytes(b"x" * 12_000)
        rng = random.Random(0)
        for n in range(60):  # text that does not compress
            lines.write("system", n=n, filler="".join(rng.choices("0123456789abcdef", k=700)))
        lines.close()
        assert numbers(path) == list(range(60))
    assert "must be writable to compress it" in caplog.text


def test_a_month_of_records_stays_below_100_mb(tmp_path: Path) -> None:
    """Of as many figures as the monitor of a run with 12 readers and a GPU writes, each wandering by pages."""
    path, rng, count = tmp_path / "system.jsonl", random.Random(0), 1500
    lines = rotated_records(path, ROTATE_BYTES // 8)
    sizes = [rng.randrange(2**20) * 4096 for _ in range(40)]
    for _ in range(count):
        sizes = [size + 4096 * rng.randint(-300, 300) for size in sizes]
        shares = {f"core_{n}_busy": round(rng.random(), 2) for n in range(30)}
        lines.write("system", **{f"figure_{n}_bytes": size for n, size in enumerate(sizes)}, **shares)
    lines.close()
    packed = sum(part.stat().st_size for part in tmp_path.glob("*.gz"))
    in_parts = count - len(path.read_text().splitlines())
    assert in_parts > 500
    assert packed / in_parts * MONTH_RECORDS + ROTATE_BYTES < 100e6
