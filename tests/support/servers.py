"""Servers for all tests of remote volumes, and a listing cache separate from the user's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chunk_server import ChunkServer


@pytest.fixture(scope="session")
def cache_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that do not exist yet."""
    parent = tmp_path_factory.mktemp("cache_homes")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def cache_home(cache_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for chunk listings, new for each test; cheaper than `mktemp`, which lists all previous ones."""
    path = next(cache_homes)
    path.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    # No credentials of the user or of the machine, of which a machine may have some.
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path / "aws-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path / "aws-config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(path / "gcloud"))
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(path / "azure"))
    monkeypatch.setenv("NETRC", str(path / "netrc"))
    return path


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    with ChunkServer(tmp_path_factory.getbasetemp()) as server:
        yield server


@pytest.fixture
def server(session_server: ChunkServer) -> ChunkServer:
    """Serves every test's `tmp_path` over HTTP, without faults until a test sets some."""
    session_server.set_faults([])
    session_server.reset()
    return session_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server with two buckets: `public`, and `private`, which requires signed requests."""
    from moto.server import ThreadedMotoServer  # takes a second, so only where a test asks for it

    from tests.support.s3 import s3_client

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = s3_client(f"http://{host}:{port}")
    client.create_bucket(Bucket="public", ACL="public-read")
    client.create_bucket(Bucket="private")
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of that server, used for s3 addresses; without credentials in the environment."""
    from tests.support.s3 import s3_client

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return s3_client(s3_server)
