"""One YAML file and its overrides become one frozen Config, or one message that names every mistake and its place."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.config_text import MINIMAL, problems, read
from vesuvius.config import (
    ClusterConfig,
    Config,
    DataConfig,
    DiffusionConfig,
    ModelConfig,
    NormalizeConfig,
    TrainingConfig,
    VolumeConfig,
)
from vesuvius.config.load import dump_config, dump_set_keys, parse_config, parse_stored, read_config
from vesuvius.errors import EXIT_CONFIG, ConfigError

NO_DEADLINE = settings(deadline=None)  # a loaded machine is no failure

# ---- what a good file means


def test_defaults_fill_what_the_file_leaves_out() -> None:
    config = read(MINIMAL)
    assert config == Config(name="tiny", data=DataConfig(volumes=(VolumeConfig(path="scroll.zarr"),)))
    assert (config.training.amp, config.data.patch_size) == ("auto", (72, 136, 136))
    assert "path: ../a/./b.zarr" in dump_config(read(MINIMAL.replace("scroll.zarr", "../a/./b.zarr"))), "as written"


def test_scalars_follow_yaml_1_2() -> None:
    for written in ("1e-4", "1.0e-4", "0.0001", ".0001", "+1E-4", "100e-6", "1.e-4"):
        assert read(f"{MINIMAL}training: {{lr: {written}}}").training.lr == 1e-4, written
    for written, value in {"010": 10, "0o10": 8, "0x10": 16, "+7": 7}.items():
        assert read(f"{MINIMAL}seed: {written}").seed == value
    for text in ("off", "on", "yes", "no", "y", "N", "12:30:45", "2024-01-02", "1_000", "=", "1e", "."):
        assert read(f"{MINIMAL}cluster: {{address: {text}}}").cluster.address == text
    for text in ("'10'", "!!str 10"):
        assert read(f"{MINIMAL}cluster: {{address: {text}}}").cluster.address == "10"
    for written, value in {"true": True, "True": True, "FALSE": False, "false": False}.items():
        assert read(f"{MINIMAL}training: {{compile: {written}}}").training.compile is value
    for written in ("null", "~", "Null", ""):
        assert read(f"{MINIMAL}diffusion:\n  min_snr_gamma: {written}\n").diffusion.min_snr_gamma is None
    clip = read(f"{MINIMAL}training: {{clip_norm: 2, amp: off}}").training
    assert (type(clip.clip_norm), clip.amp) == (float, "off")


def test_an_alias_repeats_values_and_an_override_does_not_reach_through_it() -> None:
    text = "name: a\ndata:\n  volumes:\n    - &first {path: a.zarr, weight: 2}\n    - *first\n"
    config = read(text, "data.volumes.1.path=b.zarr")
    assert config.data.volumes == (VolumeConfig(path="a.zarr", weight=2), VolumeConfig(path="b.zarr", weight=2))
    volumes = "".join(f"\n    - {{path: {n}.zarr, mask: *m}}" for n in range(100))
    config = read(
        f"name: x\ndata:\n  min_foreground: 0.5\n  volumes:\n    - {{path: a, mask: &m {{path: m}}}}{volumes}"
    )
    assert config.data.volumes[100].mask == config.data.volumes[0].mask


# ---- files that are no config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# only a comment\n", "x.yaml: the file is empty; set at least name and data.volumes"),
        ("\n- a\n", "x.yaml: no keys at the top level; write keys and values such as `name: demo`"),
        ("name: a: b", "x.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("name: a\nseed: *x", "x.yaml:2: not valid YAML: found undefined alias 'x'"),
        ("name: a\nseed: \x01", "x.yaml:2: not valid YAML: the character '\\x01' is not allowed"),
        ("name: a\n? [b]\n: c", "x.yaml:2: invalid key; use plain text on one line"),
        (
            "name: a\nseed: !!python/name:os.system x",
            "x.yaml:2: seed: cannot read the value as os.system; write a plain value",
        ),
        ("name: a\nseed: !!int x", "x.yaml:2: seed: cannot read the value as int; write a plain value"),
        ("name: a\nseed: 0x" + "f" * 2000, "x.yaml:2: seed: cannot read the value as int; write a plain value"),
        ('name: "\\ud800"', "x.yaml:1: name: cannot read the value as str; write a plain value"),
        ("[" * 600, "x.yaml:1: not valid YAML: nested too deeply, or an alias refers to its own parent"),
        (
            "name: a\nbase: &b {lr: 1}\ntraining:\n  <<: *b\n",
            "x.yaml:4: <<: merge keys are not read; write the keys here, or in a file that this one `extends`",
        ),
        ("a:\n  lr: 1\n  b: 1\n  lr: 2\n", "x.yaml:4: a.lr: the key is set twice; remove one"),
        (
            "name: a\nseed: &x [*x, *x]\n",
            "x.yaml:1: not valid YAML: nested too deeply, or an alias refers to its own parent",
        ),
    ],
)
def test_what_is_not_a_config_is_refused_with_its_line(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_ten_lines_of_nested_aliases_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    began = time.monotonic()
    (line,) = problems("\n".join(lines))
    assert time.monotonic() - began < 10, "they stand for 10^10 values"
    assert line == "x.yaml:1: more than 20000 values; use fewer YAML aliases"


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for what, make in (("No such file or directory", lambda: None), ("Is a directory", path.mkdir)):
        make()
        with pytest.raises(ConfigError, match=rf"x\.yaml: {what}") as caught:
            read_config(path)
        assert caught.value.exit_code == EXIT_CONFIG
    (resolved := path / "config.resolved.yaml").touch()
    with pytest.raises(ConfigError, match=r"of a run its config\.resolved\.yaml$"):
        read_config(path)
    resolved.unlink()
    path.rmdir()
    path.write_bytes(b"name: a\nseed: \xff\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: byte 0xff is not UTF-8"):
        read_config(path)
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert read_config(path).name == "tiny", "a byte order mark is skipped"


def test_all_problems_come_in_one_message() -> None:
    text = "sead: 1\ntraining:\n  lr: 0\n  amp: no\ndata: {volumes: []}\n"
    lines = problems(text, "training.workers=two", "nothing")
    assert {line.partition(": ")[0] for line in lines} == {
        "x.yaml", "x.yaml:1", "x.yaml:3", "x.yaml:4", "x.yaml:5", "override training.workers=two", "override nothing",
    }  # fmt: skip


# ---- overrides


def test_overrides_replace_and_add_in_order_and_index_lists() -> None:
    config = read(
        f"{MINIMAL}training: {{lr: 1, workers: two}}",
        "training.lr=1e-3",
        "training.amp=off",
        "training.workers=1",
        "data.volumes=[{path: other.zarr}, {path: b}]",
        "data.volumes.0.level=1",
        "data.volumes[1]={path: d, weight: 3}",
        "model.channels=[8, 16]",
        "model.attention_heads=4",
        "cluster={address: auto}",
        "cluster.address = a=b c",
        "seed=1",
        "seed=2",
    )
    assert (config.training.lr, config.training.amp, config.training.workers, config.seed) == (1e-3, "off", 1, 2)
    assert config.data.volumes == (VolumeConfig(path="other.zarr", level=1), VolumeConfig(path="d", weight=3.0))
    assert (config.model.channels, config.cluster) == ((8, 16), ClusterConfig(address="a=b c"))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("training.workers", "not an override; write key.path=value, such as training.lr=1e-4"),
        ("training..lr=3", "not an override; write key.path=value, such as training.lr=1e-4"),
        ("training.\x1b=3", "not an override; write key.path=value, such as training.lr=1e-4"),
        ("training.max_steps=", "the value is missing; write null for none, or '' for empty text"),
        ("name.first=a", "name is 'tiny' and has no key first"),
        ("data.volumes.1.path=x", "data.volumes has no entry 1; use 0, its only entry"),
        ("data.volumes.path=x", "data.volumes has no entry path; use 0, its only entry"),
        ("model.channels.0=8", "model.channels is not a list in the file and has no entry 0; set the full list"),
        ("seed=3: 4: 5", "not valid YAML: mapping values are not allowed here"),
        ("seed=[1,\n  2]", "seed: [1, 2] is not valid; use an integer of at least 0"),
        ("training.max_stps=8", "training.max_stps: unknown key; did you mean max_steps?"),
        ("data.volumes.0.lvl=8", "data.volumes.0.lvl: unknown key; did you mean level?"),
        ("model={channels: [a]}", "model.channels.0: 'a' is not valid; use an integer of at least 1"),
        ("data={}", "data.volumes: required key is missing"),
        (
            "data.patch_size=[72, 136, 128]",
            "data: augment.rot90 cannot rotate patches of [72, 136, 128] voxels, which are not square in y and x; set "
            "data.augment.rot90=false or make patch_size square",
        ),
    ],
)
def test_a_wrong_override_is_reported_by_its_own_text(override: str, text: str) -> None:
    """Other overrides are not named, even for neighboring keys."""
    others = "seed=3", "training.lr=1", "monitor.guard=off"
    assert problems(MINIMAL, others[1], override, others[2]) == [f"override {' '.join(override.split())}: {text}"]


def test_problems_name_the_override_or_the_file_that_caused_them() -> None:
    text = f"{MINIMAL}training:\n  lr: 0\n  workers: 1\n"
    assert problems(text, "training.workers=-1") == [
        "override training.workers=-1: training.workers: -1 is not valid; use an integer of at least 0",
        "x.yaml:6: training.lr: 0 is not valid; use a number above 0",
    ]
    assert problems(text, "data.seed=1", "training.lr=1") == [
        "override data.seed=1: data.seed: unknown key; did you mean seed?"
    ]
    contradicts = f"{MINIMAL}diffusion: {{min_snr_gamma: 5}}\n"
    assert problems(contradicts, "diffusion.sampler_steps=7")[0].startswith("x.yaml:5: diffusion: diffusion.min_snr")
    of_all = "diffusion.sampler_guidance=2"
    assert problems(MINIMAL, of_all, "training.lr=1")[0].startswith(f"override {of_all}: {of_all[:-2]} 2.0 needs")


# ---- writing

_WORDS = (
    "off", "yes", "1e4", "1_0", "0o7", "010", "12:30", "2024-01-01", "null", "~", "", "- a", "a: b", "a #b", "<<", "=",
    "'", "\\", "...",
)  # fmt: skip
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(_WORDS)
_counts = st.integers(1, 2**40)
_positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def _configs(draw: st.DrawFn) -> Config:
    """Valid configs that differ from the defaults in every kind of value."""
    volume = st.builds(
        VolumeConfig,
        path=_texts.filter(bool),
        level=st.integers(0, 9),
        weight=st.floats(1e-6, 1),  # together they must not differ by more than 1e9
        select=st.lists(st.integers(0, 5)).map(tuple),
    )
    channels = draw(st.lists(st.integers(1, 64).map(lambda n: 8 * n), min_size=1, max_size=3))
    multiples = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    z, yx = (2 ** len(channels) * multiple for multiple in multiples)
    low, width = draw(st.floats(-1e6, 1e6)), draw(st.floats(1e-3, 1e6))
    return Config(
        name=draw(st.text("abcXYZ019._-", min_size=1).filter(lambda name: name not in {".", ".."})),
        seed=draw(st.integers(0, 2**70)),
        data=DataConfig(
            volumes=tuple(draw(st.lists(volume, min_size=1, max_size=3))),
            patch_size=(z, yx, yx),
            normalize=draw(st.sampled_from([NormalizeConfig(), NormalizeConfig(low=low, high=low + width)])),
        ),
        training=draw(
            st.builds(
                TrainingConfig,
                lr=_positive,
                max_steps=st.none() | _counts,
                amp=st.sampled_from(["auto", "off", "bf16", "fp16"]),
                compile=st.booleans(),
                warmup_steps=st.integers(0, 999),
            )
        ),
        diffusion=draw(st.builds(DiffusionConfig, noise=st.just("cosine"), min_snr_gamma=st.none() | _positive)),
        model=ModelConfig(channels=tuple(channels)),
        cluster=draw(st.builds(ClusterConfig, address=st.none() | _texts)),
    )


@NO_DEADLINE
@given(_configs(), st.sampled_from([{}, {"name": "other"}]))
def test_a_dumped_or_stored_config_reads_back_equal_and_means_the_same_to_others(
    config: Config, changes: dict[str, str]
) -> None:
    """PyYAML's safe_load reads YAML 1.1, in which a bare `off` is false."""
    dumped, stored = dump_config(config), config.model_dump(mode="json")
    assert parse_config(dumped) == config
    assert yaml.load(dumped, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) == stored
    overrides = [f"{key}={value}" for key, value in changes.items()]
    assert parse_stored(stored, overrides) == config.model_copy(update=changes)


def test_the_set_keys_of_a_config_read_back_equal_with_their_comments() -> None:
    config = read(f"{MINIMAL}    - {{path: b, level: 2}}\ntraining: {{lr: 1, amp: auto}}\nmodel: {{}}\n")
    text = dump_set_keys(config, {"data.volumes[].level": "coarse", "training": "the loop", "training.lr": "high"})
    assert text.splitlines() == [
        "name: tiny",
        "data:",
        "  volumes:",
        "    - path: scroll.zarr",
        "    - path: b",
        "      level: 2  # coarse",
        "training:  # the loop",
        "  amp: auto",
        "  lr: 1.0  # high",
    ]
    assert parse_config(text) == config


_FRAGMENTS = (
    "name", "data", "volumes", "training", "lr", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ",", "&a ", "*a", "!!int ",
    "1e4", "'", '"', "#", "|", "\t", "?",
)  # fmt: skip


@NO_DEADLINE
@given(
    st.text(max_size=60) | st.lists(st.sampled_from(_FRAGMENTS), max_size=25).map("".join),
    st.lists(st.text(max_size=12), max_size=2),
)
def test_any_text_and_overrides_give_a_config_or_a_config_error(text: str, overrides: list[str]) -> None:
    assert all(line.startswith(("x.yaml:", "override ")) for line in problems(text, *overrides))


def test_importing_the_config_loads_no_heavy_library() -> None:
    code = "import sys, vesuvius.config.load; print(*{'torch', 'ray', 'zarr', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# ---- keys that are gone


def test_removed_keys_of_a_stored_config_are_ignored_unless_the_model_depends_on_them() -> None:
    """A checkpoint of another version resumes and samples."""
    stored: dict[str, Any] = parse_config(MINIMAL).model_dump(mode="json")
    assert parse_stored(stored | {"monitor": stored["monitor"] | {"webhook": "https://h/s"}}) == parse_stored(stored)
    section = {"wandb": {"project": "x"}, "monitor": stored["monitor"] | {"old.er": {"x": 1}}}
    assert parse_stored(stored | section) == parse_stored(stored)
    old = {key: value for key, value in stored["diffusion"].items() if key != "residual_guidance_interval"}
    guided = parse_stored(stored | {"diffusion": old | {"residual_guidance": 1.25}})
    assert guided.diffusion.residual_guidance_interval is None, "it was sampled so"
    assert parse_stored(stored | {"diffusion": old}) == parse_stored(stored)
    for section, key in (("model", "film"), ("diffusion", "flow_shift")):  # of a later version, perhaps
        with pytest.raises(ConfigError, match=rf"was trained with {section}\.{key}=3, which this version"):
            parse_stored(stored | {section: stored[section] | {key: 3}})
