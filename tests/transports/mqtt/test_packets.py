"""Packets: however a stream is cut, they come out whole and in order; and nonsense is told from MQTT."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import Malformed
from duly.transports.mqtt import packets

payloads = st.binary(max_size=300) | st.integers(0, 20_000).map(bytes)
streams = st.lists(st.tuples(st.integers(1, packets.LAST_NUMBER), payloads), max_size=20)


@given(streams, st.integers(0, 400))
def test_a_stream_falls_into_its_packets_wherever_it_is_cut(sent: list[tuple[int, bytes]], cut: int) -> None:
    topic = packets.text("nodes/a/pending")
    whole = b"".join(packets.publish(topic, number, payload) for number, payload in sent)
    heard: list[tuple[int, bytes]] = []
    rest = b""
    for piece in (whole[:cut], whole[cut:]):
        data = rest + piece
        found, at, needed = packets.split(data)
        rest = data[at:]
        assert len(rest) < needed
        for first, start, end in found:
            assert first == packets.PUBLISH | packets.QOS_1
            body = start + len(topic)
            assert data[start:body] == topic
            heard.append((int.from_bytes(data[body : body + 2], "big"), data[body + 2 : end]))
    assert heard == sent
    assert rest == b""


@given(st.binary(max_size=200))
def test_whatever_comes_is_measured_before_it_is_read(data: bytes) -> None:
    try:
        found, at, needed = packets.split(data)
    except Malformed:
        return
    assert all(start <= end <= at for _, start, end in found)
    assert at <= len(data) < at + needed


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths_of_every_size_are_written_and_read_back(size: int) -> None:
    packet = packets.publish(packets.text("a"), 1, bytes(size))
    ((_, start, end),), rest, _ = packets.split(packet)
    assert (end - start, end, rest) == (3 + 2 + size, len(packet), len(packet))


def test_a_length_of_more_than_four_bytes_is_no_mqtt() -> None:
    with pytest.raises(Malformed, match="four bytes"):
        packets.split(b"\x30\xff\xff\xff\xff\x01")


def test_connect_as_the_standard_has_it() -> None:
    assert packets.connect("c", keepalive=30, clean=True) == b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x1e\x00\x01c"
    full = packets.connect(
        "c", keepalive=1, clean=False, username="ö", password="p", will=("w", b"gone", True)
    )
    assert full == (
        b"\x10\x1d\x00\x04MQTT\x04\xec\x00\x01\x00\x01c\x00\x01w\x00\x04gone\x00\x02\xc3\xb6\x00\x01p"
    )


def test_subscriptions_are_asked_for_at_their_qos() -> None:
    assert packets.subscribe(7, {"a": 1, "b/+": 0}) == b"\x82\x0c\x00\x07\x00\x01a\x01\x00\x03b/+\x00"
    assert packets.unsubscribe(7, ["a"]) == b"\xa2\x05\x00\x07\x00\x01a"


def test_a_text_that_mqtt_has_no_room_for_is_refused() -> None:
    with pytest.raises(Malformed, match="65536 bytes"):
        packets.connect("c", keepalive=1, clean=True, will=("w", bytes(65_536), False))
