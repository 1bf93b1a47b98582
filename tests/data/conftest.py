"""A server over HTTP for all tests of remote volumes, and a cache of listings that is not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chunk_server import ChunkServer


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where listings of chunks are kept, new for each test."""
    path = tmp_path_factory.mktemp("cache_home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def _session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    with ChunkServer(tmp_path_factory.getbasetemp()) as server:
        yield server


@pytest.fixture
def server(_session_server: ChunkServer) -> ChunkServer:
    """Serves every test's `tmp_path`, without faults until a test sets some."""
    _session_server.set_faults([])
    _session_server.reset()
    return _session_server
