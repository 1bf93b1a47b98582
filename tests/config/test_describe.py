"""A wrong key or value is named in the words of the file, with what was probably meant; docs/config.md likewise."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.config_text import MINIMAL, problems, sections
from vesuvius.config.describe import describe_type, iter_keys

TABLE_TOOL = Path(__file__).parents[2] / "tools" / "config_table.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: -1", "training.lr: must be a number above 0; got -1"),
        ("lr: .nan", "training.lr: must be a finite number; got .nan"),
        ("lr: true", "training.lr: must be a number above 0; got true"),
        ("workers: '4'", "training.workers: must be an integer of at least 0; got '4'"),
        ("workers: 2.5", "training.workers: must be an integer of at least 0; got 2.5"),
        ("workers: 1e2", "training.workers: must be an integer of at least 0; got 100.0; did you mean 100?"),
        ("workers:", "training.workers: must be an integer of at least 0; got null"),
        (
            "max_steps: None",
            "training.max_steps: must be an integer of at least 1 or null; got 'None'; did you mean null?",
        ),
        ("ema_decay: 1", "training.ema_decay: must be a number of at least 0 and below 1; got 1"),
        ("compile: yes", "training.compile: must be true or false; got 'yes'; did you mean true?"),
        ("amp: bf61", "training.amp: must be one of auto, off, bf16, fp16; got 'bf61'; did you mean 'bf16'?"),
        ("amp: Off", "training.amp: must be one of auto, off, bf16, fp16; got 'Off'; did you mean 'off'?"),
    ],
)
def test_a_wrong_value_is_named_with_rule_and_value(text: str, message: str) -> None:
    assert problems(f"{MINIMAL}training:\n  # a comment\n  {text}\n") == [f"x.yaml:7: {message}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 7", "x.yaml:1: name: must be text; got 7; did you mean '7'?"),
        (
            "name: a/b",
            "x.yaml:1: name: a name may hold letters, digits, '.', '_' and '-' only, because it names the run "
            "directory; got 'a/b'",
        ),
        ("model:", "x.yaml:1: model: must be a section with keys of its own; got null; did you mean {}?"),
        (
            "model: {channels: 8}",
            "x.yaml:1: model.channels: must be a list of at least 1, each an integer of at least 1; got 8",
        ),
        (
            "model: {stem_stride: [2]}",
            "x.yaml:1: model.stem_stride: must be a list of 3 values, each an integer; got [2]",
        ),
        (
            "model: {stem_stride: [2, 0, 2]}",
            "x.yaml:1: model.stem_stride: each of the three sizes (z, y, x) must be at least 1; got [2, 0, 2]",
        ),
        ("model: {stem_stride: [2, a, 2]}", "x.yaml:1: model.stem_stride.1: must be an integer; got 'a'"),
        (
            "diffusion: {noise: quadratic}",
            "x.yaml:1: diffusion.noise: must be one of edm, cosine, linear; got 'quadratic'",
        ),
    ],
)
def test_wrong_text_sections_and_lists_are_named(text: str, message: str) -> None:
    start = MINIMAL.partition("\n")[2] if text.startswith("name") else MINIMAL
    assert problems(f"{text}\n{start}") == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training:\n  train_batch_siz: 4",
            "x.yaml:6: training.train_batch_siz: unknown key; got 4; did you mean train_batch_size?",
        ),
        ("batch_size: 4", "x.yaml:5: batch_size: unknown key; got 4; did you mean training.train_batch_size?"),
        ("trainin: {lr: 1}", "x.yaml:5: trainin: unknown key; got {lr: 1}; did you mean training?"),
        (
            "training:\n  timesteps: 9",
            "x.yaml:6: training.timesteps: unknown key; got 9; did you mean diffusion.timesteps?",
        ),
        ("training:\n  ema: 0.9", "x.yaml:6: training.ema: unknown key; got 0.9; did you mean ema_decay?"),
        ("monitor:\n  every: 9", "x.yaml:6: monitor.every: unknown key; got 9; did you mean verdict_every?"),
        ("training: {ranks: 0}", "x.yaml:5: training.ranks: must be an integer of at least 1 or auto; got 0"),
        (
            "training: {ranks: Auto}",
            "x.yaml:5: training.ranks: must be an integer of at least 1 or auto; got 'Auto'; did you mean 'auto'?",
        ),
        ("level: 1", "x.yaml:5: level: unknown key; got 1; did you mean data.volumes[].level?"),
        (
            "cluster:\n  foo: 'a'",
            "x.yaml:6: cluster.foo: unknown key; got 'a'; known here: address, min_ranks, reader_nodes, "
            "max_restarts, rank_timeout_minutes, object_store_gib",
        ),
        (
            "training.lr: 1",
            "x.yaml:5: training.lr: unknown key; got 1; dots join keys in overrides only: write each part on a line "
            "of its own, indented",
        ),
    ],
)
def test_an_unknown_key_or_a_wrong_value_is_refused_with_the_likely_one(text: str, message: str) -> None:
    assert problems(MINIMAL + text) == [message]


def test_a_misspelt_key_in_a_list_is_found_by_its_entry() -> None:
    assert problems(f"{MINIMAL}    - path: b\n      levl: 1\n    - level: 0\n") == [
        "x.yaml:6: data.volumes.1.levl: unknown key; got 1; did you mean level?",
        "x.yaml:7: data.volumes.2.path: required key is missing",
    ]


def test_missing_required_keys_are_named_by_what_to_write() -> None:
    assert problems("seed: 1") == [
        "x.yaml: name: required key is missing",
        "x.yaml: data.volumes: required key is missing",
    ]
    assert problems("name: a", "data.patches_per_region=8") == ["x.yaml: data.volumes: required key is missing"]
    assert problems("name: a\ndata:\n  augment: {}\n") == ["x.yaml:2: data.volumes: required key is missing"]


@pytest.mark.parametrize("value", ["-1", "0.5", ".nan", "true", "null", "wrong/value", "[]", "[a]", "{a: 1}"])
def test_no_value_of_any_key_brings_out_the_words_of_the_library(value: str) -> None:
    """Every key gets this value, which is wrong for most; where it is right there is no message to look at."""
    refused = 0
    for key, _ in iter_keys():
        override = f"{key.replace('[]', '.0')}={value}"
        for line in problems(MINIMAL, override):
            refused += 1
            assert f"override {override}: " in line or line.endswith("path: required key is missing")
            assert "; got " in line or line.endswith(": required key is missing")
            assert not any(word in line.lower() for word in ("pydantic", "input", "://", "tuple", "valid "))
    assert refused > 20


def test_a_value_of_several_lines_stays_on_one_line_of_the_message() -> None:
    assert problems(MINIMAL + 'seed: ["a\\nb", c]') == [
        'x.yaml:5: seed: must be an integer of at least 0; got ["a\\nb", c]'
    ]
    assert problems(f"{MINIMAL}seed: |\n  a\n  b\n") == [
        r"x.yaml:5: seed: must be an integer of at least 0; got 'a\nb\n'"
    ]


def test_a_long_value_is_cut_in_the_message() -> None:
    (line,) = problems(f"{MINIMAL}seed: {'x' * 500}")
    assert line.endswith("xxx...")
    assert len(line) < 160


def test_iter_keys_finds_every_field_of_every_section() -> None:
    keys = [key for key, _ in iter_keys()]
    assert len(keys) == len(set(keys)) == sum(len(section.model_fields) for section in sections())
    assert {"name", "training", "training.lr", "data.volumes", "data.volumes[].path", "data.augment.flip"} <= set(keys)
    assert all(describe_type(schema) for _, schema in iter_keys())


def test_the_reference_tool_writes_what_it_then_finds_correct(tmp_path: Path) -> None:
    page = tmp_path / "config.md"

    def tool(action: str) -> subprocess.CompletedProcess[str]:
        return fork_server.run([sys.executable, TABLE_TOOL, action, page], capture_output=True, text=True)

    assert "No such file" in tool("--check").stderr
    page.write_text("# Title\n", encoding="utf-8")
    checked = tool("--check")
    assert checked.returncode == 1
    assert "out of date; run: python" in checked.stderr
    assert tool("--write").returncode == 0
    assert tool("--check").returncode == 0
    text = page.read_text(encoding="utf-8")
    assert "| `training.lr` | a number above 0 | `0.0001` | peak learning rate of both optimizers |\n" in text
    assert all(text.count(f"| `{key}` |") == 1 for key, schema in iter_keys() if "properties" not in schema)
    assert "\n## `data`: where patches come from\n" in text
