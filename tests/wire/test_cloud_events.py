"""CloudEvents become frames: their source and id are the identity, in every mode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duly.errors import Malformed
from duly.wire import frames
from duly.wire.cloud_events import (
    BATCH,
    STRUCTURED,
    CloudEvent,
    OutgoingEvent,
    binary,
    frame_of,
    read_events,
    structured,
)
from duly.wire.frames import Frame

EVENT = {
    "specversion": "1.0", "id": "7", "source": "/shop", "type": "com.example.lock_control",
    "subject": "lock-1", "data": {"open": True},
}  # fmt: skip
AT = "2026-11-16T07:54:53.877Z"
MS_AT = 1_794_815_693_877


def one(event: dict[str, Any] | bytes, **headers: str) -> CloudEvent:
    body = event if isinstance(event, bytes) else json.dumps(event).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    found = read_events({"content-type": STRUCTURED} | named, body)
    assert isinstance(found, CloudEvent)
    return found


def frame(event: dict[str, Any] | bytes, **headers: str) -> Frame:
    return frames.decode(frame_of(one(event, **headers)))


def test_an_event_names_the_frame_and_its_recipient() -> None:
    got = frame(EVENT)
    assert (got.type, got.seq_id, got.to) == ("lock_control", "/shop 7", "lock-1")
    assert json.loads(bytes(got.data)) == {"open": True}


def test_binary_mode_says_the_same() -> None:
    head = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-subject": "lock%2D1"}
    head |= {"ce-type": "com.example.lock_control", "content-type": "application/json; charset=utf-8"}
    found = read_events(head, b'{"open": true}')
    assert isinstance(found, CloudEvent)
    assert frame_of(found) == frame_of(one(json.dumps(EVENT).encode()))


def test_the_identity_is_source_and_id_and_never_shared() -> None:
    def seq_id(source: str, id_: str) -> str | None:
        return frame(EVENT | {"source": source, "id": id_}).seq_id

    pairs = [("/a", "b"), ("/a", "b c"), ("/ab", "c"), ("/a#b", "c"), ("/a", "#b c"), ("/a" * 300, "1"),
             ("/a" * 300, "2")]  # fmt: skip
    assert len({seq_id(*pair) for pair in pairs}) == len(pairs)
    assert all(len(str(seq_id(*pair))) <= 200 for pair in pairs)


@pytest.mark.parametrize(
    ("more", "exp"),
    [
        ({}, None),
        ({"time": AT}, MS_AT + 300_000),
        ({"time": AT, "queue": True}, MS_AT + 86_400_000),
        ({"time": AT, "expirytime": "2026-11-16T08:54:54.877+01:00"}, MS_AT + 1_000),
    ],
)
def test_a_command_that_has_a_time_has_an_end(more: dict[str, Any], exp: int | None) -> None:
    assert frame(EVENT | more).exp == exp


def test_an_alert_has_the_events_time() -> None:
    got = frame(EVENT | {"type": "alert_event", "time": AT})
    assert (got.time, got.exp) == (MS_AT, None)


@pytest.mark.parametrize(
    ("form", "body", "data"),
    [
        ("application/vnd.example+json", b'{"a":1}', b'{"a":1}'),
        ("text/plain", "größer".encode(), '"größer"'.encode()),
        ("application/json", b"", b""),
    ],
)
def test_data_is_json_or_text(form: str, body: bytes, data: bytes) -> None:
    got = frame(body, content_type=form, ce_specversion="1.0", ce_id="1", ce_source="/s", ce_type="query")
    assert bytes(got.data) == data


def test_data_may_come_as_base64() -> None:
    event = {name: value for name, value in EVENT.items() if name != "data"}
    assert bytes(frame(event | {"data_base64": "eyJhIjoxfQ=="}).data) == b'{"a":1}'
    assert frame(EVENT | {"comexampleother": 7}).seq_id == "/shop 7", "other attributes are ignored"


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (b"", STRUCTURED), (b"[]", STRUCTURED), (b"{}", STRUCTURED), (b"{}", BATCH),
        (b"{}", "application/json"),
        (json.dumps(EVENT | {"specversion": "0.3"}).encode(), STRUCTURED),
        (json.dumps(EVENT | {"id": ""}).encode(), STRUCTURED),
        (json.dumps(EVENT | {"source": "a b"}).encode(), STRUCTURED),
        (json.dumps(EVENT | {"time": "yesterday"}).encode(), STRUCTURED),
        (json.dumps(EVENT | {"time": "2026-11-16T07:54:53"}).encode(), STRUCTURED),
        (b"[" * 100_000, BATCH), (b"\xff", STRUCTURED),
    ],
)  # fmt: skip
def test_what_is_no_event_is_malformed(body: bytes, form: str) -> None:
    with pytest.raises(Malformed, match=r"event"):
        read_events({"content-type": form}, body)


@pytest.mark.parametrize(
    "wrong",
    [
        {"specversion": "0.3"},
        {"source": ""},
        {"time": "yesterday"},
        {"id": 7},
        {"data": json.loads("[" * 40 + "]" * 40)},
    ],
)
def test_the_event_of_a_batch_that_is_wrong_is_named(wrong: dict[str, Any]) -> None:
    batch = json.dumps([EVENT, EVENT | wrong, EVENT]).encode()
    with pytest.raises(Malformed, match=r"^event 2 of 3 .*"):
        read_events({"content-type": BATCH}, batch)


@pytest.mark.parametrize(
    ("form", "body"),
    [("application/octet-stream", b"\x00"), ("application/json", b"{"), ("text/plain", b"\xff")],
)
def test_data_of_another_kind_is_malformed(form: str, body: bytes) -> None:
    head = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "query"}
    head["content-type"] = form
    with pytest.raises(Malformed):
        read_events(head, body)


@pytest.mark.parametrize("write", [structured, binary])
def test_what_is_written_is_read_the_same(write: Any) -> None:
    sent = OutgoingEvent("1", "/duly/alerts/gate", "duly.alert.event", 'ä"%', AT, {"a": 1})
    body, headers = write(sent)
    found = read_events({name.lower(): value for name, value in headers.items()}, body)
    assert isinstance(found, CloudEvent)
    assert (found.id, found.source, found.subject) == ("1", "/duly/alerts/gate", 'ä"%')
    assert json.loads(bytes(found.data)) == {"a": 1}
