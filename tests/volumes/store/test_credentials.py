"""With what requests to s3 and gs are signed, as seen by the server that they are sent to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.odd_server import Asked, OddServer, odd_server, sized
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import RefusedError
from vesuvius.volumes.store import credentials
from vesuvius.volumes.store.credentials import find_signing
from vesuvius.volumes.store.objects import open_store
from vesuvius.volumes.store.source import Source

DATE = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None in the environment; of a machine that does not say whose it is."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    credentials._by_boto3.cache_clear()
    yield
    credentials._by_boto3.cache_clear()


@pytest.fixture
def s3_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    """Takes every request, and keeps them."""
    with odd_server(lambda asked: sized("200 OK", b"data", DATE)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def key_of(asked: Asked) -> str | None:
    """The access key that signed a request, behind it the region; None for one that is not signed."""
    match = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", asked.headers.get("authorization", ""))
    return f"{match[1]} {match[2]}" if match else None


def instance(asked: Asked) -> bytes:
    """An instance's metadata service, which wants a token first."""
    if asked.method == "PUT" and asked.target == "/latest/api/token":
        return sized("200 OK", b"token")
    if asked.headers.get("x-aws-ec2-metadata-token") != "token":
        return sized("401 Unauthorized", b"")
    path = "/latest/meta-data/iam/security-credentials/"
    if asked.target == path:
        return sized("200 OK", b"role")
    keys = {"AccessKeyId": "INSTANCE", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
    found = {"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z", **keys}
    return sized("200 OK" if asked.target == path + "role" else "404 Not Found", json.dumps(found).encode())


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> Iterator[Callable[[str], None]]:
    """Makes credentials of a kind available."""

    def make(kind: str) -> None:
        match kind:
            case "environment":
                monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
                monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
            case "default profile":
                text = "[default]\naws_access_key_id = PROFILE\naws_secret_access_key = s%%\n"
                (cache_home / "aws-credentials").write_text(text)
                (cache_home / "aws-config").write_text("[default]\nregion = eu-north-1\n")
            case "instance":
                monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
                monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
            case "settings only":
                (cache_home / "aws-config").write_text("[default]\nregion = eu-north-1\n")

    with odd_server(instance) as service:
        yield make


CHAIN = {
    "environment": "ENVIRONMENT us-east-1",
    "default profile": "PROFILE eu-north-1",
    "instance": "INSTANCE us-east-1",
    "settings only": None,
    "nothing": None,
}


@pytest.mark.parametrize("kind", CHAIN)
def test_every_request_is_signed_with_what_there_is(
    s3_requests: OddServer, set_up: Callable[[str], None], kind: str
) -> None:
    set_up(kind)
    source = Source("s3://bucket/v", StoreConfig())
    assert source.get("data") == b"data"
    assert source.exists("data")
    assert {key_of(asked) for asked in s3_requests.asked} == {CHAIN[kind]}
    s3_requests.asked.clear()
    Source("s3://bucket/v", StoreConfig(anonymous=True)).get("data")
    assert {key_of(asked) for asked in s3_requests.asked} == {None}


def test_of_several_credentials_the_nearer_ones_are_used(s3_requests: OddServer, set_up: Callable[[str], None]) -> None:
    for kind in ("default profile", "instance", "environment"):
        set_up(kind)
    Source("s3://bucket/v", StoreConfig()).get("data")
    assert {key_of(asked) for asked in s3_requests.asked} == {"ENVIRONMENT us-east-1"}


def test_keys_that_a_profile_renews_are_read_again(
    s3_requests: OddServer, set_up: Callable[[str], None], cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_REREAD", timedelta(0))
    set_up("default profile")
    source = Source("s3://bucket/v", StoreConfig())
    source.get("data")
    file = cache_home / "aws-credentials"
    file.write_text(file.read_text().replace("PROFILE", "RENEWED"))
    source.get("data")
    assert [key_of(asked) for asked in s3_requests.asked] == ["PROFILE eu-north-1", "RENEWED eu-north-1"]


@pytest.mark.parametrize("answers", ["nonsense", "nobody"])
def test_a_machine_without_metadata_service_is_found_out_and_does_not_sign(
    s3_requests: OddServer, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with odd_server(lambda asked: b"nonsense\r\n") as nonsense:
        url = nonsense.url if answers == "nonsense" else "http://127.0.0.1:1"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        assert Source("s3://bucket/v", StoreConfig()).get("data") == b"data"
    assert {key_of(asked) for asked in s3_requests.asked} == {None}


def test_a_refusal_says_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with odd_server(lambda asked: sized("403 Forbidden", b"")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        source = Source("s3://bucket/v", StoreConfig())
        words = "no AWS_\\* in the environment, and boto3 finds no profile and no role"
        with pytest.raises(
            RefusedError, match=rf"403 Forbidden for data in s3://bucket/v \(not signed: there is {words}"
        ):
            source.get("data")


def test_a_profile_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "typo")
    with pytest.raises(
        DataError, match=r"Cannot read .*\(typo\) could not be found; correct AWS_PROFILE .*anonymous=true"
    ):
        find_signing("s3", None)
    assert find_signing("s3", True).options == {"skip_signature": True}


def test_a_file_of_profiles_that_cannot_be_read_is_named_without_its_words(cache_home: Path) -> None:
    for text in ("aws_secret_access_key = SECRET\n", "[default]\nSECRET\n"):
        (cache_home / "aws-credentials").write_text(text)
        with pytest.raises(DataError, match=r"Cannot read the credentials of AWS: .*aws-credentials") as caught:
            find_signing("s3", None)
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("command", ["/no/such/program", "echo no JSON", "false"])
def test_a_process_that_gives_no_credentials_is_an_error(cache_home: Path, command: str) -> None:
    (cache_home / "aws-config").write_text(f"[default]\ncredential_process = {command}\n")
    with pytest.raises(DataError, match=r"Cannot read the credentials of AWS: .*anonymous=true"):
        find_signing("s3", None)


# ---- Google


def test_the_login_of_gcloud_is_used(cache_home: Path) -> None:
    login = cache_home / "gcloud/application_default_credentials.json"
    assert find_signing("gs", None).options == {"skip_signature": True}
    login.parent.mkdir()
    keys = {"client_id": "id", "client_secret": "s", "refresh_token": "r", "type": "authorized_user"}
    login.write_text(json.dumps(keys))
    signing = find_signing("gs", None)
    assert signing.words == f"signed with {login}"
    assert open_store("gs://bucket/v", StoreConfig()).config["application_credentials"] == str(login)


@pytest.mark.parametrize("account", [b"robot@project", None])
def test_a_machine_of_google_signs_with_its_service_account(
    monkeypatch: pytest.MonkeyPatch, account: bytes | None
) -> None:
    monkeypatch.delenv("NO_GCE_CHECK")
    credentials._has_service_account.cache_clear()

    def reply(asked: Asked) -> bytes:
        assert asked.headers["metadata-flavor"] == "Google"
        return sized("200 OK", account) if account else sized("404 Not Found", b"")

    with odd_server(reply) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        signed = "skip_signature" not in find_signing("gs", None).options
    credentials._has_service_account.cache_clear()
    assert signed == (account is not None)
