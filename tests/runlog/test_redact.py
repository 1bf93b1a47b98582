"""Secrets are redacted in all output; everything else is unchanged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.support.runs import WriteConfig
from vesuvius.commands.cli import say
from vesuvius.config.load import dump_config, read_config
from vesuvius.report.model import write_report
from vesuvius.runlog.logfile import close_logs, open_log
from vesuvius.runlog.redact import hide, redact, redacted

SECRET = "s3cr3t"


def test_values_of_secret_variables_are_redacted_anywhere() -> None:
    environment = {"WANDB_API_KEY": "0123456789abcdef", "AWS_PROFILE": "research1", "MY_TOKEN": "1"}
    environment |= {"GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json"}
    text = "401 for 0123456789abcdef of research1, try 1: /home/me/key.json"
    assert redact(text, environment) == "401 for *** of research1, try 1: /home/me/key.json"


def test_nested_data_is_redacted_by_text_and_by_name() -> None:
    data = {"a": [1, 2.5, None, True, f"https://x:{SECRET}@h"], "b": ({"c": f"k_TOKEN={SECRET}"},)}
    assert redacted(data) == {"a": [1, 2.5, None, True, "https://***@h"], "b": ({"c": "k_TOKEN=***"},)}
    assert redacted({"password": b"abc", b"token": "abc"}) == {"password": "***", b"token": "***"}
    assert redacted({"api_key": "abc", "a": [{"token": "t"}]}) == {"api_key": "***", "a": [{"token": "***"}]}


def test_log_lines_and_printed_output_contain_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_log(tmp_path / "log")
    try:
        logging.getLogger("vesuvius.x").warning("cannot read %s", f"https://me:{SECRET}@h/v")
        try:
            raise OSError(f"https://me:{SECRET}@h/v")
        except OSError:
            logging.getLogger("vesuvius.x").warning("with a traceback", exc_info=True)
    finally:
        close_logs()
    say(f"volume https://me:{SECRET}@h/v")
    printed = capsys.readouterr()
    for text in (tmp_path.joinpath("log").read_text(), printed.out):
        assert "https://***@h/v" in text
        assert SECRET not in text
    say(f"https://me:{SECRET}@h/v", exact=True)
    assert SECRET in capsys.readouterr().out, "what --print-config prints reads back"


def test_a_report_contains_no_secret_of_the_run_directory(tiny_config: WriteConfig, tmp_path: Path) -> None:
    """Secrets in the config, the events and the command."""
    address = f"https://me:{SECRET}@h.org/v.zarr?sig={SECRET}&x=<1>"
    config = read_config(tiny_config(), [f'data.volumes=[{{path: "{address}", level: 0}}]'])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(dump_config(config))
    lines = [
        {"kind": "run_start", "time": 1.0, "step": 0},
        {"kind": "event", "time": 2.0, "event": "quarantine", "step": 0, "text": f"damaged: {address}"},
        {"kind": "run_end", "time": 3.0, "step": 0, "exit_code": 6, "cause": f"{address} is gone"},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = write_report([run], tmp_path / "out", f"vesuvius report {address}")
    page = (folder / "report.html").read_text()
    assert "@h.org/v.zarr" in page
    assert SECRET not in page
    assert SECRET in (run / "config.resolved.yaml").read_text()


def test_only_full_words_of_secret_variables_are_redacted() -> None:
    text = "saved mycheckpoints, checkpoints/1"
    for name in ("GIT_AUTHOR_NAME", "OAUTH_PROVIDER", "TOKENIZERS_PARALLELISM", "MY_TOKEN_FILE"):
        assert redact(text, {name: "checkpoints"}) == text
    assert redact(text, {"A_TOKEN": "checkpoints"}) == "saved mycheckpoints, ***/1"


def test_hidden_strings_are_redacted_as_full_words() -> None:
    hide("told-0123456789==", "short")
    assert redact("got told-0123456789==, x-told-0123456789==y, short", {}) == "got ***, x-told-0123456789==y, short"


def test_text_around_a_secret_is_kept() -> None:
    for text, shown in {
        "https://me:pw@host:80/a/v.zarr?sig=1; check": "https://***@host:80/a/v.zarr?***; check",
        "https://h/v?sig=a: 403": "https://h/v?***: 403",
        "see https://h/v?sig=a. Then": "see https://h/v?***. Then",
        '{"password": "p w", "name": "n"}': '{"password": "***", "name": "n"}',
        "{'Authorization': 'Bearer zzz'}": "{'Authorization': '***'}",
    }.items():
        assert redact(text, {}) == shown


# "$$" is the secret.
OF_EVERY_KIND = [
    "abfss://c@acc.dfs.core.windows.net/p?sig=$$",
    "s3://KEY:se/$$@bucket/v.zarr",
    "https://u:p/$$@h/v",
    "s3://b/v?X-Amz-Signature=$$&X-Amz-Expires=60",
    "s3://b/v?token=$$",
    "https://u:$$ b@host/v.zarr",
    "https://u:$$?b@host/v.zarr",
    "HTTPS://host/v.zarr?$$",
    "override data.store.token=$$",
    "https://u:p@$$@h/v",
    "https://u:a@b/$$@h/x",
    "host/path?sig=$$&se=1",
    "postgres://u:$$@db:5432/x",
    "https://$$@github.com/a/@b",
    "Authorization: Bearer $$",
    'Proxy-Authorization: Digest username="u", response="$$"',
    "curl -H 'Authorization: Bearer $$' https://h/v",
    "2026-11-29 INFO sent Authorization: Bearer $$ to h",
    '{"Authorization": "Bearer $$", "Accept": "x"}',
    "{b'Authorization': b'Bearer $$'}",
    '{\\"token\\": \\"$$\\"}',
    "Authorization=Bearer $$",
    "X-Api-Key: $$",
    "Cookie: session=$$; b=1",
    "password: $$",
    "token: $$",
    "api key: $$",
    "client secret = $$",
    "password = $$",
    "secretKey: $$",
    "aws_secret_access_key = $$",
    "dbpassword=$$",
    "MY_TOKEN='$$ $$'",
    '{"password": "a\\"$$"}',
    '{"password": 12$$}',
    'password: "$$ x"',
    "os.environ['TOKEN'] = '$$'",
    "password='$$'",
    "User(name='x', password='$$')",
    "key: $$1234567AB",
    '{"credential": "$$"}',
    '{"key": "$$"}',
    "--password $$",
    "--token $$ --x",
    "SharedAccessSignature=$$",
    "AccountName=a;AccountKey=$$==;EndpointSuffix=core",
    "token:\n  $$",
    "token: |\n  $$\n  $$",
    "secret: >-\n    $$\n",
    "{password: $$, user: me}",
    "[user, {token: $$}]",
    "auth=$$",
    "-----BEGIN RSA PRIVATE KEY-----\n$$\n$$\n-----END RSA PRIVATE KEY-----",
    "token2: $$",
    "a: b: token: $$",
    "bearer $$1234567",
    "X-Amz-Security-Token: $$",
    "AWS_ACCESS_KEY_ID=$$",
    "url: s3://k:$$@b, level: 0",
    'path: "s3://k:$$/x@b/v"',
    "token=$$,b",
    "password :$$",
    '{"token": ["$$", "$$"], "x": 1}',
    '{"password": {"value": {"a]": "$$"}, "b": "$$"}}',
    "password: 'it''s $$'",
    "{user: me, password: two $$, x: 1}",
    "TOKEN:=$$",
]
ON_A_LINE = [
    "credential: $$",
    "credentials: $$",
    "pwd: $$",
    "  - password: $$ $$",
    "auth: $$",
    "password: two $$ words",
    "password:\n  - $$\n  - $$",
    "secret: >-\n  $$\n\n  $$",
    "passwords: [$$,\n    $$]",
    "token: !!str $$",
]
READABLE = [
    "https://host:8080/path/user@example.com",
    "s3://bucket/scan?v=2",
    "tokens: 2601",
    "key: training.lr",
    "unknown key data.volumez: did you mean data.volumes?",
    "chunk key: scroll1/0/c/10/11/12",
    "the tokenizer=bert",
    "monkey: three",
    "pass: GPU busy 99.5 % (target >= 80 %)",
    "password: null",
    "token=None",
    "password: ~",
    "first pass: voxels not yet in memory",
    "volume    key-value store: 3",
    "a signature: two arrays",
    "public keys: 3",
    "2026-11-29 00:27:54 INFO Train step 1/2 epoch 1/1 loss 0.93372 lr 2.0e-03",
    "see https://example.com?",
    "see https://example.com/a, then",
    "std::token",
    "if token == 'x'",
    "Basic configuration",
    "Token expired today",
    "Cannot reach s3://b: connection refused; check the credentials",
    "/etc/secrets/token: permission denied",
    "sort_key: name",
    "data.store.requests: was 8, is 64",
    "ask me@example.org: x",
    "git@github.com:a/b.git",
    "PWD=/home/me",
    "XAUTHORITY=/x",
    "by-pass: 3",
    "sigma=0.02",
    "oauth_provider: x",
    "pass 2: 40 %",
    "the key: value pairs",
    "http://localhost:8642/ (Ctrl-C to stop)",
    "mask: s3://b/a@b.zarr",
    "vesuvius train --config a.yaml training.lr=2e-4",
    "token bucket: 5 per s",
    "with a token",
]


@pytest.mark.parametrize("form", ["{}", "a {}", "x\n{}\ny", "({})"])
def test_a_secret_is_found_by_where_it_stands(form: str) -> None:
    """In URLs of any scheme, headers, YAML, JSON, dicts, assignments, options and `name: value`."""
    for text in OF_EVERY_KIND:
        assert SECRET not in redact(form.replace("{}", text.replace("$$", SECRET)), {}), text
    for text in ON_A_LINE:
        assert SECRET not in redact(f"x: 1\n{text.replace('$$', SECRET)}\ny: 2", {}), text


def test_a_secret_in_yaml_ends_where_its_indentation_ends() -> None:
    text = "a: 1\nb:\n  token:\n    - x\n\n    - y\n  c: 3\nd: 4"
    assert redact(text, {}) == "a: 1\nb:\n  token:***\n  c: 3\nd: 4"
    assert redact('{"token": ["a", {"b": 1}], "x": [1]}', {}) == '{"token": ***, "x": [1]}'


def test_text_without_a_secret_stays_as_it_is() -> None:
    for text in READABLE:
        assert redact(text, {}) == text


def test_secrets_of_data_are_hidden_by_their_names_at_any_depth() -> None:
    data = {
        "password": 1234567, "token": None, "secret": True, "credentials": {"user": "a", "all": ["b", 3]}, "key": "abc",
        "headers": [["Authorization", "Basic x"], ("X-Auth-Token", "abc")],
        "argv": ["x", "--token", "abc", "--seed", 3],
        "tokens": 5, "names": ["a", "b"],
    }  # fmt: skip
    assert redacted(data) == {
        "password": "***", "token": None, "secret": True, "credentials": {"user": "***", "all": ["***", "***"]},
        "key": "***", "headers": [["Authorization", "***"], ("X-Auth-Token", "***")],
        "argv": ["x", "--token", "***", "--seed", 3], "tokens": 5, "names": ["a", "b"],
    }  # fmt: skip
