"""What MQTT devices say, as frames: codes are numbers, ids are text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duly.apps.gateway.mqtt_frames import data_of, failure_of, push_in
from duly.errors import Malformed
from duly.wire import fd
from duly.wire.fd import Form


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [
        ({"code": 1, "detail": "busy"}, 1, "busy"),
        ({"code": 6, "error": "full"}, 6, "full"),
        ({"code": True}, 3, "{'code': True}"),
        ({"code": 0}, 3, "{'code': 0}"),
        ({"code": 1e3}, 3, "{'code': 1000.0}"),
        ("jammed", 3, "jammed"),
    ],
)
def test_a_failure_has_a_number_and_its_words(error: Any, code: int, detail: str) -> None:
    frame = failure_of(fd.content_of(error, Form.JSON))
    assert (frame.code, type(frame.code) is bool, frame.detail) == (code, False, detail)


def status(**data: Any) -> fd.FdStatus:
    return fd.FdStatus(data=fd.Content(json.dumps(data).encode()))


def test_a_push_is_told_in_the_data_of_a_status() -> None:
    push = push_in(status(type="log_report", data=[1], seq_id="7_1", more=2))
    assert push is not None
    assert (push.kind, bytes(push.data), push.seq_id) == ("log_report", b"[1]", "7_1")
    assert {name: bytes(value) for name, value in push.more.items()} == {"more": b"2"}
    assert push_in(status(door="open")) is None
    assert push_in(fd.FdStatus()) is None


@pytest.mark.parametrize("number", [b"1e400", b"9" * 5_000, b"18446744073709551616", b"-0.0", b"1.10"])
def test_a_number_reaches_the_apps_as_it_was_written(number: bytes) -> None:
    said = b'{"type":"log_report","data":{"x":%b},"own":%b}' % (number, number)
    push = push_in(fd.FdStatus(data=fd.Content(said)))
    assert push is not None
    assert (bytes(push.data), bytes(push.more["own"])) == (b'{"x":%b}' % number, number)
    assert data_of(fd.Content(b" [%b] " % number)) == b"[%b]" % number


def test_what_a_device_completes_with_is_json() -> None:
    done = {
        b"": b"",
        b"null": b"",
        b'{"a": 1}': b'{"a":1}',
        b"on": b'"on"',
        b"\xff": b'"/w=="',
        b"nan": b'"nan"',
    }
    assert {data: data_of(fd.Content(data)) for data in done} == done
    assert data_of(fd.content_of("7", Form.JSON)) == b'"7"'


@pytest.mark.parametrize("seq_id", [5, 1.5, True, [], {}])
def test_an_id_that_is_no_text_is_refused(seq_id: Any) -> None:
    """Taken without its id, it would be stored again with every repeat."""
    with pytest.raises(Malformed, match="not text"):
        push_in(status(type="log_report", seq_id=seq_id))
