"""Checkers of pushes and presence.

Every push that a device has stored reaches the hub, once and in order, and apps learn of every connection and
disconnection of a device once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct

from duly.clients.push_outbox import OURS
from duly.core import operations as w
from duly.core.messages import Verdict, VerdictKind, key_of, names_in
from duly.testing.sim.checkers import CHECKERS, Checker, Finding
from duly.testing.sim.world import World
from duly.wire import frames
from duly.wire.frames import DEVICE_STATUS


def pushes_kept(world: World) -> Iterator[Finding]:
    """[P1, P2, P4] The pushes that a device has stored are in its stream at the hub: none is lost or
    repeated, and they are in the order in which they were pushed."""
    hub = world.settled_disks["hub"]
    for name in world.nodes:
        if not name.startswith("dev") or name in world.gone:
            continue
        wanted = [
            key_of(name, write.message.id)
            for who, write, result in world.log.commits
            if who == name and isinstance(write, w.Admit) and write.message.scope == OURS
            if isinstance(result, Verdict) and result.kind is VerdictKind.FRESH
        ]
        told = [entry.key for entry in hub.streams.get(f"push/{name}", ()) if not is_presence(entry.body)]
        for key in wanted:
            if key not in told:
                yield f"{name} stored a push, and the hub never stored it", key
        for n, key in enumerate(told):
            if key in told[:n]:
                yield f"a push of {name} was stored twice", key
        numbers = [int(names_in(key)[1].partition("_")[2]) for key in told if key]
        if numbers != sorted(numbers):
            yield f"the pushes of {name} were stored out of order", b""


def presence_reported(world: World) -> Iterator[Finding]:
    """[P5] Apps are told alternately that a device is online and offline, and the last report is true."""
    hub = world.settled_disks["hub"]
    for name in world.nodes:
        if not name.startswith("dev") or name in world.gone:
            continue
        said = [
            is_online(entry.body) for entry in hub.streams.get(f"push/{name}", ()) if is_presence(entry.body)
        ]
        if said != [n % 2 == 0 for n in range(len(said))]:
            yield f"apps were told of {name}, one after the other: {said}", b""
        if not said or not said[-1]:
            yield f"{name} is connected, and apps were not told", b""


def is_presence(body: bytes) -> bool:
    """Return whether an entry of a device's stream reports that it connected or left; otherwise it is a
    push."""
    return frames.decode(body).type == DEVICE_STATUS


class _OnlineData(Struct, frozen=True):
    online: bool


def is_online(body: bytes) -> bool:
    """Return whether such an entry reports that the device connected."""
    return msgspec.json.decode(frames.decode(body).data, type=_OnlineData).online


GATEWAY_CHECKERS: Final[tuple[Checker[World], ...]] = (
    *CHECKERS,
    pushes_kept,
    presence_reported,
)
