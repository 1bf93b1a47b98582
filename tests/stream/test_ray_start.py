"""How Ray is started or connected to, and what is said where that fails."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import fork_server
from vesuvius.errors import ConfigError
from vesuvius.stream.ray import private
from vesuvius.stream.ray import session as start

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError("AF_UNIX path length cannot exceed 107 bytes: /a/b"), "RAY_TMPDIR to a folder with a short path"),
        (PermissionError(13, "Permission denied", "/tmp/ray/x"), "RAY_TMPDIR to a writable folder"),
        (OSError(28, "No space left on device", "/tmp/ray"), "free space there"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "raise the limit on processes and threads"),
        (Exception("something that nobody has met"), None),
    ],
)
def test_a_failed_start_is_one_line_with_a_remedy_for_its_cause(
    error: Exception, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever Ray raises, plain `Exception`s too."""

    def fails(**_: Any) -> None:
        raise error

    monkeypatch.setattr(start.ray, "init", fails)
    monkeypatch.setattr(start.ray, "shutdown", lambda: None)
    with pytest.raises(ConfigError) as caught:
        start.start_ray(start.ClusterConfig(), 2, 2**28)
    said = str(caught.value)
    assert said.startswith(f"Ray did not start: {error}; ")
    assert said.endswith("set training.workers=0 to run without Ray")
    assert said.count("; ") == 2, "nothing is advised that is not known to help" if remedy is None else said
    assert remedy is None or remedy in said
    assert "ray start" not in said


def test_the_last_output_of_a_process_that_dies_while_ray_starts_is_shown() -> None:
    """As Ray's C++ core ends it: no Python runs any more."""
    code = """
import os
from vesuvius.stream.ray import session as start
with start._filtered_stderr():
    os.write(2, b"Set ray log level from environment variable RAY_BACKEND_LOG_LEVEL to 3\\nwhat(): no threads\\n")
    os.abort()
"""
    ended = fork_server.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert ended.stderr == "what(): no threads\n"


@pytest.fixture
def no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a token, and no word of one in the environment.  Ray's own state is as before afterwards."""
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        private.reread_authentication()
        yield tmp_path
    private.reread_authentication()


def test_a_token_is_used_unless_the_environment_sets_the_mode(no_token: Path) -> None:
    tokens = set()
    for _ in range(2):
        with start.authenticated(None):  # a private Ray has one of its own, and leaves none
            assert os.environ["RAY_AUTH_MODE"] == "token"
            assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0", "nothing is sent to Ray's makers"
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
    assert len(tokens) == 2
    assert list(no_token.iterdir()) == []
    for written in (False, True):
        with start.authenticated("h:1"):
            assert os.environ.get("RAY_AUTH_MODE") == ("token" if written else None)
            assert "RAY_AUTH_TOKEN" not in os.environ
            assert ("RAY_AUTH_MODE unset and no token, as there is no" in start._token_in_use()) != written
        (no_token / ".ray").mkdir(exist_ok=True)
        (no_token / ".ray/auth_token").write_text("a" * 64)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    for address in ("h:1", None):
        with start.authenticated(address):
            assert os.environ["RAY_AUTH_MODE"] == "disabled"
            assert "RAY_AUTH_TOKEN" not in os.environ
    del os.environ["RAY_AUTH_MODE"]


def test_an_unreachable_cluster_is_named_at_once(no_token: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot reach the Ray cluster at cluster.address=127.0.0.1:1:"):
        start.start_ray(start.ClusterConfig(address="127.0.0.1:1"), 2, 2**28)


def test_local_grpc_ignores_the_proxy() -> None:
    """In this process and, as they inherit it, in Ray's."""
    code = "import os, vesuvius.stream.ray; assert os.environ['grpc_proxy'] == ''"
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environment.pop("grpc_proxy", None)
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)


def recipe(page: str) -> list[str]:
    """The commands that docs/cluster.md gives for a Ray cluster, a block each: head, other machine, run."""
    part = page.partition("**A Ray cluster.**")[2].partition("**SLURM**")[0]
    return re.findall(r"```bash\n(.*?)```", part, re.DOTALL)


@pytest.mark.long
@pytest.mark.parametrize("with_token", [True, False])
def test_the_cluster_commands_of_the_docs_work(
    with_token: bool, tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    """From a home that a Ray has left a token in, and from one without.  Two nodes on this machine."""
    home = tmp_path / "h"
    (home / ".ray").mkdir(parents=True)
    if with_token:
        (home / ".ray/auth_token").write_text("a" * 64)
    blocks = recipe((ROOT / "docs/cluster.md").read_text())
    assert len(blocks) == 3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    config = tiny_config(training={"workers": 1, "max_steps": 2})
    mark = {"TEST_OF_VESUVIUS": str(tmp_path)}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | mark
    environment |= {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    changes = {"6379": port, "HEAD": "127.0.0.1", "C.yaml": str(config), "training.ranks=32": "training.ranks=1"}
    try:
        for block in blocks:
            for old, new in changes.items():
                block = block.replace(old, new)
            ended = subprocess.run(
                ["bash", "-ec", block],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "done: step 2" in ended.stdout
        assert "InvalidAuthToken" not in ended.stderr
    finally:
        end_all(mark)


def end_all(mark: dict[str, str]) -> None:
    """Kill what was started with these variables."""
    for process in psutil.process_iter():
        try:
            if mark.items() <= process.environ().items():
                process.kill()
        except psutil.Error:
            pass


SECOND = """
import logging
from vesuvius.config import ClusterConfig
from vesuvius.stream.ray.session import Session

logging.basicConfig(format="%(message)s")
small = Session(ClusterConfig(), workers=1, ranks=1, store_bytes=2**28)
equal = Session(ClusterConfig(), workers=1, ranks=1, store_bytes=2**28)
assert small.fits(1, 1, 2**28)
print("second", flush=True)
large = Session(ClusterConfig(), workers=60, ranks=1, store_bytes=2**30)
assert not large.fits(60, 1, 2**30), "the Ray that runs is the small one"
for session in (small, equal, large, large):
    session.close()
"""


@pytest.mark.long
def test_a_second_stream_says_if_the_ray_it_shares_is_too_small() -> None:
    """Ray itself silently runs fewer readers."""
    ended = fork_server.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=180)
    assert (ended.returncode, ended.stdout) == (0, "second\n"), ended.stderr
    assert "has room for" in ended.stderr
    assert "62 workers are wanted and 1.00 GiB for 60 of them" in ended.stderr
    assert ended.stderr.count("has room for") == 1
