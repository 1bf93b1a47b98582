"""A wrong key or value is named in the words of the file, with what was probably meant; docs/config.md likewise."""

import pytest

from tests.support.config_text import MINIMAL, problems, sections
from vesuvius.config.describe import describe_type, iter_keys

WRONG = {
    # what follows the smallest file: the message of line 5, or of the one that is named
    "training: {lr: -1}": "training.lr: -1 is not valid; use a number above 0",
    "training: {workers: '4'}": "training.workers: '4' is not valid; use an integer of at least 0",
    "training: {workers: }": "training.workers: null is not valid; use an integer of at least 0",
    "training: {compile: yes}": "training.compile: 'yes' is not valid; use true or false or auto",
    "training: {amp: bf61}": "training.amp: 'bf61' is not valid; use one of auto, off, bf16, fp16",
    "  stream_gib: 1e300": "data.stream_gib: 1.0e+300 is not valid; use a number above 0 and at most 1073741824",
    "  store: {cache_gib: 1e300}": "data.store.cache_gib: 1.0e+300 is not valid; use a number above 0 and at most "
    "1073741824",
    "  condition_classes: 9999999999": "data.condition_classes: 9999999999 is not valid; use an integer of at least 1 "
    "and at most 65536 or a list, each an integer or null",
    "training: {ranks: 0}": "training.ranks: 0 is not valid; use an integer of at least 1 or auto",
    "training:\n  # a comment\n  lr: 0": "7: training.lr: 0 is not valid; use a number above 0",
    "model:": "model: null is not valid; use a section with keys of its own",
    "model: {channels: 8}": "model.channels: 8 is not valid; use a list of at least 1 value, each an integer of at "
    "least 1",
    "model: {stem_stride: [2]}": "model.stem_stride: [2] is not valid; use a list of 3 values, each an integer of at "
    "least 1",
    "model: {stem_stride: [2, 0, 2]}": "model.stem_stride.1: 0 is not valid; use an integer of at least 1",
    "diffusion: {noise: quadratic}": "diffusion.noise: 'quadratic' is not valid; use one of spectral, cosine, linear",
    'seed: ["a\\nb", c]': 'seed: ["a\\nb", c] is not valid; use an integer of at least 0',
    "seed: |\n  a\n  b": r"seed: 'a\nb\n' is not valid; use an integer of at least 0",
    "training:\n  keep_lst: 4": "6: training.keep_lst: unknown key; did you mean keep_last?",
    "train_batch: 4": "train_batch: unknown key; did you mean training.train_batch_size?",
    "training: {timesteps: 9}": "training.timesteps: unknown key; did you mean diffusion.timesteps?",
    "cluster: {foo: 'a'}": "cluster.foo: unknown key; known keys: address, min_ranks, ",
    "    - path: b\n      levl: 1": "6: data.volumes.1.levl: unknown key; did you mean level?",
    "  augment: {fip: true}": "data.augment.fip: unknown key; did you mean flip?",
    "training: {autotune: act}": "training.autotune: unknown key; `vesuvius tune --config FILE` finds the settings "
    "before a run",
    "  augment: {x: true}": "data.augment.x: unknown key; known keys: flip, rot90",
    "    - level: 0": "data.volumes.1.path: required key is missing",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_key_or_value_is_reported_with_line_rule_and_suggestion(text: str) -> None:
    (line,) = problems(f"{MINIMAL}{text}\n")
    message = WRONG[text] if WRONG[text][0].isdigit() else f"5: {WRONG[text]}"
    assert line.startswith(f"x.yaml:{message}")
    assert line == f"x.yaml:{message}" or message.endswith(", ")


def test_missing_required_keys_and_a_wrong_name_are_reported() -> None:
    assert problems("seed: 1") == ["x.yaml: name: required key is missing", "x.yaml: data: required key is missing"]
    assert problems("name: a\ndata:\n  augment: {}\n") == ["x.yaml:2: data.volumes: required key is missing"]
    assert problems(MINIMAL.replace("tiny", "a/b")) == [
        "x.yaml:1: name: 'a/b' cannot name a run directory; use letters, digits, '.', '_' and '-' only"
    ]


@pytest.mark.parametrize("value", ["-1", "0.5", ".nan", "true", "null", "wrong/value", "[]", "[a]", "{a: 1}"])
def test_no_message_shows_the_words_of_the_library(value: str) -> None:
    """Every key gets this value, which is wrong for most of them."""
    refused = 0
    for key, _ in iter_keys():
        override = f"{key.replace('[]', '.0')}={value}"
        for line in problems(MINIMAL, override):
            refused += 1
            of_several_keys = line.startswith("x.yaml: ")
            assert f"override {override}: " in line or of_several_keys or line.endswith(": required key is missing")
            assert not any(word in line.lower() for word in ("pydantic", "input", "://", "tuple", "valid "))
    assert refused > 20


def test_iter_keys_finds_every_field_of_every_section() -> None:
    keys = [key for key, _ in iter_keys()]
    assert len(keys) == len(set(keys)) == sum(len(section.model_fields) for section in sections())
    assert {"name", "training", "training.lr", "data.volumes", "data.volumes[].path", "data.augment.flip"} <= set(keys)
    assert all(describe_type(schema) for _, schema in iter_keys())
