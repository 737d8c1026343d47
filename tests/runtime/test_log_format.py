"""Log lines say what programs and people need, and never a secret."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from duly.runtime.log_format import HumanLogFormatter, JsonLogFormatter, without_secrets


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("duly.test", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_record_is_one_json_object_with_its_message_and_hub() -> None:
    said = JsonLogFormatter(lambda: "hub-1").format(
        record("refused: %s", "it is\noffline", scope="phone", id="1_1", word="offline", odd="left out")
    )
    assert "\n" not in said
    shown = json.loads(said)
    assert shown.pop("time").endswith("Z")
    assert shown == {
        "level": "warning", "logger": "duly.test", "message": "refused: it is\noffline", "hub": "hub-1",
        "scope": "phone", "id": "1_1", "word": "offline",
    }  # fmt: skip


def test_a_line_for_people_names_the_message_and_cannot_be_forged() -> None:
    said = HumanLogFormatter().format(record("refused: a\nb\x1b[31m", scope="phone", id="1_1", attempt=2))
    assert said.endswith("WARNING duly.test: refused: a ↵ b\ufffd[31m  [phone/1_1] attempt=2")


def test_a_traceback_is_kept_without_its_secrets() -> None:
    made = record("it failed")
    try:
        raise ValueError("postgresql://duly:geheim@db/duly")
    except ValueError:
        made.exc_info = sys.exc_info()
    shown = json.loads(JsonLogFormatter(lambda: "").format(made))
    for text in (shown["exception"], HumanLogFormatter().format(made)):
        assert "ValueError" in text
        assert "geheim" not in text


@pytest.mark.parametrize(
    "text",
    [
        "token duly_SECRETSECRETSECRETSECRET was wrong",
        "duly_ann:SECRETSECRETSECRETSECRET",
        "Authorization: Bearer SECRETSECRET",
        "redis://:SECRET@cache/0",
        "mqtt://hub:SECRET@broker:1883",
        "connect(password='SECRET')",
        '{"password": "SECRET"}',
        "?sslpassword=SECRET&x=1",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    shown = without_secrets(text)
    assert "SECRET" not in shown
    assert "(hidden)" in shown


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1:7800 serves", "the token is not known", "hub duly at 10:30", "duly_messages_total"],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text
