"""`vesuvius report RUN --serve`: a real server and real requests."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.recorded_runs import BEGAN, lines, run_end, run_start, session_file, step, write_run
from vesuvius.commands.cli import main
from vesuvius.commands.runs import report
from vesuvius.errors import EXIT_INTERRUPTED, ConfigError
from vesuvius.report.serve import HOST, LivePage, open_server

_REFRESHES = '<meta http-equiv="refresh"'


@contextmanager
def served(run: Path) -> Iterator[str]:
    with open_server(LivePage([run], "vesuvius report tiny --serve"), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read(), "utf-8")


def test_a_report_of_no_run_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report"])
    assert "the following arguments are required: RUN" in capsys.readouterr().err


def test_the_page_follows_a_run_and_stops_refreshing_at_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), step(1), step(2)])
    with served(run) as url:
        first = get(url)
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines([step(3), run_end(3, BEGAN + 9)]))
        session_file(run, 0)
        again = get(url)
    assert _REFRESHES in first
    assert "step 2 of 100000" in first
    assert again == first, "a request soon after another does not read the run again"
    with served(run) as url:
        assert "step 3 of 100000" in (page := get(url))
    assert _REFRESHES not in page


def test_a_deleted_run_is_reported_and_the_page_stops_refreshing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), step(1)])
    with served(run) as url:
        shutil.rmtree(run)
        page = get(url)
    assert f"The directory {run} no longer exists" in page
    assert _REFRESHES not in page


def test_a_query_gets_the_page_and_other_paths_nothing(tmp_path: Path) -> None:
    with served(write_run(tmp_path / "tiny", [run_start(), step(1)])) as url:
        assert "step 1 of" in get(f"{url}?from=mail")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{url}favicon.ico")


def test_a_page_that_cannot_be_built_is_an_error_500_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(write_run(tmp_path / "tiny", [run_start(), step(1)])) as url:
        with monkeypatch.context() as broken:
            broken.setattr("vesuvius.report.serve.read_report", lambda run: int("two\nlines"))
            with pytest.raises(urllib.error.HTTPError, match="500") as raised:
                get(url)
        assert "ValueError: invalid literal for int()" in raised.value.read().decode()
        assert "step 1 of 100000" in get(url), "the next request tries again"
    (line,) = [record.getMessage() for record in caplog.records if "cannot build the page" in record.getMessage()]
    assert line.startswith("cannot build the page: ValueError: invalid literal for int()")
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_in_use_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    page = LivePage([tmp_path], "")
    with open_server(page, 0) as server:
        with pytest.raises(ConfigError, match=rf"Cannot serve on 127\.0\.0\.1:{server.server_port}: .*in use; choose"):
            open_server(page, server.server_port)
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.long
def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), step(1)])
    command = [sys.executable, "-m", "vesuvius", "report", str(run), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert "step 1 of 100000" in get(url)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == EXIT_INTERRUPTED
        assert process.stderr is not None
        assert process.stderr.read() == "", "the usual end"


def status_of(url: str, *hosts: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=60)
    connection.putrequest("GET", "/", skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    with connection.getresponse() as answer:
        assert answer.status == 200 or b"step 1 of" not in answer.read()
        return answer.status


def test_only_requests_to_names_of_this_machine_are_answered(tmp_path: Path) -> None:
    """A foreign page whose name resolves to 127.0.0.1 could read the answer otherwise."""
    with served(write_run(tmp_path / "tiny", [run_start(), step(1)])) as url:
        port = url.rstrip("/").rpartition(":")[2]
        for own in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
            assert (status_of(url, own), status_of(url, f"{own}:{port}")) == (200, 200)
        assert status_of(url, "localhost:9000") == 200, "through a tunnel"
        foreign = ("evil.org", f"evil.org:{port}", "localhost.evil.org", "127.0.0.1.evil.org", "evil.org@localhost", "")
        for host in (*foreign, "0.0.0.0", f"127.0.0.1:{port}x", "localhost:"):
            assert status_of(url, host) == 421, host
        assert status_of(url) == 421, "none"
        assert status_of(url, "localhost", "evil.org") == 421


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        (["a", "b", "--serve"], 8642), (["--serve", "a", "b"], 8642), (["a", "--serve", "b"], 8642),
        (["a", "b", "--serve", "9000"], 9000), (["--serve", "9000", "a", "b"], 9000),
        (["a", "--serve=9000", "b"], 9000), (["a", "--serve", "9000", "b"], 9000),
    ],
)  # fmt: skip
def test_runs_and_port_may_come_in_any_order(
    arguments: list[str], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        write_run(tmp_path / "runs" / name, [run_start()])
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[list[str], int]] = []

    def open_one(page: LivePage, port: int) -> None:
        asked.append(([run.name for run in page._runs], port))
        raise KeyboardInterrupt

    monkeypatch.setattr("vesuvius.report.serve.open_server", open_one)
    assert report(arguments) == EXIT_INTERRUPTED
    assert asked == [(["a", "b"], port)]
