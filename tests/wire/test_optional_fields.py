"""An optional field that is null is absent, in every frame and in the data of every frame."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from duly.apps.alerts import heartbeats, model
from duly.apps.chat import conversations, groups, line_requests, queries
from duly.errors import Malformed
from duly.transports.http import schemas
from duly.wire import alertmanager, cloud_events, frames, optional_fields
from duly.wire.frames import Frame

COMMAND = {"type": "lock_control", "seq_id": "1702234567890_0", "to": "lock", "data": {"open": True}}
OPTIONAL = [field.encode_name for field in msgspec.structs.fields(Frame) if not field.required]


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("more", [{}, {"own": 1}])
def test_every_optional_field_of_a_frame_may_be_null(name: str, more: dict[str, Any]) -> None:
    if name in ("data", "progress"):
        return  # anything: null is a value
    said = {key: value for key, value in (COMMAND | more).items() if key != name}
    assert frames.decode(json.dumps(said | {name: None})) == frames.decode(json.dumps(said))


def test_the_fields_of_an_order_may_be_null() -> None:
    order = {"key": None, "mode": None, "after": None}
    said = frames.decode(json.dumps(COMMAND | {"order": order, "queue": None}))
    assert said == frames.decode(json.dumps(COMMAND | {"order": {}}))
    named = frames.decode(json.dumps(COMMAND | {"order": {"key": "power", "mode": None}}))
    assert named == frames.decode(json.dumps(COMMAND | {"order": {"key": "power"}}))


def test_data_is_passed_on_byte_by_byte() -> None:
    said = b'{"type": "query", "seq_id": "1_0", "to": "l", "queue": null, "data": {"a" : [ null, 1.0 ]}}'
    assert bytes(frames.decode(said).data) == b'{"a" : [ null, 1.0 ]}'


@pytest.mark.parametrize(
    "said", ['{"type":null}', '{"type":"query","exp":"soon","queue":null}', "null", "[]"]
)
def test_what_must_not_be_null_is_refused(said: str) -> None:
    with pytest.raises(Malformed):
        frames.decode(said)


@pytest.mark.parametrize(
    "type_",
    [
        queries.HistoryPage,
        conversations.EditData,
        line_requests.EditRequest,
        groups.CreateGroup,
        groups.MemberRequest,
        groups.RankRequest,
        model.AlertEvent,
        model.AlertChange,
        heartbeats.HeartbeatData,
        schemas.Credentials,
        schemas.LogoutRequest,
        schemas.PasswordChange,
        cloud_events.CloudEvent,
        alertmanager.FiringAlert,
    ],
    ids=lambda type_: type_.__name__,
)
def test_optional_fields_of_data_may_be_null(type_: type[msgspec.Struct]) -> None:
    needed: dict[str, Any] = {
        field.encode_name: 1 if field.type is int else "x"
        for field in msgspec.structs.fields(type_)
        if field.required
    }
    needed |= {name: value for name, value in FITTING.items() if name in needed}
    nulls = {
        field.encode_name: None
        for field in msgspec.structs.fields(type_)
        if not field.required and field.type is not msgspec.Raw
    }
    whole = optional_fields.decode(json.dumps(needed | nulls).encode(), type_)
    plain = optional_fields.decode(json.dumps(needed).encode(), type_)
    differ = {name for name in type_.__struct_fields__ if getattr(whole, name) != getattr(plain, name)}
    assert differ <= {"every"}, "null has a meaning of its own in a heartbeat"


FITTING = {"members": [], "role": "admin", "status": "firing", "startsAt": "2026-01-01T00:00:00Z"}


def test_an_alert_with_nulls_is_an_alert() -> None:
    said = {"profile_id": "home", "trigger_reason": "fall"}
    names = ("timestamp", "device_address", "session_id", "severity", "cancelled_count", "undated")
    assert model.read_event(json.dumps(said | dict.fromkeys(names)).encode()) == model.read_event(
        json.dumps(said).encode()
    )


def test_a_null_in_a_heartbeat_withdraws_nothing() -> None:
    beat = heartbeats.read_beat(b'{"profile_id":"home","every":null,"run":null,"held":null}')
    assert (beat.every, beat.run, beat.held) == (None, "", {})
