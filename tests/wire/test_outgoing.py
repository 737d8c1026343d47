"""What a hub sends: values, encoded once however many sessions they go to."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.errors import Malformed
from duly.wire import outgoing
from duly.wire.outgoing import AckFrame, FrameWithFields, LineFrame, PushFrame, ServerAck


def test_a_frame_that_goes_to_many_sessions_is_encoded_once() -> None:
    frame = LineFrame("one_chat", "1_1", "ann", Raw(b'{"text":"hello"}'))
    assert outgoing.encode(frame) is outgoing.encode(frame)


def test_an_equal_frame_is_another_frame() -> None:
    one, other = ServerAck("1_1", 0), ServerAck("1_2", 0)
    assert [json.loads(outgoing.encode(it))["seq_id"] for it in (one, other, one)] == ["1_1", "1_2", "1_1"]


def test_the_fields_of_a_frame_win_over_those_of_its_sender() -> None:
    frame = FrameWithFields(AckFrame("1_1", "lock", code=0), {"code": Raw(b"9"), "x": Raw(b"[1]")})
    assert json.loads(outgoing.encode(frame)) == {
        "type": "ack", "seq_id": "1_1", "from": "lock", "code": 0, "x": [1],
    }  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"x": Raw(b'"y"'), "code": Raw(b"7")}])
def test_a_stored_push_is_read_back_and_gets_its_number(more: dict[str, Raw]) -> None:
    frame = PushFrame("event_report", "lock", Raw(b'"}"'), 1_700_000_000_000)
    stored = outgoing.encode(FrameWithFields(frame, more) if more else frame)
    shown = json.loads(outgoing.encode(outgoing.numbered(outgoing.read_push(stored), 7)))
    assert shown == json.loads(stored) | {"cursor": 7}


def test_what_is_no_stored_push_is_malformed() -> None:
    with pytest.raises(Malformed):
        outgoing.read_push(b'{"type":1,"from":"lock"}')


def test_an_answer_that_was_waited_for_is_in_the_server_ack() -> None:
    said, ended = ServerAck("1_1", 0), outgoing.ack("1_1", "lock", State.DONE, Answer(0, b"[1]"))
    whole = json.loads(outgoing.encode(outgoing.with_ack(said, ended)))
    assert (whole["type"], whole["code"], whole["ack"]["data"]) == ("server_ack", 0, [1])
