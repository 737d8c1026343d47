"""Which ids of FastStream's messages count: those that every delivery of a message has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duly.errors import ProgramError
from duly.integrations.faststream import stable_id


def message(raw: Any, **headers: str) -> Any:
    return SimpleNamespace(raw_message=raw, headers=headers, message_id="made up", correlation_id="passed on")


def test_the_senders_id_comes_first() -> None:
    rabbit = SimpleNamespace(message_id="order-42")
    assert stable_id(message(rabbit)) == "order-42"
    assert stable_id(message(rabbit, message_id="order-7")) == "order-7"
    assert stable_id(message(SimpleNamespace(), **{"Nats-Msg-Id": "n-1"})) == "n-1"


def test_a_place_in_a_stream_is_an_id() -> None:
    redis = {"type": "stream", "channel": "orders", "message_ids": [b"1-0"], "data": {}}
    assert stable_id(message(redis)) == "orders 1-0"
    assert stable_id(message(SimpleNamespace(topic="orders", partition=3, offset=17))) == "orders 3 17"
    place = SimpleNamespace(stream="ORDERS", sequence=SimpleNamespace(stream=9))
    nats = SimpleNamespace(reply="$JS.ACK.ORDERS.c.1.9.1.0.0", metadata=place)
    assert stable_id(message(nats)) == "ORDERS 9"


@pytest.mark.parametrize(
    "raw",
    [SimpleNamespace(message_id=None), {"type": "list", "data": b""}, SimpleNamespace(reply="_INBOX.x")],
)
def test_an_id_that_faststream_makes_up_is_none(raw: Any) -> None:
    with pytest.raises(ProgramError, match="message_id="):
        stable_id(message(raw))
