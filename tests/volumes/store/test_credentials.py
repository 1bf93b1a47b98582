"""Credentials that sign requests to s3 and gs, as seen by the server."""

from __future__ import annotations

import base64
import errno
import json
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.support.odd_server import Asked, OddServer, odd_server, sized
from vesuvius.config import StoreConfig
from vesuvius.errors import ConfigError, DataError
from vesuvius.volumes.errors import OutageError, RefusedError
from vesuvius.volumes.store import credentials
from vesuvius.volumes.store.credentials import find_signing
from vesuvius.volumes.store.objects import open_store
from vesuvius.volumes.store.source import Source

DATE = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No credentials in the environment, on a machine without a metadata service."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        if name not in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_EC2_METADATA_DISABLED"):
            monkeypatch.delenv(name)
    credentials._by_boto3.cache_clear()
    yield
    credentials._by_boto3.cache_clear()


@pytest.fixture
def s3_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    """A server that accepts and records every request."""
    with odd_server(lambda asked: sized("200 OK", b"data", DATE)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def key_of(asked: Asked) -> str | None:
    """The access key that signed a request, and the region; None for an unsigned request."""
    match = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", asked.headers.get("authorization", ""))
    return f"{match[1]} {match[2]}" if match else None


def instance(asked: Asked) -> bytes:
    """The metadata service of an instance, which requires a token."""
    if asked.method == "PUT" and asked.target == "/latest/api/token":
        return sized("200 OK", b"token")
    if asked.headers.get("x-aws-ec2-metadata-token") != "token":
        return sized("401 Unauthorized", b"")
    path = "/latest/meta-data/iam/security-credentials/"
    if asked.target == path:
        return sized("200 OK", b"role")
    found = {"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z", **keys_of("INSTANCE")}
    return sized("200 OK" if asked.target == path + "role" else "404 Not Found", json.dumps(found).encode())


def keys_of(name: str) -> dict[str, str]:
    return {"AccessKeyId": name, "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}


def container(asked: Asked) -> bytes:
    """The service that provides a container's role."""
    right = asked.target == "/role" and asked.headers.get("authorization") == "token of the container"
    return sized("200 OK", json.dumps(keys_of("CONTAINER")).encode()) if right else sized("403 Forbidden", b"")


def sts(asked: Asked) -> bytes:
    """STS: accepts unsigned web identities, and the keys of users who may assume a role."""
    by = key_of(asked)
    assert by in (None, "SOURCE us-east-1")
    action, name = ("AssumeRoleWithWebIdentity", "WEB") if by is None else ("AssumeRole", "ASSUMED")
    keys = {("SessionToken" if key == "Token" else key): value for key, value in keys_of(name).items()}
    text = f"<Credentials>{''.join(f'<{key}>{value}</{key}>' for key, value in keys.items())}</Credentials>"
    text = f"<{action}Response><{action}Result>{text}</{action}Result></{action}Response>"
    return sized("200 OK", text.encode(), "Content-Type: text/xml")


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
            case "named profile":
                profile("region = eu-west-1\naws_access_key_id = NAMED\naws_secret_access_key = s\n")
            case "process":
                program = cache_home / "process"
                program.write_text(f"#!/bin/sh\necho '{json.dumps({'Version': 1} | keys_of('PROCESS'))}'\n")
                program.chmod(0o755)
                profile(f"credential_process = {program}\n")
            case "role of a profile":
                (cache_home / "aws-credentials").write_text(
                    "[a]\naws_access_key_id = SOURCE\naws_secret_access_key = s\n"
                )
                profile(f"role_arn = {ROLE}\nsource_profile = a\nregion = us-east-1\n")
            case "web identity of a profile":
                profile(f"role_arn = {ROLE}\nweb_identity_token_file = {token('token of a pod')}\n")
            case "web identity":
                monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
                monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", token("token of a pod"))
            case "container":
                monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{role.url}/role")
                monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token("token of the container"))

    def profile(text: str) -> None:
        (cache_home / "another-config").write_text(f"[profile mine]\n{text}")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(cache_home / "another-config"))
        monkeypatch.setenv("AWS_PROFILE", "mine")

    def token(text: str) -> str:
        (cache_home / "token").write_text(text)
        return str(cache_home / "token")

    with odd_server(instance) as service, odd_server(container) as role, odd_server(sts) as roles:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", roles.url)
        yield make


ROLE = "arn:aws:iam::123456789012:role/reader"
CHAIN = {
    "environment": "ENVIRONMENT us-east-1",
    "default profile": "PROFILE eu-north-1",
    "instance": "INSTANCE us-east-1",
    "named profile": "NAMED eu-west-1",
    "process": "PROCESS us-east-1",
    "role of a profile": "ASSUMED us-east-1",
    "web identity of a profile": "WEB us-east-1",
    "web identity": "WEB us-east-1",
    "container": "CONTAINER us-east-1",
    "settings only": None,
    "nothing": None,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", CHAIN)
def test_every_request_is_signed_with_the_available_credentials(
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


WITHOUT_BOTO3 = ("environment", "instance", "container", "settings only", "nothing")


@pytest.mark.parametrize("kind", WITHOUT_BOTO3)
def test_without_boto3_the_sources_of_obstore_sign(
    s3_requests: OddServer, set_up: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    credentials._answers.cache_clear()
    set_up(kind)
    if service := os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        monkeypatch.setattr(credentials, "_METADATA_HOST", service.removeprefix("http://"))
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", service)
    assert Source("s3://bucket/v", StoreConfig()).get("data") == b"data"
    credentials._answers.cache_clear()
    assert {key_of(asked) for asked in s3_requests.asked} == {CHAIN[kind]}


@pytest.mark.parametrize("kind", ["default profile", "named profile", "process", "role of a profile"])
def test_without_boto3_a_profile_is_not_ignored(
    s3_requests: OddServer, set_up: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    set_up(kind)
    with pytest.raises(ConfigError, match=r"AWS profile .* needs boto3, .*; pip install 'vesuvius-diffusion\[train\]'"):
        Source("s3://bucket/v", StoreConfig())
    Source("s3://bucket/v", StoreConfig(anonymous=True)).get("data")
    assert {key_of(asked) for asked in s3_requests.asked} == {None}


def test_renewed_keys_of_a_profile_are_read_again(
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
def test_a_machine_without_metadata_service_does_not_sign(
    s3_requests: OddServer, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with odd_server(lambda asked: b"nonsense\r\n") as nonsense:
        url = nonsense.url if answers == "nonsense" else "http://127.0.0.1:1"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        assert Source("s3://bucket/v", StoreConfig()).get("data") == b"data"
    assert {key_of(asked) for asked in s3_requests.asked} == {None}


def test_a_refusal_names_the_credentials_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with odd_server(lambda asked: sized("403 Forbidden", b"")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        source = Source("s3://bucket/v", StoreConfig())
        words = "no AWS_\\* in the environment, and boto3 finds no profile and no role"
        with pytest.raises(RefusedError, match=rf"403 Forbidden for data in s3://bucket/v \(not signed: {words}"):
            source.get("data")


def test_a_missing_profile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "typo")
    with pytest.raises(
        DataError, match=r"Cannot read .*\(typo\) could not be found; correct AWS_PROFILE, .*anonymous=true"
    ):
        find_signing("s3://bucket", None)
    assert find_signing("s3://bucket", True).options == {"skip_signature": True}


def test_an_unreadable_profile_file_is_named_without_quoting_it(cache_home: Path) -> None:
    for text in ("aws_secret_access_key = SECRET\n", "[default]\nSECRET\n"):
        (cache_home / "aws-credentials").write_text(text)
        with pytest.raises(DataError, match=r"Cannot read the AWS credentials: .*aws-credentials") as caught:
            find_signing("s3://bucket", None)
        assert "SECRET" not in str(caught.value)


def test_an_outage_of_a_credential_service_is_retried_like_one_of_a_store(
    s3_requests: OddServer, set_up: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up("web identity")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
    with pytest.raises(OutageError, match="Could not connect to the endpoint URL"):
        Source("s3://bucket/v", StoreConfig(outage_minutes=0.01)).get("data")
    assert not s3_requests.asked


@pytest.mark.parametrize(
    "text", ["endpoint_url = URL", "services = minio\n[services minio]\ns3 =\n  endpoint_url = URL"]
)
def test_the_endpoint_of_a_profile_is_used(
    s3_requests: OddServer, cache_home: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """As in profiles for MinIO, Ceph and R2."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (cache_home / "aws-credentials").write_text("[minio]\naws_access_key_id = MINIO\naws_secret_access_key = s\n")
    (cache_home / "aws-config").write_text(f"[profile minio]\n{text.replace('URL', s3_requests.url)}\n")
    monkeypatch.setenv("AWS_PROFILE", "minio")
    assert Source("s3://bucket/v", StoreConfig()).get("data") == b"data"
    assert {key_of(asked) for asked in s3_requests.asked} == {"MINIO us-east-1"}


# ---- Google


@pytest.fixture
def gs_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    """A server that accepts and records every request."""
    with odd_server(lambda asked: sized("200 OK", b"data", DATE, 'ETag: "1"')) as server:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        yield server


@pytest.mark.parametrize("name", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
def test_a_service_account_signs_as_itself(
    gs_requests: OddServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"type": "service_account", "client_email": "robot@project", "private_key": text, "private_key_id": "1"}
    (tmp_path / "key.json").write_text(json.dumps(account))
    monkeypatch.setenv(name, str(tmp_path / "key.json"))
    source = Source("gs://bucket/v", StoreConfig())
    assert source.get("data") == b"data"
    (asked,) = gs_requests.asked
    head, claims, signature = asked.headers["authorization"].removeprefix("Bearer ").split(".")
    assert b'"robot@project"' in base64.urlsafe_b64decode(claims + "==")
    signed = base64.urlsafe_b64decode(signature + "==")
    key.public_key().verify(signed, f"{head}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256())


@pytest.mark.parametrize(
    "text", ['{"type": "service_account", "private_key": "SECRET', '{"type": "external_account"}', None]
)
def test_an_unusable_google_file_is_an_error_without_quoting_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    if text is not None:
        (tmp_path / "key.json").write_text(text)
    with pytest.raises(DataError, match=r"Cannot open gs://bucket/v: Unable .*the variables GOOGLE_\*") as caught:
        Source("gs://bucket/v", StoreConfig())
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("home", ["unknown", "of another user", "with logins of another user"])
def test_without_a_usable_home_directory_there_are_no_logins(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers with `--user`: the user has no name, or HOME is root's."""
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    stat = os.stat

    def stat_elsewhere(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):  # root may read everything
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **how)

    def no_user(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    if home == "unknown":
        monkeypatch.setattr(pwd, "getpwuid", no_user)
    elif home == "of another user":
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(os, "stat", stat_elsewhere)
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
        gcloud = ".config/gcloud/application_default_credentials.json"
        for name in (".aws/credentials", ".cache/huggingface/token", ".azure/azureProfile.json", gcloud):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text('aws_access_key_id=x "user"')
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(credentials, "_answers", lambda *request: "")
    monkeypatch.setattr(credentials.shutil, "which", lambda name: name)
    assert "no entry in " in str(credentials._web("https://host/x"))
    assert "no HF_TOKEN in the environment" in str(credentials._hugging_face())
    assert "no profile" in str(credentials._aws_without_boto3())
    assert "no service account" in str(credentials._google())
    assert "no `az` login" in str(credentials._azure({}))


def test_the_login_of_gcloud_is_used(cache_home: Path) -> None:
    login = cache_home / "gcloud/application_default_credentials.json"
    assert find_signing("gs://bucket", None).options == {"skip_signature": True}
    login.parent.mkdir()
    keys = {"client_id": "id", "client_secret": "s", "refresh_token": "r", "type": "authorized_user"}
    login.write_text(json.dumps(keys))
    signing = find_signing("gs://bucket", None)
    assert signing.words == f"signed with {login}"
    assert open_store("gs://bucket/v", StoreConfig()).config["application_credentials"] == str(login)


@pytest.mark.parametrize("account", [b"robot@project", None])
def test_a_google_machine_signs_with_its_service_account(
    gs_requests: OddServer, monkeypatch: pytest.MonkeyPatch, account: bytes | None
) -> None:
    monkeypatch.delenv("NO_GCE_CHECK")
    credentials._answers.cache_clear()

    def reply(asked: Asked) -> bytes:
        assert asked.headers["metadata-flavor"] == "Google"
        if account and "/token" in asked.target:
            return sized("200 OK", b'{"access_token": "GIVEN", "expires_in": 3600, "token_type": "Bearer"}')
        return sized("200 OK", account) if account else sized("404 Not Found", b"")

    with odd_server(reply) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        assert Source("gs://bucket/v", StoreConfig()).get("data") == b"data"
    credentials._answers.cache_clear()
    assert {asked.headers.get("authorization") for asked in gs_requests.asked} == {"Bearer GIVEN" if account else None}
