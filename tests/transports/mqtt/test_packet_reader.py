"""Bytes become packets, however they are cut; floods are tested with the whole session."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from duly.errors import Malformed
from duly.transports.mqtt.packet_reader import PacketReader
from duly.transports.mqtt.packets import Packet

PINGRESP = b"\xd0\x00"
PUBACK = b"\x40\x02\x00\x07"


def reading() -> tuple[PacketReader, list[bytes], list[Malformed]]:
    heard: list[bytes] = []
    broken: list[Malformed] = []

    def handle(data: bytes, found: Sequence[Packet]) -> None:
        for first, start, end in found:
            if first == 0:
                raise Malformed("a packet of kind 0")
            heard.append(bytes((first,)) + data[start:end])

    return PacketReader(handle, broken.append), heard, broken


@pytest.mark.parametrize("cut", range(1, 6))
async def test_packets_are_whole_wherever_the_bytes_are_cut(cut: int) -> None:
    reader, heard, broken = reading()
    whole = PUBACK + PINGRESP
    reader.receive(whole[:cut])
    reader.receive(whole[cut:])
    assert (heard, broken) == ([b"\x40\x00\x07", b"\xd0"], [])


async def test_what_is_no_mqtt_is_reported_and_ends_the_turn() -> None:
    reader, heard, broken = reading()
    reader.receive(PINGRESP + b"\x00\x00" + PINGRESP)
    assert heard == [b"\xd0"]
    assert [str(problem) for problem in broken] == ["a packet of kind 0"]
    reader, heard, broken = reading()
    reader.receive(b"\x30\xff\xff\xff\xff\xff")
    assert (heard, len(broken)) == ([], 1)
