"""An operator hears of what matters, over real HTTP; a server that fails costs the run a line and no time."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from tests.support.webhook_server import WebhookServer
from vesuvius.config.experiment import MonitorConfig
from vesuvius.errors import ConfigError
from vesuvius.runlog.listeners.webhook import Webhook

HUNG = {"kind": "event", "time": 5.0, "event": "hung", "step": 3, "text": "hung: no batch for 5.0 min"}
NO_PAUSES = (0.0, 0.0)


def hook(url: str, **settings: Any) -> Webhook:
    return Webhook(url, "exp", **({"timeout_s": 30.0, "pauses_s": NO_PAUSES, "close_s": 60.0} | settings))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_an_operator_should_hear_of_is_posted_and_nothing_else() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "run_start", "time": 1.0, "step": 0},
        {"kind": "step", "time": 2.0, "step": 1, "loss": 1.0},
        {"kind": "event", "time": 2.0, "event": "autotune", "step": 1, "text": "advice"},
        {"kind": "event", "time": 3.0, "event": "nonfinite", "step": 2, "loss": None, "grad_norm": 0.5},
        {"kind": "event", "time": 4.0, "event": "guard", "step": 2, "rung": "worker", "text": "memory grows"},
        HUNG,
        {"kind": "event", "time": 6.0, "event": "save_failed", "step": 4, "text": "disk full"},
        {"kind": "run_end", "time": 7.0, "exit_code": 4, "step": 4, "cause": "memory guard: memory grows"},
    ]
    with WebhookServer() as server:
        with hook(server.url) as webhook:
            for record in records:
                webhook.take(record)
        posts = server.posts
    assert [(post["event"], post["time"], post["step"]) for post in posts] == [
        ("nonfinite", 3.0, 2),
        ("guard", 4.0, 2),
        ("hung", 5.0, 3),
        ("save_failed", 6.0, 4),
        ("run_end", 7.0, 4),
    ]
    assert all(post["run"] == "exp" and post["host"] == socket.gethostname() for post in posts)
    assert (posts[-1]["exit_code"], posts[-1]["cause"]) == (4, "memory guard: memory grows")
    for post, words in zip(posts, ("step 2", "worker: memory grows", "no batch", "disk full", "code 4"), strict=True):
        assert post["text"].startswith("vesuvius exp: ")
        assert words in post["text"]


def test_a_refusal_is_tried_twice_more_and_the_message_arrives_once_it_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with WebhookServer([500, 503, 200]) as server:
        with hook(server.url) as webhook:
            webhook.take(HUNG)
        assert [post["event"] for post in server.posts] == ["hung"] * 3
    assert warnings(caplog) == []


def test_a_server_that_refuses_gets_three_attempts_a_post_and_the_log_one_warning_an_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with WebhookServer([500] * 6 + [200] + [500]) as server:
        with hook(server.url) as webhook:
            for step in (1, 2, 3, 4):
                webhook.take(HUNG | {"step": step})
        assert [post["step"] for post in server.posts] == [1, 1, 1, 2, 2, 2, 3, 4, 4, 4]
    assert len(warnings(caplog)) == 2, "one for steps 1 and 2, one after it had worked again"
    assert "500" in warnings(caplog)[0]
    assert "secret" not in caplog.text, "the path of a webhook is its password"


def test_a_server_that_is_gone_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with hook(f"http://127.0.0.1:{port}/secret") as webhook:
        webhook.take(HUNG)
        webhook.take(HUNG)
    (warning,) = warnings(caplog)
    assert "refused" in warning
    assert f"127.0.0.1:{port}" in warning


def test_a_redirect_is_a_failure_as_urllib_would_follow_it_without_the_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with WebhookServer([302]) as server:
        with hook(server.url) as webhook:
            webhook.take(HUNG)
        assert server.others == []
    assert "302" in warnings(caplog)[0]


def test_a_server_that_never_answers_holds_up_neither_the_run_nor_for_long_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with WebhookServer([0]) as server:
        with hook(server.url, close_s=0.05) as webhook:
            webhook.take(HUNG)
            assert server.came.acquire(timeout=30)
            for _ in range(3000):  # the first post hangs until the server ends: each of these returned without it
                webhook.take(HUNG)
        assert len(server.posts) == 1
        assert "the last posts are lost" in warnings(caplog)[-1]


def test_a_server_that_never_answers_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with WebhookServer([0]) as server:
        with hook(server.url, timeout_s=0.05) as webhook:
            webhook.take(HUNG)
        assert len(server.posts) == 3
    assert "timed out" in warnings(caplog)[0]


@pytest.mark.parametrize("url", ["ftp://host/x", "file:///etc/passwd", "host:80/x", "http://", "http://u:p@host", ""])
def test_other_addresses_are_refused_with_the_config(url: str) -> None:
    with pytest.raises(ConfigError, match="http or https"):
        MonitorConfig(webhook=url)


def test_an_address_may_be_kept_out_of_the_config_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = MonitorConfig(webhook="$VESUVIUS_TEST_HOOK")
    assert config.webhook is not None
    with hook(config.webhook) as unset:
        unset.take(HUNG)
    assert "$VESUVIUS_TEST_HOOK must hold" in warnings(caplog)[0]
    with WebhookServer() as server:
        monkeypatch.setenv("VESUVIUS_TEST_HOOK", server.url)
        with hook(config.webhook) as webhook:
            webhook.take(HUNG)
        assert len(server.posts) == 1
