"""Credentials for web servers and the Hugging Face Hub: the first available, sent only to their host, never logged."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import textured, write_array
from tests.support.odd_server import Asked, OddServer, answer, objects_of, odd_server, served, sized
from tests.support.runs import WriteConfig, vesuvius_train
from vesuvius.config import StoreConfig
from vesuvius.errors import EXIT_DATA, DataError
from vesuvius.volumes.errors import RefusedError
from vesuvius.volumes.store.source import Source

FAST = StoreConfig(outage_minutes=0.01)
SECRET = "s3cr3t-0123456789"
WEB = "VESUVIUS_HTTP_HEADERS"


def basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


@pytest.fixture
def web() -> Iterator[OddServer]:
    """A server that accepts and records every request."""
    with odd_server(lambda asked: served(b"data", asked, 'ETag: "1"')) as server:
        yield server


def sent(server: OddServer, name: str = "authorization") -> set[str | None]:
    return {asked.headers.get(name) for asked in server.asked}


# ---- web servers


def test_the_address_precedes_the_variable_which_precedes_netrc(
    web: OddServer, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    def used(address: str = web.url) -> set[str | None]:
        web.asked.clear()
        source = Source(f"{address}/v", FAST)
        assert source.get("data") == b"data"
        assert source.exists("data")
        return sent(web)

    assert used() == {None}
    netrc = 'machine 127.0.0.1 login me password "pass word"\ndefault login x password y\n'
    (cache_home / "netrc").write_text(netrc)
    assert used() == {basic("me:pass word")}
    host, other = web.url.removeprefix("http://"), web.url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv(WEB, f"\n  {host}   authorization:  Bearer {SECRET} \n127.0.0.1 Cookie: a=b; c=d\n")
    assert used() == {f"Bearer {SECRET}"}
    assert sent(web, "cookie") == {"a=b; c=d"}
    assert used(web.url.replace("//", "//you:p%40w@")) == {basic("you:p@w")}
    assert used(other) == {None}, "neither a line for another host, nor netrc's default"
    assert sent(web, "cookie") == {None}
    source = Source(f"{web.url}/v", StoreConfig(anonymous=True))
    web.asked.clear()
    source.get("data")
    assert sent(web) == {None}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_credentials_do_not_follow_a_redirect_to_another_host_or_port(
    web: OddServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    target = f"Location: {web.url.replace('127.0.0.1', host)}/cdn"
    with odd_server(lambda asked: sized("302 Found", b"", target)) as first:
        monkeypatch.setenv(WEB, f"127.0.0.1 Authorization: Bearer {SECRET}\n127.0.0.1 Cookie: {SECRET}")
        assert Source(first.url, FAST).get("data") == b"data"
        assert sent(first) == {f"Bearer {SECRET}"}
        assert sent(first, "cookie") == {SECRET}
    assert SECRET not in str(web.asked)


@pytest.mark.parametrize(
    "line", [f"X-Api-Key: {SECRET}", f"host X-Api-Key: {SECRET}", f"Authorization: {SECRET}", SECRET]
)
def test_an_unsafe_header_line_is_refused_without_quoting_it(
    web: OddServer, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv(WEB, f"host Cookie: a\n{line}")
    with pytest.raises(
        DataError, match=f"Cannot read line 2 of {WEB}: it is not `HOST Authorization: VALUE`"
    ) as caught:
        Source(web.url, FAST)
    assert SECRET not in str(caught.value)
    assert not web.asked


def test_an_unreadable_netrc_is_reported_once_without_quoting_it(
    web: OddServer, cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache_home / "netrc").write_text(f"machine 127.0.0.1\nlogin me\npasword {SECRET}\n")
    assert Source(web.url, FAST).get("data") == b"data"
    assert re.search(r"Cannot read .*netrc, line 3; no password in it is sent", caplog.text)
    assert SECRET not in caplog.text


def echo(status: str) -> Callable[[Asked], bytes]:
    """A server that echoes requests, as debugging proxies do."""
    return lambda asked: sized(status, f"not allowed: {asked.headers.get('authorization', '')}".encode())


WHO = {
    "address": lambda url, home, patch: url.replace("//", f"//me:{SECRET}@"),
    "variable": lambda url, home, patch: patch.setenv(WEB, f"127.0.0.1 Authorization: Bearer {SECRET}") or url,
    "netrc": lambda url, home, patch: (
        (home / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}") and url
    ),
    "hub": lambda url, home, patch: hub_at(url, patch) or patch.setenv("HF_TOKEN", SECRET) or "hf://datasets/o/n",
    "hub's file": lambda url, home, patch: hub_at(url, patch) or write_token(home) or "hf://datasets/o/n",
}


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "404 Not Found", "418 Teapot"])
@pytest.mark.parametrize("who", WHO)
def test_no_error_or_log_line_contains_a_secret_even_if_the_server_echoes_it(
    monkeypatch: pytest.MonkeyPatch, cache_home: Path, caplog: pytest.LogCaptureFixture, who: str, status: str
) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    with odd_server(echo(status)) as server:
        source = Source(WHO[who](server.url, cache_home, monkeypatch), FAST)
        for probing in (True, False):
            try:
                assert source.get("data", probing=probing) is None
            except DataError as error:
                texts.append(str(error))
        assert sent(server) in ({f"Bearer {SECRET}"}, {basic(f"me:{SECRET}")})
    assert (status[:3] == "404") == (not texts)
    assert (status[:3] == "403") == (source.forbidden is not None)
    for text in (*texts, source.forbidden or "", source.display_address, caplog.text):
        for secret in (SECRET, basic(f"me:{SECRET}")[6:]):
            assert secret not in text


def test_a_refusal_names_the_credentials_used_or_tried(monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> None:
    with odd_server(echo("401 Unauthorized")) as server:
        looked = rf"not signed: no user in the address, no line for 127\.0\.0\.1 in {WEB}, no entry in .*netrc\)"
        with pytest.raises(RefusedError, match=rf"refuses access: .*401.* \({looked}; check"):
            Source(server.url, FAST).get("data")
        for who, words in {"netrc": ".*/netrc", "variable": WEB, "hub": "HF_TOKEN"}.items():
            with pytest.raises(RefusedError, match=rf"401.* \(.*signed with {words}\); check"):
                Source(WHO[who](server.url, cache_home, monkeypatch), FAST).get("data")


def test_ray_readers_get_the_credentials_but_no_file_or_output_contains_them(
    tmp_path: Path, tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server refuses chunks after a step, and echoes the request."""
    monkeypatch.chdir(tmp_path)
    objects = objects_of(write_array(tmp_path / "v.zarr", textured((96, 64, 64)), compressors=None), "/v.zarr")
    monkeypatch.setenv(WEB, f"127.0.0.1 Authorization: Bearer {SECRET}")
    metrics = tmp_path / "runs/tiny/metrics.jsonl"

    def reply(asked: Asked) -> bytes:
        if asked.headers.get("authorization") != f"Bearer {SECRET}":
            return sized("401 Unauthorized", b"who are you?")
        if asked.target[-1].isdigit() and metrics.is_file() and '"kind": "step"' in metrics.read_text():
            return echo("401 Unauthorized")(asked)
        data = objects.get(asked.target)
        return sized("404 Not Found", b"") if data is None else served(data, asked)

    with odd_server(reply) as server:
        config = tiny_config(training={"workers": 1, "max_steps": 1000})
        code = vesuvius_train(config, f'data.volumes=[{{path: "{server.url}/v.zarr", level: 0}}]')
    printed = "".join(capfd.readouterr())
    assert code == EXIT_DATA
    assert "not allowed: Bearer ***" in printed or "not allowed: ***" in printed
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(files) > 5
    for text in (printed, *(file.read_bytes().decode("latin-1") for file in files)):
        assert SECRET not in text


# ---- the Hub


def hub_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{url}/")


def write_token(home: Path) -> None:
    (home / "huggingface").mkdir()
    (home / "huggingface/token").write_text(f"{SECRET}\n")


ROOT = "/datasets/owner/name/resolve"


@pytest.fixture
def objects() -> dict[str, bytes]:
    return {f"{ROOT}/main/v/data": b"data"}


@pytest.fixture
def hub(objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OddServer, OddServer]]:
    """The Hub, which redirects to another host for the files of a repository; and that host."""

    def deliver(asked: Asked) -> bytes:
        assert asked.target.endswith("?signature=of-the-hub")
        data = objects[asked.target.partition("?")[0]]
        return served(data, asked, f'ETag: "{hash(data)}"')

    with odd_server(deliver) as cdn:

        def reply(asked: Asked) -> bytes:
            if asked.target not in objects:
                return answer("404 Not Found", b"Entry not found", "X-Error-Code: EntryNotFound", "Content-Length: 15")
            if asked.target.endswith("json"):  # small files come from the Hub itself, by way of a path of it
                return sized("307 Temporary Redirect", b"", f"Location: /api/resolve-cache{asked.target}")
            return sized("302 Found", b"", f"Location: {cdn.url}{asked.target}?signature=of-the-hub")

        def of_hub(asked: Asked) -> bytes:
            path = asked.target.removeprefix("/api/resolve-cache")
            return served(objects[path], asked, 'ETag: "small"') if path != asked.target else reply(asked)

        with odd_server(of_hub) as server:
            hub_at(server.url, monkeypatch)
            yield server, cdn


REVISIONS = {
    "owner/name": f"{ROOT}/main",
    "owner/name@v1.0": f"{ROOT}/v1.0",
    "owner/name@refs/pr/7": f"{ROOT}/refs%2Fpr%2F7",
    "owner/name@a%2Fbranch": f"{ROOT}/a%2Fbranch",
}


@pytest.mark.parametrize("name", REVISIONS)
def test_a_hub_address_selects_the_file_of_its_revision(
    hub: tuple[OddServer, OddServer], objects: dict[str, bytes], name: str
) -> None:
    objects[f"{REVISIONS[name]}/a%20b%231/data"] = b"of the revision"
    source = Source(f"hf://datasets/{name}/a b#1/", FAST)
    assert source.get("data") == b"of the revision"
    assert source.get("none") is None


@pytest.mark.parametrize("where", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "cache", None])
def test_the_token_does_not_follow_redirects_of_the_hub(
    hub: tuple[OddServer, OddServer], monkeypatch: pytest.MonkeyPatch, cache_home: Path, where: str | None
) -> None:
    if where == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", f" {SECRET}\n")
    elif where is not None:
        write_token(cache_home)
        (cache_home / "huggingface").rename(home := cache_home / ("huggingface" if where == "cache" else "other"))
        if where != "cache":
            monkeypatch.setenv(where, str(home / "token" if where == "HF_TOKEN_PATH" else home))
    for anonymous in (None, True):
        for server in hub:
            server.asked.clear()
        assert Source("hf://datasets/owner/name/v", StoreConfig(anonymous=anonymous)).get("data") == b"data"
        assert sent(hub[0]) == {f"Bearer {SECRET}" if where and not anonymous else None}
        assert sent(hub[1]) == {None}
