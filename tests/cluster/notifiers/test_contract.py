"""What every notifier keeps: the other hubs hear a hint soon; if not, only time is lost."""

from __future__ import annotations

import asyncio
import signal

import pytest

from duly.cluster.notifier import UNSENT
from duly.cluster.notifiers import open_notifier
from duly.errors import Malformed
from duly.runtime.tasks import CANCEL_AGAIN
from tests.cluster.notifiers.conftest import NotifierBus, restart
from tests.stopwatch import MachineStopwatch


async def test_a_ring_is_heard_by_the_others_and_not_by_who_rang(bus: NotifierBus) -> None:
    one, other = await bus.pair()
    third = await bus.join()
    one.notifier.hint("device", "lock/1 …")
    await other.hears("lock/1 …")
    await third.hears("here", lambda: one.notifier.hint("device", "here"))
    assert "lock/1 …" not in one.heard


async def test_only_those_hear_it_who_listen_for_that_kind(bus: NotifierBus) -> None:
    one, other = await bus.pair()
    one.notifier.hint("chat", "room")
    one.notifier.hint("device", "last")
    await other.hears("last")
    assert "room" not in other.heard


async def test_hints_of_one_moment_go_out_together_each_once(bus: NotifierBus) -> None:
    one, other = await bus.pair()
    names = [f"device-{n:04}" + "x" * 60 for n in range(500)]
    for name in names * 3:
        one.notifier.hint("device", name)
    await other.hears(names[-1])
    assert [name for name in other.heard if name in names] == names


async def test_a_ring_takes_no_longer_than_a_blink(bus: NotifierBus) -> None:
    one, other = await bus.pair()
    took = []
    for n in range(20):
        blink = MachineStopwatch()
        one.notifier.hint("device", f"{n}")
        while f"{n}" not in other.heard:
            await asyncio.sleep(0)
        took.append(blink.seconds)
    assert sorted(took)[10] < 0.05


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_after_its_server_was_down_the_notifier_works_again_by_itself(
    bus: NotifierBus, how: signal.Signals
) -> None:
    one, other = await bus.pair()
    if bus.server is None:
        return
    await asyncio.to_thread(restart, bus.server, signal.SIGINT if how is signal.SIGTERM else how)
    await other.hears("back", lambda: one.notifier.hint("device", "back"))
    await one.hears("back too", lambda: other.notifier.hint("device", "back too"))


async def test_ringing_never_waits_and_what_waits_is_bounded_while_the_server_is_down(
    bus: NotifierBus,
) -> None:
    one, _ = await bus.pair()
    if bus.server is not None:
        await asyncio.to_thread(bus.server.stop, signal.SIGKILL)
    try:
        took = MachineStopwatch()
        for n in range(2 * UNSENT):
            one.notifier.hint("device", str(n))
        assert took.seconds < 1
        assert len(one.notifier._unsent) <= UNSENT
    finally:
        if bus.server is not None:
            await asyncio.to_thread(bus.server.start)


async def test_a_notifier_stops_at_any_moment_of_connecting(bus: NotifierBus) -> None:
    for turns in range(80):
        hub = await bus.join()
        for _ in range(turns):
            await asyncio.sleep(0 if turns % 2 else 0.0001)
        async with asyncio.timeout(CANCEL_AGAIN / 2):  # of the first cancellation
            await hub.notifier.stop()


async def test_what_others_say_on_our_channel_is_not_for_us(bus: NotifierBus) -> None:
    one, other = await bus.pair()
    for noise in (b"", b"hello", b"{}", b'["x"]', b"[1,2]", b"[]", b'["x",["no one/a"]]'):
        await one.notifier._send(noise)
    one.notifier.hint("device", "still here")
    await other.hears("still here")


@pytest.mark.parametrize("url", ["", "amqp://x", "redis", "rediss", "postgres"])
def test_what_is_no_notifier_is_refused_with_what_would_be(url: str) -> None:
    with pytest.raises(Malformed, match=r"notifier|Redis"):
        open_notifier(url, "me", "sqlite:///x.db")
