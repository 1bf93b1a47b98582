"""The tuned config is the source's own text with other values, and reads as the source with those values would."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vesuvius.config_file import parse_config
from vesuvius.config_words import to_yaml
from vesuvius.errors import ConfigError, StorageError
from vesuvius.lab.tune.report.tuned_config import (
    MARK,
    TunedValue,
    check_replaceable,
    remove_tuned,
    tuned_path,
    tuned_values,
    tuned_yaml,
    value_at,
    write_tuned,
)
from vesuvius.lab.tune.terms.setting import Setting

TOP = "name: tiny\ndata:\n  volumes:\n    - path: scroll.zarr\n"
SHORT = "1.9 times the samples/s"
LONG = "doubling the readers gave 1.9 times the samples/s of the baseline, and going from 8 to 16 gave 0.8 % more, " * 2


def tune(source: str, reason: str = SHORT, **values: object) -> str:
    """The tuned text without its header; `values` of `training.*`."""
    return tune_keys(source, {f"training.{key}": TunedValue(value, reason) for key, value in values.items()})  # type: ignore[arg-type]


def tune_keys(source: str, changes: dict[str, TunedValue]) -> str:
    text = tuned_yaml(source, "x.yaml", changes, ["by hand"])
    bom = "\ufeff" if source.startswith("\ufeff") else ""
    header = re.match(rf"{bom}# {MARK} from x\.yaml; .*(\r\n|\r|\n)# by hand\1\1", text)
    assert header
    return bom + text[header.end() :]


def test_a_value_is_replaced_where_it_stands_with_its_reason_behind_it() -> None:
    source = TOP + "training:\n  workers:   2  \n  amp: 'off'\n"
    assert tune(source, workers=6) == TOP + (
        "training:\n  workers:   6  # tuned: was 2; 1.9 times the samples/s\n  amp: 'off'\n"
    )


def test_a_comment_of_the_user_stays_and_ours_goes_above_it() -> None:
    source = TOP + "training:\n  workers: 2   # raise\tme: €\n"
    assert tune(source, workers=6) == TOP + (
        "training:\n  # tuned: workers was 2; 1.9 times the samples/s\n  workers: 6   # raise\tme: €\n"
    )


def notes(text: str) -> list[str]:
    """First lines of all notes."""
    return re.findall(r"# (tuned: .*)", text)


def test_a_note_of_an_earlier_tune_above_a_key_is_replaced() -> None:
    source = TOP + "training:\n  # mine\n  #   and more\n  workers: 2  # raise me\n  amp: auto\n"
    once = tune(source, LONG, workers=6)
    assert once.count("tuned: ") == 1
    assert tune(once, workers=8) == source.replace(
        "  workers: 2", "  # tuned: workers was 6; 1.9 times the samples/s\n  workers: 8"
    )


def test_a_long_note_replaces_one_that_stood_behind_the_value_and_the_other_way_round() -> None:
    behind = tune(TOP + "training:\n  workers: 2\n", workers=6)
    above = tune(behind, LONG, workers=8)
    assert above.endswith("\n  workers: 8\n")
    assert above.count("tuned: ") == 1
    assert tune(above, workers=6) == behind.replace("was 2", "was 8")


def test_notes_on_keys_that_are_not_tuned_again_and_users_comments_between_them_stay() -> None:
    source = TOP + "training: {workers: 2, prefetch_factor: 2}\n"
    once = tune(source, LONG, workers=6, prefetch_factor=4).replace("training:", "# mine\ntraining:")
    again = tune(once, prefetch_factor=8)
    assert notes(again)[0] == notes(once)[0]
    assert notes(again)[1] == "tuned: prefetch_factor was 4; 1.9 times the samples/s"
    assert len(notes(again)) == 2
    assert "\n# mine\n# tuned: prefetch_factor" in again


def test_two_keys_of_one_name_on_one_line_keep_both_their_notes() -> None:
    source = "name: tiny\ndata: {volumes: [{path: a.zarr, level: 0}, {path: b.zarr, level: 0}]}\n"
    changes = {f"data.volumes.{i}.level": TunedValue(1, f"of {i}") for i in (0, 1)}
    assert notes(tune_keys(source, changes)) == ["tuned: level was 0; of 0", "tuned: level was 0; of 1"]


def test_the_header_of_an_earlier_tune_is_replaced() -> None:
    change = {"training.workers": TunedValue(6, SHORT)}
    once = tuned_yaml("# mine\n" + TOP, "x.yaml", change, ["first"])
    again = tuned_yaml(once, "x.tuned.yaml", {"training.workers": TunedValue(8, SHORT)}, ["second"])
    assert again.startswith(f"# {MARK} from x.tuned.yaml; ")
    assert again.count(MARK) == 1
    assert "\n# second\n\n# mine\nname: tiny\n" in again
    assert "first" not in again


def test_one_empty_line_stands_below_the_header() -> None:
    for source in (TOP, "\n" + TOP):
        assert re.search(r"# x\n\nname: tiny\n", tuned_yaml(source, "x.yaml", {}, ["x"]))


def test_a_long_reason_goes_above_in_lines_that_can_be_read() -> None:
    lines = tune(TOP + "training:\n  workers: 2\n", LONG, workers=6).splitlines()
    assert lines[-1] == "  workers: 6"
    assert all(len(line) <= 120 for line in lines)
    words = " ".join(line.strip().removeprefix("#").strip() for line in lines[5:-1])
    assert words == f"tuned: workers was 2; {' '.join(LONG.split())}"


def test_what_an_earlier_tune_said_behind_a_value_is_replaced() -> None:
    once = tune(TOP + "training:\n  workers: 2\n", workers=6)
    assert tune(once, "again", workers=8).endswith("  workers: 8  # tuned: was 6; again\n")


def test_a_key_that_the_file_lacks_goes_behind_the_last_of_its_section() -> None:
    source = TOP + "training:\n    amp: auto  # last\n\n# about the model\nmodel: {}\n"
    assert tune(source, workers=6) == TOP + (
        "training:\n    amp: auto  # last\n    workers: 6  # tuned: was 2 by default; 1.9 times the samples/s\n\n"
        "# about the model\nmodel: {}\n"
    )


def test_a_section_that_the_file_lacks_is_appended() -> None:
    text = tune(TOP.rstrip("\n"), workers=6, compile=True)
    assert text == TOP + (
        "\ntraining:\n  workers: 6  # tuned: was 2 by default; 1.9 times the samples/s\n"
        "  compile: true  # tuned: was false by default; 1.9 times the samples/s\n"
    )


def test_a_section_inside_another_is_made_where_it_belongs() -> None:
    text = tune_keys(TOP + "seed: 3\n", {"data.store.requests": TunedValue(32, "store latency")})
    assert text == TOP + "  store:\n    requests: 32  # tuned: was 16 by default; store latency\nseed: 3\n"


def test_a_section_in_braces_keeps_its_braces() -> None:
    source = TOP + "training: {workers: 1, amp: auto,}  # short\n"
    assert tune(source, workers=6, prefetch_factor=4) == TOP + (
        "# tuned: workers was 1; 1.9 times the samples/s\n"
        "# tuned: prefetch_factor was 2 by default; 1.9 times the samples/s\n"
        "training: {workers: 6, amp: auto, prefetch_factor: 4,}  # short\n"
    )


def test_a_file_in_braces_and_an_empty_section_are_edited_too() -> None:
    source = "{name: tiny, data: {volumes: [{path: a.zarr}]}, training: {}}"
    changes = {"training.workers": TunedValue(0, "a"), "data.store.requests": TunedValue(32, "b")}
    assert tune_keys(source, changes) == (
        "# tuned: workers was 2 by default; a\n# tuned: requests was 16 by default; b\n"
        "{name: tiny, data: {volumes: [{path: a.zarr}], store: {requests: 32}}, training: {workers: 0}}"
    )


def test_a_list_in_lines_becomes_one_behind_its_key() -> None:
    source = TOP + "training:\n  checkpoint_levels:\n  - 0\n  - 1  # the rest\n  amp: auto\n"
    assert tune(source, checkpoint_levels=()) == TOP + (
        "training:\n  # tuned: checkpoint_levels was [0, 1]; 1.9 times the samples/s\n"
        "  checkpoint_levels: []  # the rest\n  amp: auto\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("amp: |-\n    auto\n\n  workers: 3", "amp: 'off'"),
        ("amp: >-\n    auto", "amp: 'off'"),
        ("amp:\n    auto", "amp: 'off'"),
        ("amp:  # the dtype\n    auto", "amp:  # the dtype\n    'off'"),
        ("amp: !!str auto", "amp: 'off'"),
        ("amp: &unused auto", "amp: 'off'"),
        ("? amp\n  : auto", "? amp\n  : 'off'"),
        ('"amp" : "auto"', "\"amp\" : 'off'"),
    ],
)
def test_other_ways_to_write_a_value_are_replaced_whole(before: str, after: str) -> None:
    text = tune(TOP + f"training:\n  {before}\n", amp="off")
    without_ours = re.sub(r"( *# tuned: [^\n]*\n)|(  # tuned: [^\n]*)", "", text)
    assert without_ours.startswith(TOP + f"training:\n  {after}")
    assert "auto" not in without_ours


def test_a_comment_above_a_key_does_not_become_part_of_a_text_before_it() -> None:
    source = TOP + "training:\n amp: |-\n   auto\n ? compile\n : false  # mine\n"
    assert tune(source, compile=True) == TOP + (
        "training:\n amp: |-\n   auto\n # tuned: compile was false; 1.9 times the samples/s\n ? compile\n"
        " : true  # mine\n"
    )


def test_items_of_lists_are_named_by_their_index() -> None:
    source = TOP + "      level: 0\n  patch_size: [8, 16, 16]\n"
    changes = {
        "data.volumes.0.level": TunedValue(1, "a"),
        "data.volumes.0.weight": TunedValue(2.0, "b"),
        "data.patch_size.0": TunedValue(24, "c"),
    }
    assert tune_keys(source, changes) == TOP + (
        "      level: 1  # tuned: was 0; a\n      weight: 2.0  # tuned: was 1.0 by default; b\n"
        "  # tuned: patch_size.0 was 8; c\n  patch_size: [24, 16, 16]\n"
    )


def test_a_whole_list_of_sections_is_replaced() -> None:
    text = tune_keys(TOP, {"data.volumes": TunedValue([{"path": "b.zarr", "level": 2}], "given")})
    assert "  volumes: [{path: b.zarr, level: 2}]  # tuned: was [{path: scroll.zarr, level: 0" in text


def test_an_alias_is_replaced_and_the_value_that_it_repeated_stays() -> None:
    source = TOP + "training:\n  accumulate_steps: &n 4\n  workers: *n\n"
    assert tune(source, workers=6) == source.replace("*n", "6  # tuned: was 4; 1.9 times the samples/s")


@pytest.mark.parametrize(
    ("text", "place"),
    [("  workers: &n 4\n  accumulate_steps: *n\n", "x.yaml:6: "), ("  workers: &n 4\n  keep_last: *n\n", "x.yaml:6: ")],
)
def test_a_value_that_is_repeated_elsewhere_is_not_changed_behind_the_users_back(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=r"must be written out to be tuned; got a value that \*n shares") as error:
        tune(TOP + "training:\n" + text, workers=6)
    assert str(error.value).startswith(place)


def test_a_section_that_is_written_elsewhere_is_not_edited_there() -> None:
    source = "name: tiny\ndata:\n  volumes:\n    - path: a.zarr\n  validation: &empty {}\n  store: *empty\n"
    with pytest.raises(ConfigError, match=r"x\.yaml:6: data\.store\.requests must be written out"):
        tune_keys(source, {"data.store.requests": TunedValue(32, "")})
    with pytest.raises(ConfigError, match=r"x\.yaml:5: data\.validation\.guard must be written out"):
        tune_keys(source, {"data.validation.guard": TunedValue(0.5, "")})


def test_line_ends_byte_order_mark_and_a_missing_last_line_end_are_kept() -> None:
    source = "\ufeff" + (TOP + "training:\n  amp: auto").replace("\n", "\r\n")
    text = tune(source, workers=6)
    assert text.startswith(source + "\r\n  workers: 6")
    assert "\n" not in text.replace("\r\n", "")


def test_a_reason_cannot_break_out_of_its_comment() -> None:
    reason = "line\nlr: 7\r\n\x85a\u2028b: c\x07 # d"
    text = tune(TOP + "training:\n  workers: 2\n", reason, workers=6)
    assert text == TOP + "training:\n  workers: 6  # tuned: was 2; line lr: 7 a b: c? # d\n"


def test_a_value_as_it_was_changes_no_line() -> None:
    assert tune(TOP + "training:\n  workers: 2\n", workers=2) == TOP + "training:\n  workers: 2\n"


def test_a_value_that_its_key_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.workers: must be an integer"):
        tune(TOP, workers="many")


def test_a_layout_that_cannot_be_edited_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"prefetch_mib can be changed in place; they cannot; .*prefetch_mib=8"):
        tune(TOP + "training: {prefetch_mib}\n", prefetch_mib=8)


def test_the_real_experiment_keeps_every_line_that_was_not_tuned() -> None:
    source = Path("configs/exp001_full.yaml").read_text(encoding="utf-8")
    tuned = tune(source, workers=6, prefetch_factor=4, train_batch_size=2).splitlines()
    changed = [line for line in source.splitlines() if line not in tuned]
    assert changed == ["  train_batch_size: 1", "  workers: 2", "  prefetch_factor: 2"]


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_knob_of_a_real_config_can_be_tuned_at_once_and_again(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for more in (1, 2):
        source = Setting.of(parse_config(text))
        changed = replace(
            source,
            workers=source.workers + more,
            requests=source.requests + more,
            prefetch_factor=source.prefetch_factor + more,
            train_batch_size=source.train_batch_size + more,
            accumulate_steps=source.accumulate_steps + more,
            amp="off" if source.amp == "auto" else "auto",
            compile=not source.compile,
            channels_last=not source.channels_last,
            checkpoint_levels=() if source.checkpoint_levels else (1,),
            cudnn_benchmark=not source.cudnn_benchmark,
            cuda_allocator="default" if source.cuda_allocator == "expandable" else "expandable",
        )
        text = tuned_yaml(text, "x.yaml", tuned_values(changed, source, {"workers": LONG}), [])
        assert Setting.of(parse_config(text)) == changed
        assert len(notes(text)) == len(changed.changes(source)) == 11
        assert text.count(MARK) == 1


def test_a_value_is_found_by_its_key_as_overrides_write_it() -> None:
    dump = parse_config(TOP + "  patch_size: [8, 16, 16]\n").model_dump(mode="json")
    assert value_at(dump, "data.patch_size.0") == 8
    assert value_at(dump, " data . volumes . 0 . path ") == "scroll.zarr"
    assert value_at({"a": None}, "a.b") is None
    with pytest.raises(KeyError):
        value_at(dump, "data.nothing")


def test_a_key_with_spaces_is_the_same_key() -> None:
    spaced = tune_keys(TOP, {" training . workers ": TunedValue(6, SHORT)})
    assert spaced == tune(TOP, workers=6)


def test_tuned_values_are_the_changes_with_their_reasons() -> None:
    source = Setting.of(parse_config(TOP))
    best = Setting.from_record(source.record() | {"workers": 6, "requests": 32})
    assert tuned_values(best, source, {"workers": "knee", "amp": "kept"}) == {
        "training.workers": TunedValue(6, "knee"),
        "data.store.requests": TunedValue(32, "measured"),
    }


def test_the_tuned_file_lies_beside_its_source() -> None:
    assert tuned_path(Path("configs/exp001_full.yaml")) == Path("configs/exp001_full.tuned.yaml")
    assert tuned_path(Path("a.b.yml")) == Path("a.b.tuned.yml")
    assert tuned_path(Path("plain")) == Path("plain.tuned.yaml")


def test_only_a_file_that_a_tune_has_written_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.tuned.yaml"
    write_tuned(path, tuned_yaml(TOP, "x.yaml", {}, []))
    again = tuned_yaml(TOP, "x.yaml", {"training.workers": TunedValue(6, SHORT)}, [])
    write_tuned(path, again)
    assert path.read_bytes() == again.encode()
    path.write_text(TOP)
    with pytest.raises(ConfigError, match="which is not a file that begins with"):
        write_tuned(path, again)
    assert path.read_text() == TOP
    assert [file.name for file in tmp_path.iterdir()] == ["x.tuned.yaml"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"must be writable; got .*; make room"):
        write_tuned(tmp_path / "missing" / "x.yaml", TOP)


def test_a_place_that_cannot_be_written_is_known_before_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"must be writable; got No such file or directory"):
        check_replaceable(tmp_path / "missing" / "x.yaml")
    (tmp_path / "file").write_text(TOP)
    with pytest.raises(StorageError, match=r"must be writable; got"):
        check_replaceable(tmp_path / "file" / "x.yaml")
    check_replaceable(tmp_path / "x.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_known_before_the_first_trial(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match=r"must be writable; got Permission denied"):
            check_replaceable(tmp_path / "x.yaml")
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_and_a_loop_of_links_are_refused_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("directory", "loop"):
        for act in (check_replaceable, lambda path: write_tuned(path, TOP)):
            with pytest.raises(ConfigError, match=r"which is not a file that begins with"):
                act(tmp_path / name)


@pytest.mark.parametrize("there", [False, True])
def test_a_symbolic_link_stays_one(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "elsewhere.yaml", tmp_path / "x.tuned.yaml"
    link.symlink_to(target)
    text = tuned_yaml(TOP, "x.yaml", {}, [])
    if there:
        target.write_text(text)
    write_tuned(link, text + "seed: 3\n")
    assert link.is_symlink()
    assert target.read_text() == text + "seed: 3\n"


def test_only_what_a_tune_has_written_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.tuned.yaml"
    assert not remove_tuned(path)
    path.write_text(TOP)
    assert not remove_tuned(path)
    assert path.read_text() == TOP
    path.unlink()
    write_tuned(path, tuned_yaml(TOP, "x.yaml", {}, []))
    assert remove_tuned(path)
    assert list(tmp_path.iterdir()) == []


VALUES = {
    "workers": st.integers(0, 64),
    "prefetch_factor": st.integers(1, 64),
    "amp": st.sampled_from(["auto", "off", "bf16", "fp16"]),
    "compile": st.booleans(),
    "checkpoint_levels": st.lists(st.integers(0, 3), max_size=3),
}
NOISE = st.sampled_from(["", "", "\n", "# noté\n", "  # deep\n\n", "#\ttabs\t\n", "  \n"])


@dataclass(frozen=True)
class Layout:
    """A file, and the lines of it that belong to no changed key."""

    text: str
    changes: dict[str, object]
    kept: list[str]


@st.composite
def written(draw: st.DrawFn, key: str, value: object, indent: str) -> str:
    """One key in block style, in one of the many ways."""
    shown = to_yaml(value)
    quoted = draw(st.sampled_from([key, f'"{key}"', f"'{key}'"])) + draw(st.sampled_from(["", " "]))
    behind = draw(st.sampled_from(["", "  ", "  # mine", " #\ttab: é # two"]))
    match draw(st.sampled_from(["plain", "plain", "next line", "commented", "block", "explicit"])):
        case "next line":
            return f"{indent}{quoted}:\n{indent}    {shown}{behind}\n"
        case "commented":
            return f"{indent}{quoted}: # why\n{indent}  {shown}{behind}\n"
        case "block" if isinstance(value, str):
            return f"{indent}{quoted}: {draw(st.sampled_from(['|-', '>-']))}\n{indent}  {value}\n"
        case "block" if isinstance(value, list) and value:
            inner = indent + draw(st.sampled_from(["", "  "]))
            return f"{indent}{quoted}:\n" + "".join(f"{inner}- {item}{behind}\n" for item in value)
        case "explicit":
            return f"{indent}? {quoted}\n{indent}: {shown}{behind}\n"
    return f"{indent}{quoted}:{draw(st.sampled_from([' ', '   ']))}{shown}{behind}\n"


@st.composite
def sections(draw: st.DrawFn, present: dict[str, object], changes: dict[str, object]) -> tuple[str, list[str]]:
    """`training` with these keys, and the lines of it that are to stay."""
    if draw(st.booleans()):
        gap = draw(st.sampled_from([" ", "\n  ", "  # in braces\n   "]))
        body = f",{gap}".join(f"{key}: {to_yaml(value)}" for key, value in present.items())
        behind = draw(st.sampled_from(["", ",", gap]))
        behind = behind if present or behind != "," else ""
        line = f"training: {{{body}{behind}}}{draw(st.sampled_from(['', '  # behind']))}\n"
        return line, [] if changes else line.splitlines()
    if not present:
        return "", []
    indent = " " * draw(st.integers(1, 5))
    text, kept = "training:\n", ["training:"]
    for key, value in present.items():
        noise, lines = draw(NOISE), draw(written(key, value, indent))
        text += noise + lines
        kept += noise.splitlines() + ([] if key in changes else lines.splitlines())
    return text, kept


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(st.permutations(list(VALUES)))
    present = {key: draw(VALUES[key]) for key in names if draw(st.booleans())}
    changes: dict[str, object] = {key: draw(VALUES[key]) for key in names if draw(st.booleans())}
    section, kept = draw(sections(present, changes))
    before, after = draw(st.sampled_from(["", "---\n", "# top\n"])), draw(st.sampled_from(["", "# end\n", "seed: 3\n"]))
    text = before + TOP + section + after
    lines = before.splitlines() + TOP.splitlines() + kept + after.splitlines()
    if draw(st.booleans()):
        text = text.rstrip("\n")
    return Layout(draw(st.sampled_from([text, text.replace("\n", "\r\n")])), changes, [line for line in lines if line])


@settings(deadline=None, max_examples=300)
@given(layout=layouts(), reason=st.sampled_from([SHORT, LONG, "a: b # c", ""]))
def test_any_layout_reads_as_the_source_with_the_changes_and_keeps_its_other_lines(layout: Layout, reason: str) -> None:
    text = tune(layout.text, reason, **layout.changes)
    overrides = [f"training.{key}={to_yaml(value)}" for key, value in layout.changes.items()]
    assert parse_config(text) == parse_config(layout.text, overrides)
    lines = iter(text.splitlines())
    assert [line for line in layout.kept if line not in lines] == []  # `in` consumes: the order is compared too


@settings(deadline=None, max_examples=100)
@given(layout=layouts(), reason=st.sampled_from([SHORT, LONG]))
def test_tuned_twice_says_the_last_reason_of_each_key_once(layout: Layout, reason: str) -> None:
    once = tune(layout.text, reason, **layout.changes)
    source = Setting.of(parse_config(once))
    other = source.record() | {"workers": source.workers + 1, "compile": not source.compile}
    changed = Setting.from_record(other)
    again = tuned_yaml(once, "x.yaml", tuned_values(changed, source, {"workers": SHORT, "compile": LONG}), [])
    assert Setting.of(parse_config(again)) == changed
    kept = source.changes(Setting.of(parse_config(layout.text))).keys() - {"workers", "compile"}
    assert len(notes(again)) == len(kept) + 2
