"""One YAML file and its overrides become one frozen Config, or one message that names every mistake and its place."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.config_text import MINIMAL, problems
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

Read = Callable[..., Config]
Refuse = Callable[..., list[str]]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Writes the text to x.yaml in an empty working directory and reads it with the overrides."""
    monkeypatch.chdir(tmp_path)

    def read_text(text: str | bytes, *overrides: str) -> Config:
        path = Path("x.yaml")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_config(path, overrides)

    return read_text


@pytest.fixture
def refuse(read: Read) -> Refuse:
    """As `read`, but it must fail; returns the lines of the message."""

    def read_and_catch(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read(text, *overrides)
        return str(caught.value).split("\n")

    return read_and_catch


# ---- what a good file means


def test_defaults_fill_what_the_file_leaves_out(read: Read) -> None:
    config = read(MINIMAL)
    assert config == Config(name="tiny", data=DataConfig(volumes=(VolumeConfig(path="scroll.zarr"),)))
    assert (config.training.amp, config.data.patch_size) == ("auto", (72, 136, 136))


@pytest.mark.parametrize("written", ["1e-4", "1.0e-4", "0.0001", ".0001", "+1E-4", "100e-6", "1.e-4"])
def test_numbers_need_neither_a_dot_nor_a_sign_in_the_exponent(read: Read, written: str) -> None:
    assert read(f"{MINIMAL}training: {{lr: {written}}}").training.lr == 1e-4


def test_a_float_key_takes_whole_numbers(read: Read) -> None:
    config = read(f"{MINIMAL}training: {{clip_norm: 2, lr: 1e4}}")
    assert (config.training.clip_norm, config.training.lr) == (2.0, 1e4)
    assert type(config.training.clip_norm) is float


@pytest.mark.parametrize(("written", "value"), [("010", 10), ("0o10", 8), ("0x10", 16), ("+7", 7)])
def test_integers_follow_yaml_1_2(read: Read, written: str, value: int) -> None:
    assert read(f"{MINIMAL}seed: {written}").seed == value


@pytest.mark.parametrize(
    "text", ["off", "on", "yes", "no", "y", "N", "12:30:45", "2024-01-02", "1_000", "=", "1e", "."]
)
def test_what_yaml_1_1_would_convert_is_text(read: Read, text: str) -> None:
    assert read(f"{MINIMAL}cluster: {{address: {text}}}").cluster.address == text


def test_amp_off_is_the_choice_off(read: Read) -> None:
    assert read(f"{MINIMAL}training:\n  amp: off\n").training.amp == "off"


@pytest.mark.parametrize(("written", "value"), [("true", True), ("True", True), ("FALSE", False), ("false", False)])
def test_booleans_are_true_and_false(read: Read, written: str, value: bool) -> None:
    assert read(f"{MINIMAL}training: {{compile: {written}}}").training.compile is value


@pytest.mark.parametrize("written", ["null", "~", "Null", ""])
def test_null_is_null(read: Read, written: str) -> None:
    assert read(f"{MINIMAL}diffusion:\n  min_snr_gamma: {written}\n").diffusion.min_snr_gamma is None


def test_quotes_and_tags_make_text(read: Read) -> None:
    assert read(f"{MINIMAL}cluster: {{address: '10'}}").cluster.address == "10"
    assert read(f"{MINIMAL}cluster: {{address: !!str 10}}").cluster.address == "10"


def test_an_override_does_not_reach_through_an_alias(read: Read) -> None:
    text = "name: a\ndata:\n  volumes:\n    - &first {path: a.zarr, weight: 2}\n    - *first\n"
    config = read(text, "data.volumes.1.path=b.zarr")
    assert config.data.volumes == (VolumeConfig(path="a.zarr", weight=2), VolumeConfig(path="b.zarr", weight=2))


def test_volume_paths_stay_as_written(read: Read) -> None:
    assert read(MINIMAL.replace("scroll.zarr", "../a/./scroll.zarr")).data.volumes[0].path == "../a/./scroll.zarr"


def test_a_byte_order_mark_is_skipped(read: Read) -> None:
    assert read(b"\xef\xbb\xbf" + MINIMAL.encode()).name == "tiny"


# ---- files that are no config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: the file is empty; it needs at least name and data.volumes"),
        ("# only a comment\n", "x.yaml: the file is empty; it needs at least name and data.volumes"),
        ("\n- a\n", "x.yaml:2: the file must hold keys and values, such as `name: demo`, at the top level"),
        ("just text", "x.yaml:1: the file must hold keys and values, such as `name: demo`, at the top level"),
        ("name: a\ndata:\n\tvolumes: []", "x.yaml:3: not valid YAML: a tab cannot stand here; indent with spaces"),
        ("name: a: b", "x.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("name: a\nseed: *x", "x.yaml:2: not valid YAML: found undefined alias 'x'"),
        ("name: a\nseed: \x01", "x.yaml:2: not valid YAML: the character '\\x01' is not allowed"),
        ("name: a\n? [b]\n: c", "x.yaml:2: a key must be plain text on one line"),
        (
            "name: a\nseed: !!python/name:os.system x",
            "x.yaml:2: seed: cannot be read as os.system; write a plain value",
        ),
        ('"a\\nb": 1', "x.yaml:1: a key must be plain text on one line"),
        ("name: a\nseed: !!int x", "x.yaml:2: seed: cannot be read as int; write a plain value"),
        ("name: a\nseed: 0x" + "f" * 2000, "x.yaml:2: seed: cannot be read as int; write a plain value"),
        ('name: "\\ud800"', "x.yaml:1: name: cannot be read as str; write a plain value"),
        ("[" * 3000, "x.yaml: not valid YAML: nested too deeply"),
        (b"name: a\nseed: \xff\n", "x.yaml:2: must be UTF-8 text; got byte 0xff"),
    ],
)
def test_what_is_not_a_config_is_refused_with_its_line(refuse: Refuse, text: str | bytes, message: str) -> None:
    assert refuse(text) == [message]


def test_an_unclosed_bracket_names_what_is_missing(refuse: Refuse) -> None:
    (line,) = refuse("name: a\nseed: [1\n")
    assert line.startswith(
        "x.yaml:3: not valid YAML: while parsing a flow sequence begun on line 2, expected ',' or ']'"
    )


def test_an_alias_to_its_own_parent_ends(refuse: Refuse) -> None:
    (line,) = refuse("name: a\nseed: &x [*x, *x]\n")
    assert line.startswith("x.yaml:2: seed.0.0...: nested too deeply")


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file") as caught:
        read_config(tmp_path / "none.yaml")
    assert caught.value.exit_code == EXIT_CONFIG
    with pytest.raises(ConfigError, match="this is a directory"):
        read_config(tmp_path)


def test_a_key_set_twice_is_refused_with_both_lines(refuse: Refuse) -> None:
    assert refuse(f"{MINIMAL}training:\n  lr: 1\n  workers: 1\n  lr: 2\n") == [
        "x.yaml:8: training.lr: the key is set twice; first at x.yaml:6; remove one"
    ]


def test_all_problems_come_in_one_message_in_the_order_of_the_file(refuse: Refuse) -> None:
    text = "sead: 1\ntraining:\n  lr: 0\n  lr: 1\n  amp: no\ndata: {volumes: []}\n"
    lines = refuse(text, "training.workers=two", "nothing")
    assert [line.partition(": ")[0] for line in lines] == [
        "x.yaml",
        "x.yaml:1",
        "x.yaml:3",
        "x.yaml:4",
        "x.yaml:5",
        "x.yaml:6",
        "override nothing",
        "override training.workers=two",
    ]


# ---- overrides


def test_overrides_replace_and_add(read: Read) -> None:
    config = read(
        f"{MINIMAL}training: {{lr: 1}}",
        "training.lr=1e-3",
        "training.amp=off",
        "training.max_steps=8",
        "data.volumes=[{path: other.zarr, level: 1}]",
        "model.channels=[8, 16]",
        "cluster={address: auto}",
    )
    assert (config.training.lr, config.training.amp, config.training.max_steps) == (1e-3, "off", 8)
    assert config.data.volumes == (VolumeConfig(path="other.zarr", level=1),)
    assert config.model.channels == (8, 16)
    assert config.cluster == ClusterConfig(address="auto")


def test_an_override_indexes_a_list(read: Read) -> None:
    volumes = read(
        f"{MINIMAL}    - path: b\n", "data.volumes.1.path=c", "data.volumes.0={path: d, weight: 3}"
    ).data.volumes
    assert volumes == (VolumeConfig(path="d", weight=3.0), VolumeConfig(path="c"))
    assert read(MINIMAL, "data.volumes[0].path=e").data.volumes[0].path == "e", "as messages name it"


def test_the_last_override_wins_and_sees_the_ones_before(read: Read) -> None:
    config = read(MINIMAL, "seed=1", "data.volumes=[{path: a}, {path: b}]", "data.volumes.1.level=2", "seed=2")
    assert config.seed == 2
    assert config.data.volumes == (VolumeConfig(path="a"), VolumeConfig(path="b", level=2))


def test_an_override_may_hold_an_equals_sign_and_spaces(read: Read) -> None:
    assert read(MINIMAL, "cluster.address = a=b c").cluster.address == "a=b c"


def test_an_override_can_make_a_wrong_file_right(read: Read) -> None:
    assert read(f"{MINIMAL}training: {{workers: two}}", "training.workers=2").training.workers == 2


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("training.workers", "an override must look like key.path=value, such as training.lr=1e-4"),
        ("", "an override must look like key.path=value, such as training.lr=1e-4"),
        ("=3", "an override must look like key.path=value, such as training.lr=1e-4"),
        ("training.=3", "an override must look like key.path=value, such as training.lr=1e-4"),
        ("training..lr=3", "an override must look like key.path=value, such as training.lr=1e-4"),
        ("training.max_steps=", "the value is missing; write null for none, or '' for empty text"),
        ("name.first=a", "name is a plain value and has no key first; got 'tiny'"),
        ("data.volumes.1.path=x", "data.volumes has 1 entries, counted from 0; got index 1"),
        ("data.volumes.-1.path=x", "data.volumes has 1 entries, counted from 0; got index -1"),
        ("data.volumes.path=x", "data.volumes has 1 entries, counted from 0; got index path"),
        ("model.channels.0=8", "model.channels is not a list in the file; got index 0; give the whole list"),
        ("seed=3: 4: 5", "not valid YAML: mapping values are not allowed here"),
        ("seed=!!set {a}", "seed: cannot be read as set; write a plain value"),
        ("training.workers=two", "training.workers: must be an integer of at least 0; got 'two'"),
        ("training.max_stps=8", "training.max_stps: unknown key; got 8; did you mean max_steps?"),
        ("trainng.lr=8", "trainng: unknown key; got {lr: 8}; did you mean training?"),
        ("data.volumes.0.lvl=8", "data.volumes.0.lvl: unknown key; got 8; did you mean level?"),
        ("model={channels: [a]}", "model.channels.0: must be an integer of at least 1; got 'a'"),
        ("data={}", "data.volumes: required key is missing"),
        ("seed={a: 1, a: 2}", "seed.a: the key is set twice; first at override seed={a: 1, a: 2}; remove one"),
    ],
)
def test_a_wrong_override_is_refused_by_its_own_text(refuse: Refuse, override: str, text: str) -> None:
    assert f"override {override}: {text}" in refuse(MINIMAL, override)


@pytest.mark.parametrize("key", ["seed\nseed", "\udc80", "training.\x1b"])
def test_an_override_with_an_unprintable_key_is_refused(refuse: Refuse, key: str) -> None:
    (line,) = refuse(MINIMAL, f"{key}=1")
    assert line.endswith(": an override must look like key.path=value, such as training.lr=1e-4")


def test_a_refused_override_changes_nothing_else(refuse: Refuse) -> None:
    assert len(refuse(MINIMAL, "data.volumes=[{path: ")) == 1
    assert len(refuse(MINIMAL, "model.channels.0.x=8")) == 1
    assert len(refuse(MINIMAL, ".".join("abcdefghijklmnopqrstuvwxyz") + "=1")) == 1


def test_an_overridden_value_is_not_blamed_on_the_file_nor_the_reverse(refuse: Refuse) -> None:
    text = f"{MINIMAL}training:\n  lr: 0\n  workers: 1\n"
    assert refuse(text, "training.workers=-1") == [
        "x.yaml:6: training.lr: must be a number above 0; got 0",
        "override training.workers=-1: training.workers: must be an integer of at least 0; got -1",
    ]
    assert refuse(text, "data.seed=1", "training.lr=1") == [
        "override data.seed=1: data.seed: unknown key; got 1; did you mean seed?"
    ]


def test_an_override_of_several_lines_stays_on_one_line_of_the_message(refuse: Refuse) -> None:
    assert refuse(MINIMAL, "seed=[1,\n  2]") == [
        "override seed=[1, 2]: seed: must be an integer of at least 0; got [1, 2]"
    ]


def test_a_rule_across_keys_names_the_overrides_that_had_a_say(refuse: Refuse) -> None:
    (line,) = refuse(MINIMAL, "seed=3", "data.patch_size=[72, 136, 128]")
    assert line.startswith("x.yaml:2 with override data.patch_size=[72, 136, 128]: data: augment.turn needs")
    (line,) = refuse(MINIMAL, "training.warmup_steps=1000")
    assert line.startswith("x.yaml with override training.warmup_steps=1000: training.warmup_steps must be below")


# ---- writing

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "off",
        "yes",
        "1e4",
        "1_0",
        "0o7",
        "010",
        "12:30",
        "2024-01-01",
        "null",
        "~",
        "",
        "- a",
        "a: b",
        "a #b",
        "<<",
        "=",
        "'",
        "\\",
        "...",
    ]
)
_counts = st.integers(1, 2**40)
_positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def _configs(draw: st.DrawFn) -> Config:
    """Valid configs that differ from the defaults in every kind of value."""
    volume = st.builds(
        VolumeConfig,
        path=_texts,
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
@given(_configs())
def test_a_dumped_config_reads_back_equal(config: Config) -> None:
    assert parse_config(dump_config(config)) == config


@NO_DEADLINE
@given(_configs())
def test_a_stored_config_reads_back_equal_and_takes_overrides(config: Config) -> None:
    stored = config.model_dump(mode="json")
    assert parse_stored(stored) == config
    assert parse_stored(stored, ["name=other"]) == config.model_copy(update={"name": "other"})


@NO_DEADLINE
@given(_configs())
def test_a_dumped_config_means_the_same_to_other_yaml_readers(config: Config) -> None:
    """PyYAML's safe_load reads YAML 1.1, where a bare `off` would be false."""
    assert yaml.safe_load(dump_config(config)) == config.model_dump(mode="json")


def test_a_dumped_text_stays_readable_on_one_line(read: Read) -> None:
    path = "Pompeï " * 30 + "end"
    assert f"    - path: {path}\n" in dump_config(read(MINIMAL, f"data.volumes.0.path={path}"))


def test_a_value_that_occurs_twice_is_written_twice(read: Read) -> None:
    plane = (1, 2, 2)
    model = ModelConfig(channels=(8, 8, 8), strides=(plane, plane))
    assert "  strides: [[1, 2, 2], [1, 2, 2]]\n" in dump_config(read(MINIMAL).model_copy(update={"model": model}))


def test_the_set_keys_of_a_config_read_back_equal_with_their_comments(read: Read) -> None:
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


_fragments = st.sampled_from(
    [
        "name",
        "data",
        "volumes",
        "training",
        "lr",
        ": ",
        "\n",
        "  ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&a ",
        "*a",
        "!!int ",
        "1e4",
        "'",
        '"',
        "#",
        "|",
        "\t",
        "?",
    ]
)


@NO_DEADLINE
@given(
    st.text(max_size=60) | st.lists(_fragments, max_size=25).map("".join), st.lists(st.text(max_size=12), max_size=2)
)
def test_any_text_and_overrides_give_a_config_or_a_config_error(text: str, overrides: list[str]) -> None:
    assert all(line.startswith(("x.yaml:", "override ")) for line in problems(text, *overrides))


# ---- the rest


def test_importing_the_config_loads_no_heavy_library() -> None:
    code = "import sys, vesuvius.config.load; print(*{'torch', 'ray', 'zarr', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_key_that_was_removed_is_refused_with_what_takes_its_place_and_without_its_value(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: a\ndata: {volumes: [{path: v}]}\nmonitor:\n  webhook: https://h/s3cr3t\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:4: monitor\.webhook: was removed; Prometheus") as refused:
        read_config(path)
    assert "s3cr3t" not in str(refused.value)
    path.write_text("name: a\ndata: {volumes: [{path: v}]}\nmonitor: {webhook: null}\n")
    read_config(path)  # as in the resolved config of an older run
    with pytest.raises(ConfigError, match=r"VESUVIUS_MONITOR__WEBHOOK: monitor\.webhook was removed; Prometheus"):
        read_config(path, environment={"VESUVIUS_MONITOR__WEBHOOK": "https://h/s3cr3t"})


def test_a_stored_config_with_a_key_that_was_removed_is_read() -> None:
    """A checkpoint of an earlier version resumes and samples."""
    stored = parse_config("name: a\ndata: {volumes: [{path: v}]}\n").model_dump(mode="json")
    assert parse_stored(stored | {"monitor": stored["monitor"] | {"webhook": "https://h/s"}}) == parse_stored(stored)
