"""A model in one file, from disk and from a real web server: the samples are those of its checkpoint, and nothing else
than such a file is accepted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file, save_file
from tools.export_model import export

from tests.support.odd_server import Asked, odd_server, served, sized
from tests.support.runs import WriteConfig, vesuvius_train
from vesuvius.commands import sample
from vesuvius.config import StoreConfig
from vesuvius.errors import ConfigError, DataError, StorageError
from vesuvius.training.checkpoint import download
from vesuvius.training.checkpoint.download import local_checkpoint
from vesuvius.training.checkpoint.format import STATE, find_checkpoint, load_state
from vesuvius.training.checkpoint.start import compare_initial, read_initial_weights
from vesuvius.training.checkpoint.trained import check_weights, load_weights, read_checkpoint_info


@pytest.fixture(scope="session")
def model(two_steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    export(two_steps / "tiny", path, "CC-BY-4.0")
    return path


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def changed(model: Path, path: Path, **keys: Any) -> Path:
    """A copy with other values in its header."""
    tensors = load_file(model)
    length = int.from_bytes(model.read_bytes()[:8], "little")
    state = json.loads(json.loads(model.read_bytes()[8 : 8 + length])["__metadata__"]["vesuvius"])
    save_file(tensors, path, {"vesuvius": json.dumps(state | keys)})
    return path


def test_a_model_file_holds_what_sampling_reads_from_its_checkpoint(
    two_steps: Path, model: Path, tmp_path: Path
) -> None:
    checkpoint = find_checkpoint(two_steps / "tiny")
    theirs, ours = read_checkpoint_info(checkpoint), read_checkpoint_info(find_checkpoint(model))
    named = tmp_path / "model.safetensors"  # as the weights of a checkpoint
    named.write_bytes(model.read_bytes())
    assert find_checkpoint(named) == named
    assert (ours.step, ours.config, ours.checkpoint) == (theirs.step, theirs.config, model)
    one, two = ours.data.state_dict(), theirs.data.state_dict()
    assert [volume.pop("name") for volume in one["volumes"]] == ["volume.zarr"], "without the folder"
    assert Path(two["volumes"][0].pop("name")).name == "volume.zarr"
    spectra = one.pop("spectrum"), two.pop("spectrum")
    assert one == two
    assert torch.equal(spectra[0].pop("power"), spectra[1].pop("power"))
    assert spectra[0] == spectra[1]
    assert ours.data.voxel_size_um == theirs.data.voxel_size_um, "hashable as in the checkpoint"
    weights = load_weights(model, "ema")
    assert weights.keys() == load_weights(checkpoint, "ema").keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in load_weights(checkpoint, "ema").items())
    assert check_weights(model, "ema") == sum_of(model.read_bytes())
    with pytest.raises(ConfigError, match="has no weights 'model'; choose --weights from ema"):
        check_weights(model, "model")
    export(two_steps / "tiny", tmp_path / "again.safetensors", "CC-BY-4.0")
    assert (tmp_path / "again.safetensors").read_bytes() == model.read_bytes()


@pytest.mark.usefixtures("cache_home")
def test_a_run_can_start_from_a_model_at_an_address(tiny_config: WriteConfig, model: Path) -> None:
    """Of its bytes alone if it says which."""
    with odd_server(lambda asked: served(model.read_bytes(), asked, 'ETag: "1"')) as server:
        config = tiny_config(training={"init_from": f"{server.url}/m.safetensors"})
        assert vesuvius_train(config, "--dry-run") == 0
        assert (
            vesuvius_train(config, "--dry-run", f"training.init_from={server.url}/m.safetensors#sha256={64 * '0'}") == 2
        )


def test_only_downloads_without_a_write_for_a_day_are_deleted(model: Path, cache_home: Path) -> None:
    """Not a slow one, whose folder is older than its last write, nor what else is hidden in a folder of models."""
    folder = cache_home / "vesuvius/models"
    killed, slow, other, elsewhere = (
        folder / name for name in (".download-killed", ".download-slow", ".git", "elsewhere")
    )
    for each in (killed, slow, other, elsewhere):
        each.mkdir(parents=True)
        (each / "m.safetensors").touch()
        os.utime(each / "m.safetensors", None if each == slow else (0, 0))
        os.utime(each, (0, 0))
    (folder / ".download-linked").symlink_to(elsewhere)
    (folder / ".download-gone").symlink_to(folder / "nowhere")  # as one that another command deletes
    fetch(lambda asked: served(model.read_bytes(), asked))
    assert [path.exists() for path in (killed, slow, other, elsewhere)] == [False, True, True, True]


def test_a_run_can_start_from_a_model_file(model: Path) -> None:
    weights, source = read_initial_weights(model)
    assert "vesuvius.spectrum" not in weights
    info = read_checkpoint_info(model)
    assert compare_initial(source, info.config, info.data) == []
    other = info.config.model_copy(update={"diffusion": info.config.diffusion.model_copy(update={"prediction": "eps"})})
    with pytest.raises(ConfigError, match="mean something else in this run"):
        compare_initial(source, other, info.data)


@pytest.mark.usefixtures("cache_home")
def test_samples_of_an_address_are_those_of_the_run_and_it_is_fetched_once(
    two_steps: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VESUVIUS_RUNS", str(two_steps))
    monkeypatch.setattr(download, "_PART_BYTES", 5000)
    data = model.read_bytes()
    given = {"run": "tiny", "file": str(model)}
    with odd_server(lambda asked: served(data, asked, 'ETag: "1"')) as server:
        given["address"] = f"{server.url}/a/tiny.safetensors?download=true#sha256={sum_of(data)}"
        for name, text in given.items():
            assert (
                sample.main(["--checkpoint", text, "--count", "2", "--steps", "1", "--out", str(tmp_path / name)]) == 0
            )
        assert len(server.asked) == 2 + -(-len(data) // 5000)
        assert local_checkpoint(given["address"]) == local_checkpoint(given["address"].partition("#")[0])
        assert len(server.asked) == 2 + -(-len(data) // 5000), "the copy has the sum"
    run, file, address = (np.asarray(zarr.open_array(tmp_path / name / "samples.zarr/0")) for name in given)
    np.testing.assert_array_equal(run, file)
    np.testing.assert_array_equal(run, address)


def fetch(reply: Any, fragment: str = "", name: str = "m.safetensors") -> Path:
    with odd_server(reply) as server:
        return local_checkpoint(f"{server.url}/{name}{fragment}")


def cached(cache_home: Path) -> list[str]:
    return [path.name for path in (cache_home / "vesuvius/models").glob("*")]


@pytest.fixture(autouse=True)
def short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_STORE", StoreConfig(outage_minutes=0.02))


LONG_NUMBER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 5000 + b"]}}"
HTML = b"<!doctype html><html><title>Sign in</title></html>" * 9


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (lambda asked, data: sized("404 Not Found", b"no"), ConfigError, "it does not exist; check the address"),
        (lambda asked, data: sized("403 Forbidden", b"no"), ConfigError, "403"),
        (lambda asked, data: sized("401 Unauthorized", b"no"), DataError, "refuses access"),
        (lambda asked, data: served(HTML, asked), ConfigError, "perhaps a web page"),
        (lambda asked, data: sized("200 OK", HTML, "Content-Type: text/html"), ConfigError, "perhaps a web page"),
        (lambda asked, data: served(pickle.dumps(Path("x")), asked), ConfigError, "is not a .safetensors file"),
        (lambda asked, data: served(data[:-100], asked), ConfigError, "is incomplete"),
        (lambda asked, data: served(b"12345", asked), ConfigError, "is incomplete"),
        (lambda asked, data: served(b"\xbd\x13" + bytes(6) + LONG_NUMBER, asked), StorageError, "Cannot read"),
        (lambda asked, data: sized("503 Busy", b""), DataError, "Cannot reach the store"),
        (lambda asked, data: served(data, asked)[:-1], DataError, "Cannot reach the store"),
        (lambda asked, data: served(data.replace(b"__meta", b"__metA"), asked), StorageError, "Cannot read"),
    ],
    ids=["404", "403", "401", "HTML", "whole", "pickle", "short", "5 bytes", "digits", "503", "cut body", "header"],
)  # fmt: skip
def test_whatever_is_not_the_whole_model_is_refused_and_leaves_no_file(
    reply: Any, error: type[Exception], words: str, model: Path, cache_home: Path
) -> None:
    data = model.read_bytes()
    with pytest.raises(error, match=words):
        fetch(lambda asked: reply(asked, data))
    assert cached(cache_home) == []


def test_another_sum_is_refused_and_a_copy_with_another_one_is_fetched_again(
    model: Path, tmp_path: Path, cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data, newer = model.read_bytes(), changed(model, tmp_path / "new.safetensors", step=9).read_bytes()
    state = {"data": data}
    with odd_server(lambda asked: served(state["data"], asked)) as server:
        address = f"{server.url}/m.safetensors"
        with pytest.raises(ConfigError, match=f"has SHA-256 {sum_of(data)} instead of {'0' * 64}"):
            local_checkpoint(f"{address}#sha256={'0' * 64}")
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            local_checkpoint(f"{address}#sha256=12")
        assert cached(cache_home) == []
        path = local_checkpoint(address)
        assert f"#sha256={sum_of(data)}" in caplog.text
        state["data"] = newer
        assert local_checkpoint(address).read_bytes() == data, "the copy, as the log says"
        assert f"Using the copy of {address}" in caplog.text
        assert local_checkpoint(f"{address}#sha256={sum_of(newer)}").read_bytes() == newer
    assert cached(cache_home) == [path.name]


def test_a_model_that_is_replaced_while_it_is_fetched_is_no_mixture(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    monkeypatch.setattr(download, "_PART_BYTES", 5000)
    newer = changed(model, tmp_path / "new.safetensors", step=9).read_bytes()
    asked_so_far: list[Asked] = []

    def reply(asked: Asked) -> bytes:
        asked_so_far.append(asked)
        return served(
            *((model.read_bytes(), asked, 'ETag: "1"') if len(asked_so_far) < 4 else (newer, asked, 'ETag: "2"'))
        )

    with pytest.raises(ConfigError, match="was replaced between reads"):
        fetch(reply)
    assert cached(cache_home) == []


def test_an_interrupted_download_continues_after_a_short_outage(
    model: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    monkeypatch.setattr(download, "_PART_BYTES", 5000)
    monkeypatch.setattr(download, "_STORE", StoreConfig(outage_minutes=1))
    failures, data = [3, 4, 6], model.read_bytes()
    calls: list[Asked] = []

    def reply(asked: Asked) -> bytes:
        calls.append(asked)
        whole = served(data, asked)
        return whole[: len(whole) // 2] if len(calls) in failures else whole

    with odd_server(reply) as server:
        address = f"{server.url}/m.safetensors"
        assert local_checkpoint(address).read_bytes() == data
    assert len(calls) == 2 + -(-len(data) // 5000) + len(failures), "only the interrupted parts are fetched again"
    assert len(cached(cache_home)) == 1


def test_a_redirect_to_signed_storage_is_followed(model: Path) -> None:
    """As for a file of a release on GitHub."""
    with odd_server(lambda asked: served(model.read_bytes(), asked)) as storage:
        target = f"Location: {storage.url}/asset?sig=1%2B2"
        path = fetch(lambda asked: sized("302 Found", b"", target))
        assert {asked.target for asked in storage.asked} == {"/asset?sig=1%2B2"}
    assert path.read_bytes() == model.read_bytes()


def test_weights_alone_and_models_above_the_limit_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    save_file(load_file(model), tmp_path / "alone.safetensors")
    alone = (tmp_path / "alone.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="holds weights alone"):
        fetch(lambda asked: served(alone, asked))
    monkeypatch.setattr(download, "LARGEST_BYTES", 10_000)
    calls: list[Asked] = []

    def reply(asked: Asked) -> bytes:
        calls.append(asked)
        return served(model.read_bytes(), asked)

    with pytest.raises(ConfigError, match="models have at most"):
        fetch(reply)
    assert len(calls) == 2, "of its weights nothing was fetched"
    assert cached(cache_home) == []


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def test_no_code_of_a_model_or_checkpoint_is_executed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("evil.safetensors", STATE):
        torch.save({"config": Evil()}, tmp_path / name)
    with pytest.raises(StorageError, match="Cannot read"):
        find_checkpoint(tmp_path / "evil.safetensors")
    with pytest.raises(StorageError, match="it is not safe to load"):
        load_state(tmp_path / STATE)
    assert not (tmp_path / "executed").exists()


VOLUME = {
    "name": "../volume.zarr",
    "dtype": "uint8",
    "voxel_size_um": None,
    "shape_zyx": [9, 9, 9],
    "condition_factors": ["1"] * 3,
    "condition_offsets": ["0"] * 3,
    "condition_transform": None,
    "train": [[0, 0, 0], [9, 9, 9]],
    "validation": None,
}

LARGE = VOLUME | {"shape_zyx": [99, 99, 99], "train": [[0, 0, 0], [99, 99, 99]]}


def test_a_network_of_terabytes_is_refused_before_it_takes_memory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_checkpoint_info(model).config.model_dump(mode="json")
    config["model"] |= {"channels": [8, 2**16], "blocks_per_level": 40}
    path = changed(model, tmp_path / "large.safetensors", config=config)
    assert sample.main(["--checkpoint", str(path), "--count", "1", "--out", str(tmp_path / "out")]) == 6
    assert "do not fit the network of their config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"format": 2}, "its format is 2.*, or a newer one"),
        ({"format": 0}, "its format is 0.*that wrote it$"),
        ({"volumes": 3}, "Cannot read the model"),
        ({"volumes": []}, "Cannot read the model"),
        ({"volumes": [VOLUME | {"condition_factors": ["1/0"] * 3}]}, "does not describe its training data"),
        ({"volumes": [VOLUME | {"dtype": "object"}]}, "Cannot read the model"),
        ({"volumes": [VOLUME | {"voxel_size_um": [0, 0, 0]}]}, "Cannot read the model"),
        ({"volumes": [VOLUME | {"shape_zyx": "abc"}]}, "Cannot read the model"),
        ({"intensities": []}, "Cannot read the model"),
        ({"intensities": [["a", "b"]]}, "Cannot read the model"),
        ({"spectrum": None}, "Cannot read the model"),
        ({"spectrum": {"mean": 0, "std": 1, "size_x": 3}}, "a power spectrum of"),
        ({"step": "x"}, "Cannot read the model"),
        ({"config": 3}, "Cannot read the model"),
        ({"config": {"name": 3}}, "name"),
        ({"config": {"diffusion": 0, "model": [1]}}, "diffusion: 0 is not valid"),
        ({"config": {"model": {"full_res_channels": 2**70}}}, "model.full_res_channels is above 65536"),
        ({"intensities": [[0, 1], [0, 1]]}, "contradicts itself"),
        ({"condition_intensities": [[0, 1]]}, "contradicts itself"),
        ({"volumes": [VOLUME, VOLUME]}, "contradicts itself"),
        ({"volumes": [VOLUME]}, "contradicts itself: patches of 8x16x16 in z 0:9, y 0:9, x 0:9 of 9x9x9 voxels"),
        ({"volumes": [LARGE | {"train": [[0, 0, 9], [99, 99, 100]]}]}, "contradicts itself: patches"),
        ({"volumes": [LARGE | {"condition_factors": ["0"] * 3}]}, "contradicts itself: condition factors"),
        ({"spectrum": {"mean": 0, "std": 1, "size_x": 17}}, "contradicts itself: a spectrum"),
    ],
)
def test_a_model_of_another_format_or_with_nonsense_is_refused_with_its_path(
    keys: dict[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    path = changed(model, tmp_path / "model.safetensors", **keys)
    with pytest.raises((StorageError, ConfigError), match=words) as caught:
        read_checkpoint_info(find_checkpoint(path))
    assert str(path) in str(caught.value)
