"""Tells a web server what an operator should hear of at once: one POST of JSON for each such record of the run.

On a thread of its own.  A server that is slow, refuses or is gone costs the run a line in the log, and no time before
its end.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import urllib.error
import urllib.request
from http.client import HTTPException
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from vesuvius.config.experiment import is_web_address
from vesuvius.runlog.files.delayed import DelayedWrites
from vesuvius.runlog.records import Record

log = logging.getLogger(__name__)


_EVENTS = frozenset({"guard", "hung", "nonfinite", "save_failed"})
_CLOSE_S = 10.0


class Webhook:
    """Posts the records that matter.  A context manager, which gives the last ones ten seconds at the end.

    Args:
        url: http or https; "$NAME" = what that environment variable holds.
        run: its name.
        timeout_s: for the server to connect, and for each part of its answer.
        pauses_s: before each further attempt.
        close_s: what the end waits for at most.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        timeout_s: float = 5.0,
        pauses_s: tuple[float, ...] = (1.0, 3.0),
        close_s: float = _CLOSE_S,
    ) -> None:
        self._url = os.environ.get(url[1:], "") if url.startswith("$") else url
        self._run = run
        self._timeout_s = timeout_s
        self._pauses_s = pauses_s
        self._close_s = close_s
        self._failing = False
        self._closing = Event()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._posts: DelayedWrites | None = None
        if is_web_address(self._url):
            self._posts = DelayedWrites("webhook", lambda: log.warning("a webhook could not be posted", exc_info=True))
        else:
            log.warning("monitor.webhook %s must hold an http or https address; the run continues without", url)

    def __enter__(self) -> Webhook:
        return self

    def __exit__(self, *_: object) -> None:
        if self._posts is not None and not self._posts.close(self._close_s):
            self._closing.set()
            log.warning("the webhook's server did not answer within %.0f s; the last posts are lost", self._close_s)

    def take(self, record: Record) -> None:
        """Post a record if it is one that matters.  Returns at once and raises nothing."""
        if self._posts is not None and (message := message_of(record)) is not None:
            body = {"run": self._run, "host": socket.gethostname(), "time": record.get("time"), **message}
            body["text"] = f"vesuvius {self._run}: {message['text']}"
            self._posts.later(lambda: self._post(json.dumps(body).encode()))

    def _post(self, body: bytes) -> None:
        """On the thread."""
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        for pause_s in (*self._pauses_s, None):
            if self._closing.is_set():
                return
            try:
                self._opener.open(request, timeout=self._timeout_s).close()
            except (OSError, HTTPException, ValueError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                if pause_s is None:
                    self._say_failing(error)
                else:
                    self._closing.wait(pause_s)
            else:
                self._failing = False
                return

    def _say_failing(self, error: Exception) -> None:
        """Once, until a post succeeds again.  Without the path of the address, which may be a secret."""
        if not self._failing:
            self._failing = True
            log.warning(
                "monitor.webhook must take a POST; got %s from %s in %d attempts; the run continues",
                *(error, urlsplit(self._url).netloc, len(self._pauses_s) + 1),
            )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would follow with a GET, and the message would be lost without an error."""

    def redirect_request(self, *_: Any) -> None:
        return None


def message_of(record: Record) -> dict[str, Any] | None:
    """What is posted of a record, without the run's name; None where nobody need be told.  Pure."""
    step = record.get("step")
    if record["kind"] == "run_end":
        end = {"exit_code": record.get("exit_code"), "cause": record.get("cause")}
        text = f"ended at step {step} with exit code {end['exit_code']}: {end['cause']}"
        return {"event": "run_end", "step": step, **end, "text": text}
    if record["kind"] != "event" or record.get("event") not in _EVENTS:
        return None
    event: str = record["event"]
    texts: dict[str, Any] = {
        "guard": f"memory guard, {record.get('rung')}: {record.get('text')}",
        "nonfinite": f"step {step} not finite: loss {record.get('loss')}, gradient norm {record.get('grad_norm')}",
        "save_failed": f"checkpoint of step {step} not saved: {record.get('text')}",
        "hung": record.get("text"),
    }
    return {"event": event, "step": step, "text": texts[event]}
