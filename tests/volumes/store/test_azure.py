"""Azure blobs: signed with the first available credentials, verified by the server; read and listed like files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support.azure import ACCOUNT, CONTAINER, KEY, TOKEN, azure_server, sas_token, signer
from tests.support.odd_server import Asked, OddServer, objects_of, odd_server, sized
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import RefusedError
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.store import credentials
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import open_volume

FAST = StoreConfig(outage_minutes=0.01)
ADDRESS = f"az://{CONTAINER}/v"
SAS = urlencode(sas_token())


@pytest.fixture
def blobs() -> dict[str, bytes]:
    return {"v/data": b"data"}


@pytest.fixture
def azure(blobs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    with azure_server(blobs) as server:
        use(server, monkeypatch)
        yield server


def use(server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send requests to az addresses to a server, from a machine without an identity."""
    credentials._answers.cache_clear()
    monkeypatch.setattr(credentials, "_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.url}/{ACCOUNT}")


SIGNED = {
    "AZURE_STORAGE_ACCOUNT_KEY": (KEY, "key"),
    "AZURE_STORAGE_KEY": (KEY, "key"),
    "AZURE_STORAGE_SAS_TOKEN": (f"?{SAS}", "sas"),
    "AZURE_STORAGE_TOKEN": (TOKEN, "identity"),
}


@pytest.mark.parametrize("name", SIGNED)
def test_requests_are_signed_with_credentials_of_the_environment(
    azure: OddServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value, by = SIGNED[name]
    monkeypatch.setenv(name, value)
    source = Source(ADDRESS, FAST)
    assert source.get("data") == b"data"
    assert source.get("none") is None
    assert source.list_one_level("") == (["data"], [])
    assert {signer(asked) for asked in azure.asked} == {by}
    azure.asked.clear()
    with pytest.raises(RefusedError, match=r"401 .*\(not signed, because data.store.anonymous=true\)"):
        Source(ADDRESS, StoreConfig(anonymous=True)).get("data")
    assert {signer(asked) for asked in azure.asked} == {None}


@pytest.mark.parametrize(
    ("text", "by"), [(f"AccountName={ACCOUNT};AccountKey={KEY}", "key"), (f"SharedAccessSignature={SAS}", "sas")]
)
def test_a_connection_string_suffices(azure: OddServer, monkeypatch: pytest.MonkeyPatch, text: str, by: str) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ENDPOINT")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    endpoint = f"{azure.url}/{ACCOUNT}/"
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{text};BlobEndpoint={endpoint}"
    )
    assert Source(ADDRESS, FAST).get("data") == b"data"
    assert {signer(asked) for asked in azure.asked} == {by}


def test_national_clouds_are_selected_by_the_endpoint_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"AccountName=a;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert credentials._azure_account()["endpoint"] == "https://a.blob.core.chinacloudapi.cn"


def give_token(asked: Asked) -> bytes:
    """The metadata service of a machine or an App Service."""
    assert asked.headers["metadata"] == "true"
    assert "resource=https%3A%2F%2Fstorage.azure.com" in asked.target
    body = {"access_token": TOKEN, "expires_in": "3600", "expires_on": "4102444800", "token_type": "Bearer"}
    return sized("200 OK", json.dumps(body).encode(), "Content-Type: application/json")


@pytest.mark.parametrize("kind", ["machine", "App Service", "login"])
def test_an_identity_or_login_signs_without_a_key(
    azure: OddServer, monkeypatch: pytest.MonkeyPatch, cache_home: Path, kind: str
) -> None:
    with odd_server(give_token) as service:
        match kind:
            case "machine":
                monkeypatch.setattr(credentials, "_METADATA_HOST", service.url.removeprefix("http://"))
            case "App Service":
                monkeypatch.setenv("IDENTITY_ENDPOINT", service.url)
                monkeypatch.setenv("IDENTITY_HEADER", "header")
            case "login":
                log_in(monkeypatch, cache_home)
        assert Source(ADDRESS, FAST).get("data") == b"data"
        assert {signer(asked) for asked in azure.asked} == {"identity"}
        assert {asked.headers.get("x-identity-header") for asked in service.asked} == {
            "machine": {None},
            "App Service": {"header"},
            "login": set(),
        }[kind]


def log_in(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Put an `az` with a login on the path, which prints a token."""
    (home / "azureProfile.json").write_text('\ufeff{"subscriptions": [{"user": {"name": "me"}}]}')
    token = {"accessToken": TOKEN, "expiresOn": "2099-01-01 00:00:00.000000", "subscription": "s", "tenant": "t"}
    (home / "az").write_text(f"#!/bin/sh\necho '{json.dumps(token | {'tokenType': 'Bearer'})}'\n")
    (home / "az").chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=":")
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(home))


def test_public_containers_need_no_credentials_and_private_ones_name_what_was_tried(
    azure: OddServer, blobs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RefusedError, match=r"401 .*\(not signed: no key, token or identity in AZURE_\*, no `az` log"):
        Source(ADDRESS, FAST).get("data")
    with azure_server(blobs, public=True) as server:
        use(server, monkeypatch)
        assert Source(ADDRESS, FAST).get("data") == b"data"
        assert {signer(asked) for asked in server.asked} == {None}


@pytest.mark.parametrize("status", ["401 Unauthorized", "400 Bad Request"])
def test_an_identity_without_a_token_is_refused(azure: OddServer, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    with odd_server(lambda asked: sized(status, b'{"error": "unauthorized_client"}')) as service:
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", service.url)
        with pytest.raises(RefusedError, match=rf"refuses access: .*{status[:3]}.*\(signed with AZURE_MSI_ENDPOINT"):
            Source(ADDRESS, FAST).get("data")


WRONG = {
    "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LXNlY3JldC1zZWNyZXQ=",
    "AZURE_STORAGE_SAS_TOKEN": "sv=2022-11-02&sr=c&sig=c2VjcmV0LXNlY3JldC1zZWNyZXQ%3D",
}


@pytest.mark.parametrize("name", WRONG)
def test_no_error_or_log_line_contains_a_key_or_signature(
    azure: OddServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(name, WRONG[name])
    texts = []
    source = Source(ADDRESS, FAST)
    for action in (lambda: source.get("data"), lambda: source.list_one_level("")):
        with pytest.raises(DataError, match=rf"403 Forbidden: AuthenticationFailed .*signed with {name}") as caught:
            action()
        texts.append(str(caught.value))
    assert "ListBucket" not in texts[0]
    monkeypatch.setenv(name, "c2VjcmV0 no key")
    with pytest.raises(DataError, match=r"Cannot open az://.*AZURE_STORAGE_ACCOUNT_NAME") as caught:
        Source(ADDRESS, FAST)
    for text in (*texts, str(caught.value), caplog.text):
        assert "c2VjcmV0" not in text


def test_the_error_without_an_account_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(
        DataError, match=r"Account must be specified; check the address and the variables AZURE_STORAGE_ACCOUNT_NAME"
    ):
        Source(ADDRESS, FAST)


@pytest.mark.parametrize("layout", ["v2", "v3-sharded"])
def test_a_volume_on_azure_streams_and_lists_as_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 128, 128)), **LAYOUTS[layout])
    (path / {"v2": "1/1/1", "v3-sharded": "c/1/1/1"}[layout]).unlink()
    name = "a b#1?c%20"
    with open_stream(make_job(path)) as stream:
        expected, _ = collect(stream, 8)
    with azure_server(objects_of(path, name)) as server:  # keys begin with the name
        use(server, monkeypatch)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        address = f"az://{CONTAINER}/{name}"
        with open_stream(make_job(address, store=FAST)) as stream:
            patches, _ = collect(stream, 8)
            assert not stream.events
        occupancy = list_chunks(open_volume(address, FAST))
        assert {signer(asked) for asked in server.asked} == {"key"}
    np.testing.assert_array_equal(patches, expected)
    np.testing.assert_array_equal(occupancy, list_chunks(open_volume(path)))
    assert "does not support suffix ranges" not in caplog.text, "obstore knows that Azure cannot"
