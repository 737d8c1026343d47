"""Frames: what is known, what is kept, what is reserved."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from duly.apps.alerts.service import AlertService
from duly.apps.chat.service import ChatService
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.errors import Malformed
from duly.wire import fields, frames, outgoing
from duly.wire.frames import Frame
from duly.wire.outgoing import FrameWithFields

COMMAND = b'{"type":"query","seq_id":"1702234567890_0","to":"lock"%b}'


def test_the_types_of_every_other_application_are_reserved() -> None:
    assert ChatService.types | AlertService.types <= frames.RESERVED
    assert not frames.RESERVED & (frames.COMMANDS | frames.PUSHES)


def test_a_frame_without_fields_of_its_own_has_a_body_of_its_data() -> None:
    message = frames.message_of(frames.decode(COMMAND % b',"data": {"a": 1}'), "app")
    assert message.body == b'{"a": 1}'


def test_a_body_with_more_cannot_be_taken_for_data() -> None:
    message = frames.message_of(frames.decode(COMMAND % b',"x":1'), "app")
    assert message.body[:1] == fields.MORE
    with pytest.raises(Malformed):
        frames.decode(COMMAND % b',"data":\x1e1')


@pytest.mark.parametrize("name", ["code", "time", "state", "n", "online", "token", "edited", "progress", "x"])
def test_any_field_that_is_none_of_a_commands_changes_its_fingerprint(name: str) -> None:
    plain = frames.message_of(frames.decode(COMMAND % b""), "app")
    more = frames.message_of(frames.decode(COMMAND % b',"%b":"?"' % name.encode()), "app")
    assert plain.fingerprint != more.fingerprint
    assert frames.decode(outgoing.encode(outgoing.command(more, -1))).more or name != "x"


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9)
    )
)
@example({"n": None, "edited": False, "x": None})
def test_whatever_a_sender_adds_arrives(own: dict[str, object]) -> None:
    """But for a field of other frames that says what its absence says."""
    import json

    taken = {"type", "seq_id", "to", "from", "data", "exp", "queue", "order", "timeout"}
    absent = {name: False if name == "edited" else None for name in Frame.__struct_encode_fields__}
    own = {
        name: value
        for name, value in own.items()
        if name not in taken and not (name in absent and value is absent[name])
    }
    text = json.dumps({"type": "query", "seq_id": "1702234567890_0", "to": "lock", **own}).encode()
    command = outgoing.command(frames.message_of(frames.decode(text), "app"), -1)
    passed_on = json.loads(outgoing.encode(command))
    assert {name: passed_on[name] for name in own} == own


def test_an_answer_carries_its_fields_through_the_ledger() -> None:
    state, answer = frames.answer_of(frames.decode(b'{"type":"ack","seq_id":"x","code":0,"result":"ok"}'))
    told = frames.decode(outgoing.encode(outgoing.ack("x", "lock", state, answer)))
    assert (told.code, told.state, bytes(told.more["result"])) == (0, "done", b'"ok"')


def test_an_answer_without_them_is_as_it_was() -> None:
    told = outgoing.encode(outgoing.ack("x", "lock", State.DONE, Answer(0, b"[1]")))
    assert told == b'{"type":"ack","seq_id":"x","from":"lock","data":[1],"code":0,"state":"done"}'


def test_an_mqtt_device_gets_the_data_or_an_object_of_all_fields() -> None:
    def payload(more: bytes) -> bytes:
        command = outgoing.command(frames.message_of(frames.decode(COMMAND % more), "app"), -1)
        if isinstance(command, FrameWithFields):
            return outgoing.payload_of(command.frame, command.fields)
        return outgoing.payload_of(command, {})

    assert payload(b',"data":{"open":true}') == b'{"open":true}'
    assert payload(b',"command":"unlock"') == b'{"command":"unlock"}'
    assert payload(b',"command":"unlock","data":1') == b'{"command":"unlock","data":1}'
    assert payload(b"") == b""


def test_a_name_of_the_protocols_cannot_be_a_field_of_ones_own() -> None:
    with pytest.raises(Malformed, match="seq_id"):
        frames.own_fields({"seq_id": 1})
    assert frames.own_fields({"command": "unlock"}) == {"command": Raw(b'"unlock"')}
