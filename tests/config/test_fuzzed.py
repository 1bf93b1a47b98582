"""A config of nonsense is refused in one message: no traceback, no hang, no memory of its size.

All cases run in one child, which may take 1 GiB more than it has at its start, and 10 s for each: whatever hangs or
swells ends the child, and the case is named.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import psutil
import pytest
import yaml
from pydantic import BaseModel

from vesuvius.commands import train
from vesuvius.config import Config
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK

CASES = 60
Case = tuple[bytes, list[str]]  # the file, and further arguments
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "auto", "x" * 100_000,
    "é\u202e", "../../etc", "${HOME}", "!!python/object:os.system", [], [1, 2, 3], [[1]], [None] * 10_000, {}, {"a": 1},
    {"training": {"lr": 1}}, "1e9", "0x10", "2001-01-01", "~",
)  # fmt: skip
_STRANGE = (b"\xff", b"\0", b"&a ", b"*a", b"{", b"]", b"\t", b"!!set ", b"? ", b"---\n", b"<<: ")
_BASE: dict[str, Any] = {
    "name": "fuzz",
    "data": {"volumes": [{"path": "nowhere.zarr", "level": 0}], "patch_size": [8, 16, 16], "reader_mib": 64},
    "model": {"channels": [8, 16], "blocks_per_level": 1, "full_res_channels": 4, "norm_groups": 2},
    "diffusion": {"noise": "edm", "timesteps": 100, "sampler_steps": 4},
    "training": {"epochs": 1, "steps_per_epoch": 4, "warmup_steps": 1, "workers": 0, "max_hours": 1},
    "monitor": {"verdict_every": 10, "guard": "act"},
}


def keys_of(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """All keys that a config may have, as overrides name them; of lists, those of the first."""
    for name, field in model.model_fields.items():
        yield before + name
        first = ".0" if get_origin(field.annotation) is tuple else ""
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys_of(inner, f"{before}{name}{first}.")


KEYS = sorted(keys_of(Config))


def with_other_keys(rng: random.Random, base: dict[str, Any]) -> bytes:
    """One to three keys of the schema have another value, a wrong name, or are gone."""
    config = json.loads(json.dumps(base))
    for _ in range(rng.randint(1, 3)):
        *way, key = rng.choice(KEYS).split(".")
        node = config
        for word in way:
            node = node[0] if word == "0" and isinstance(node, list) and node else node
            node = node.setdefault(word, {}) if isinstance(node, dict) and word != "0" else node
        if not isinstance(node, dict):
            continue
        change = rng.random()
        if change < 0.7:
            node[key] = rng.choice(_VALUES)
        elif change < 0.85:
            node[f"{key}s"] = node.pop(key, 1)
        else:
            node.pop(key, None)
    return yaml.safe_dump(config, allow_unicode=True).encode()


def with_other_bytes(rng: random.Random, base: dict[str, Any]) -> bytes:
    """Bytes of the text are changed, doubled, gone or strange."""
    text = bytearray(yaml.safe_dump(base).encode())
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(text))
        match rng.randrange(4):
            case 0:
                text[at] = rng.randrange(256)
            case 1:
                del text[at : at + rng.randint(1, 10)]
            case 2:
                text[at:at] = text[at : at + rng.randint(1, 40)]
            case _:
                text[at:at] = rng.choice(_STRANGE)
    return bytes(text)


def with_aliases(rng: random.Random, base: dict[str, Any]) -> bytes:
    """Lists or mappings of aliases of such lists, so that they stand for up to 9**9 values; at times within itself."""
    opening, closing = ("[", "]") if rng.random() < 0.5 else ("{k0: ", "}")
    joined = ", " if opening == "[" else ", k{}: "
    lines = [f"a0: &a0 {opening}1{closing}"]
    for depth in range(1, rng.randint(2, 9)):
        inner = f"*a{depth - 1}" + "".join(joined.format(n) + f"*a{depth - 1}" for n in range(1, rng.randint(2, 9)))
        lines.append(f"a{depth}: &a{depth} {opening}{inner}{closing}")
    if rng.random() < 0.3:
        lines.append("b: &b [*b]")
    return ("\n".join(lines) + "\n" + yaml.safe_dump(base)).encode()


def cases(base: dict[str, Any], seeds: Iterable[int], argument: str) -> Iterator[Case]:
    kinds = with_other_keys, with_other_bytes, with_aliases
    for seed in seeds:
        rng = random.Random(seed)
        text = rng.choices(kinds, (5, 3, 2))[0](rng, base)
        key = rng.choice([*KEYS, "nowhere.at.all", "", "data.volumes[0].level"])
        override = f"{key}={rng.choice(_VALUES)}"[:1000]
        yield text, [*([override] if rng.random() < 0.5 else []), argument]


def run_in_child(given: Iterable[Case], more_bytes: int, each_s: int) -> Iterator[tuple[int, str]]:
    """The exit code of each case and what it said; ends early where the child did."""
    with tempfile.TemporaryFile("w+") as results:
        if (pid := os.fork()) == 0:  # the modules are loaded: a process of its own would take seconds
            try:
                limit = psutil.Process().memory_info().vms + more_bytes
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                for text, arguments in given:
                    signal.alarm(each_s)
                    results.write(json.dumps(_run(text, arguments)) + "\n")
                    results.flush()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        results.seek(0)
        yield from (tuple(json.loads(line)) for line in results)


def _run(text: bytes, arguments: list[str]) -> tuple[int, str]:
    Path("fuzz.yaml").write_bytes(text)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = train.main(["--config", "fuzz.yaml", *arguments])
        except SystemExit as usage:  # argparse's own
            code = usage.code if isinstance(usage.code, int) else EXIT_CONFIG
        except BaseException as error:
            return -1, f"Traceback: {error!r}"
    return code, said.getvalue()


def assert_refused_or_fine(given: list[Case], found: list[tuple[int, str]]) -> None:
    for (text, arguments), (code, said) in zip(given, found, strict=False):
        case = text[:3000], arguments, said[-500:]
        assert code in (EXIT_OK, EXIT_CONFIG, EXIT_DATA), case
        assert "Traceback" not in said, case
        assert "defect" not in said, case
        assert code == EXIT_OK or said.strip(), case
        assert len(said) < 5000, case
    assert len(found) == len(given), ("hangs, or ends the process", given[len(found)])


def test_a_config_of_nonsense_ends_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = list(cases(_BASE, range(CASES), "--print-config"))
    found = list(run_in_child(given, more_bytes=2**30, each_s=10))
    assert_refused_or_fine(given, found)
    assert {code for code, _ in found} >= {EXIT_OK, EXIT_CONFIG}


@pytest.mark.long
def test_a_dry_run_of_nonsense_ends_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, volume: Path
) -> None:
    """With a volume that is there, so that more is looked at than the config."""
    monkeypatch.chdir(tmp_path)
    base = _BASE | {"data": _BASE["data"] | {"volumes": [{"path": str(volume)}]}}
    given = [(yaml.safe_dump(base).encode(), ["--dry-run"]), *cases(base, range(1000, 1012), "--dry-run")]
    found = list(run_in_child(given, more_bytes=8 * 2**30, each_s=60))
    assert_refused_or_fine(given, found)
    assert found[0][0] == EXIT_OK
