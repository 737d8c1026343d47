"""The properties of MQTT 5: what is written is read, and what is no property is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from duly.errors import Malformed
from duly.transports.mqtt import properties
from duly.wire.publish_properties import PublishProperties

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200)
PUBLISH = st.builds(
    PublishProperties,
    st.none() | st.integers(0, 0xFFFF_FFFF),
    TEXT,
    st.binary(max_size=200),
    st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
)


def paho_properties(packet: int) -> Any:
    made: Any = Properties
    return made(packet)


@given(PUBLISH)
def test_paho_reads_what_we_write(about: PublishProperties) -> None:
    written = properties.encode(about)
    found = paho_properties(PacketTypes.PUBLISH)
    found.unpack(written)
    assert getattr(found, "MessageExpiryInterval", None) == about.expires
    assert getattr(found, "ResponseTopic", "") == about.response_topic
    assert getattr(found, "CorrelationData", b"") == about.correlation
    assert tuple(getattr(found, "UserProperty", ())) == about.user
    assert properties.skip(written + b"payload", 0, len(written) + 7) == len(written)


def test_we_read_what_paho_writes() -> None:
    told = paho_properties(PacketTypes.CONNACK)
    told.ReceiveMaximum, told.MaximumPacketSize, told.ServerKeepAlive, told.MaximumQoS = 20, 2_000, 7, 1
    told.ReasonString, told.AssignedClientIdentifier, told.SessionExpiryInterval = "wählen", "c-1", 60
    told.UserProperty = ("name", "value")
    written = told.pack()
    numbers, said, end = properties.read(written, 0, len(written))
    assert (said, end) == ("wählen", len(written))
    assert numbers == {
        properties.RECEIVE_MAXIMUM: 20,
        properties.MAXIMUM_PACKET_SIZE: 2_000,
        properties.SERVER_KEEPALIVE: 7,
        properties.MAXIMUM_QOS: 1,
        properties.SESSION_EXPIRY: 60,
    }


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_malformed(data: bytes) -> None:
    try:
        _, _, end = properties.read(data, 0, len(data))
    except Malformed:
        return
    assert 0 < end <= len(data)
    assert properties.skip(data, 0, len(data)) == end


@pytest.mark.parametrize(
    "packet",
    [
        "",
        "80",
        "8080808001",
        "02",
        "0121",
        "03210000ff",
        "022100",
        "041f0009",
        "05260001612600",
        "0104",
        "017f",
    ],
)
def test_what_is_cut_short_or_unknown_is_malformed(packet: str) -> None:
    data = bytes.fromhex(packet)
    if packet == "03210000ff":  # whole, and followed by something else
        assert properties.read(data, 0, len(data))[2] == 4
        return
    with pytest.raises(Malformed):
        properties.read(data, 0, len(data))


def test_a_number_that_is_too_large_becomes_the_largest() -> None:
    assert properties.number(properties.MESSAGE_EXPIRY, 1 << 40) == b"\x02\xff\xff\xff\xff"


def test_what_is_too_long_for_a_property_is_malformed() -> None:
    with pytest.raises(Malformed, match="65535"):
        properties.encode(PublishProperties(correlation=bytes(65_536)))
