"""What nodes tell about themselves, with every broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from duly.clients.node.node import Node
from duly.clients.node.statuses import NodeStatus, Statuses
from duly.core.signing import Keyring
from duly.core.units import SECOND
from duly.testing.loops import LoopClock, VirtualLoop
from duly.wire.fd_signatures import FdSignatures
from tests.clients.node.nodes import Brokered, until
from tests.guard import GUARD


def serving(at: Brokered, name: str, **more: object) -> Node:
    return at.node(name, serve=True, **more)


async def test_a_node_is_online_while_it_lives_and_offline_after_its_goodbye(at: Brokered) -> None:
    async with at.node(at.a) as a:
        assert await a.status(at.b, within=0.5) is None
        async with serving(at, at.b):
            assert (await seen(a, at.b, online=True)).stale is False
        await seen(a, at.b, online=False)


async def test_a_status_has_the_fields_of_the_seed_and_data_of_its_own(at: Brokered) -> None:
    async with at.node(at.a) as a, serving(at, at.b) as b:
        b.report(battery=80, rssi=-60, ip="10.0.0.7", version="1.2", data={"door": "open"})
        await until_told(a, at.b, lambda s: s.battery == 80)
        status = await a.status(at.b)
        assert status is not None
        assert (status.rssi, status.ip, status.version, status.data) == (
            -60,
            "10.0.0.7",
            "1.2",
            {"door": "open"},
        )


async def test_a_node_that_goes_without_a_goodbye_is_offline_by_its_will(at: Brokered) -> None:
    async with at.node(at.a) as a:
        b = serving(at, at.b)
        await b.start()
        # One watch throughout: who asks anew in the moment of the will may be shown what was retained before.
        async with asyncio.timeout(GUARD), aclosing(a.watch_status(at.b)) as news:
            await told(news, online=True)
            session = b._mailbox.link._session
            assert session is not None
            b._mailbox.link._stopping.set()
            assert session._transport is not None
            session._transport.abort()  # as a crash would
            await told(news, online=False)
        await b.stop()


async def test_an_old_will_that_lands_late_is_corrected(at: Brokered) -> None:
    async with at.node(at.a) as a, at.peer(at.b) as peer, serving(at, at.b):
        await seen(a, at.b, online=True)
        told: list[bool | None] = []
        async with asyncio.timeout(GUARD), aclosing(a.watch_status(at.b)) as news:
            async for status in news:
                if not told:
                    late = {"time": 1, "online": False, "session": "of an older life"}
                    peer.say(at.b, "status", late, retain=True)
                told.append(status.online)
                if told[-2:] == [False, True]:
                    break
        assert told[-1] is True


async def test_everybody_is_watched_with_a_plus(at: Brokered) -> None:
    # RabbitMQ retains nothing for wildcards: there one hears of others with their next heartbeat.
    async with at.node(at.a) as a, serving(at, at.b, heartbeat=0.2):
        async with asyncio.timeout(GUARD), aclosing(a.watch_status("+")) as news:
            async for status in news:
                if status.name == at.b:
                    break
        assert status.online


async def test_a_status_can_be_deleted(at: Brokered) -> None:
    async with at.node(at.a) as a, serving(at, at.b) as b:
        await seen(a, at.b, online=True)
        await b.remove_status()
        async with asyncio.timeout(GUARD):
            while await a.status(at.b, within=0.3) is not None:
                pass


async def test_it_is_renewed_with_every_heartbeat(at_mosquitto: Brokered) -> None:
    at = at_mosquitto
    count = 0
    async with asyncio.timeout(GUARD), at.node(at.a) as a, serving(at, at.b, heartbeat=0.05):
        async for status in a.watch_status(at.b):
            count += status.online is True
            if count == 4:
                break
    assert count == 4


async def test_a_malformed_status_is_recorded_and_harmless(at_mosquitto: Brokered) -> None:
    at = at_mosquitto
    async with at.node(at.a) as a, at.peer(at.b) as peer:
        peer.say(at.b, "status", b"[]", retain=True)
        async with asyncio.timeout(GUARD), aclosing(a.watch_status(at.b)) as news:
            watching = asyncio.create_task(anext(news))
            await until(lambda: a.refused["malformed"] == 1)
            peer.say(at.b, "status", b"\xff")
            peer.say(at.b, "status", b'{"online": "perhaps"}')
            peer.say(at.b, "status", b"x" * 300_000)
            peer.say(at.b, "status", {"time": 0, "online": True}, retain=True)
            assert (await watching).online
        assert a.refused == {"malformed": 3, "too_large": 1}


def test_a_status_that_is_not_renewed_for_three_heartbeats_is_stale() -> None:
    loop = VirtualLoop()
    clock = LoopClock(loop)

    async def subscribe(_: str) -> None:
        """As a broker shows what it retains, and then what comes."""
        now = clock.now() // SECOND
        statuses.hear("D", b'{"time": 1, "online": true}', True)
        if statuses.known("B") is not None:
            return  # asked again
        statuses.hear("B", b'{"time": %d, "online": true}' % now, False)
        statuses.hear("C", b'{"time": 0, "online": false}', False)

    async def unsubscribe(_: str) -> None:
        pass

    statuses = Statuses(clock, FdSignatures(Keyring("A")), 60.0, subscribe, unsubscribe)

    async def watch() -> tuple[list[NodeStatus], float]:
        told: list[NodeStatus] = []
        async with aclosing(statuses.watch("+")) as news:
            async for status in news:
                told.append(status)
                if len(told) == 4:
                    break
        return told, loop.time()

    told, when = loop.play(watch())
    assert [(s.name, s.online, s.stale) for s in told] == [
        ("D", True, True), ("B", True, False), ("C", False, False), ("B", True, True)
    ]  # fmt: skip
    assert round(when) == 180


def test_who_says_how_often_it_reports_is_measured_by_that() -> None:
    loop = VirtualLoop()

    async def subscribe(_: str) -> None:
        if statuses.known("sleepy") is not None:
            return  # asked again
        statuses.hear("sleepy", b'{"time": 1, "online": true, "heartbeat": 300}', False)
        statuses.hear("eager", b'{"time": 1, "online": true, "heartbeat": 0.5}', False)
        statuses.hear("liar", b'{"time": 1, "online": true, "heartbeat": 1e9}', False)
        statuses.hear("silent", b'{"time": 1, "online": true}', False)

    async def unsubscribe(_: str) -> None:
        pass

    statuses = Statuses(LoopClock(loop), FdSignatures(Keyring("A")), 60.0, subscribe, unsubscribe)

    async def watch() -> dict[str, int]:
        gone: dict[str, int] = {}
        async with aclosing(statuses.watch("+")) as news:
            async for status in news:
                if status.stale:
                    gone[status.name] = round(loop.time() * 10)
                if len(gone) == 4:
                    break
        return gone

    found = loop.play(watch())
    assert found == {"eager": 15, "silent": 1_800, "sleepy": 9_000, "liar": 2_592_000}


async def test_a_node_says_how_often_it_reports(at: Brokered) -> None:
    async with at.node(at.a) as a, serving(at, at.b, heartbeat=0.5):
        assert (await seen(a, at.b, online=True)).heartbeat == 0.5


def told_by_a_broker(answers: list[bytes], live: dict[float, bytes]) -> list[int | None]:
    """What a watcher is told in five seconds by a broker that answers its questions in this way, and passes
    these on at these times."""
    loop = VirtualLoop()

    async def ask(who: str) -> None:
        statuses.hear(who, answers.pop(0) if len(answers) > 1 else answers[0], True)

    async def ignore(_: str) -> None:
        pass

    async def watch() -> list[int | None]:
        for at, payload in live.items():
            loop.call_later(at, statuses.hear, "B", payload, False)
        async with aclosing(statuses.watch("B", 5.0)) as news:
            return [status.battery async for status in news]

    statuses = Statuses(LoopClock(loop), FdSignatures(Keyring("A")), 60.0, ask, ignore)
    return loop.play(watch())


OLDER, NEWER = (b'{"time":%d,"online":true,"battery":%d}' % (n, n) for n in (1, 2))


def test_a_status_that_the_broker_kept_to_itself_is_asked_for_again() -> None:
    """The embedded broker answers with the status before, and keeps the newest to itself, if that is sent
    while the question comes."""
    assert told_by_a_broker([OLDER, NEWER], {}) == [1, 2]


def test_a_broker_that_is_busy_is_asked_a_third_time() -> None:
    assert told_by_a_broker([OLDER, OLDER, NEWER], {}) == [1, 2]


def test_the_second_question_brings_no_news_if_there_is_none() -> None:
    assert told_by_a_broker([OLDER, OLDER], {}) == [1]


def test_the_status_before_is_not_taken_for_news() -> None:
    """The answer to the second question may be as late as that to the first."""
    assert told_by_a_broker([OLDER, OLDER], {0.1: NEWER}) == [1, 2]


async def until_told(a: Node, name: str, true: Callable[[NodeStatus], bool]) -> NodeStatus:
    async with asyncio.timeout(GUARD), aclosing(a.watch_status(name)) as news:
        async for status in news:
            if true(status):
                return status
    raise AssertionError


async def told(news: AsyncIterator[NodeStatus], *, online: bool) -> None:
    """Until they are told that."""
    while (await anext(news)).online is not online:
        pass


async def seen(a: Node, name: str, online: bool) -> NodeStatus:
    return await until_told(a, name, lambda s: s.online is online)


async def test_two_who_ask_at_once_are_both_told(at: Brokered) -> None:
    async with at.node(at.a) as a, serving(at, at.b):
        await seen(a, at.b, online=True)
        told = await asyncio.gather(a.status(at.b), a.status(at.b))
        assert [status is not None and status.online for status in told] == [True, True]


def test_what_was_asked_for_long_ago_is_asked_for_again() -> None:
    """Between two questions nobody listens: what was heard then says nothing about now."""
    loop = VirtualLoop()

    async def ask(who: str) -> None:
        text = b'{"time":%d,"online":true}' % (clock.now() // SECOND)
        loop.call_later(0.01, lambda: statuses.hear(who, text, True))

    async def ignore(who: str) -> None:
        pass

    async def run() -> list[bool]:
        told = []
        for _ in range(2):
            status = await statuses.get("B", 2.0)
            assert status is not None
            told.append(status.stale)
            await asyncio.sleep(600)
        return told

    clock = LoopClock(loop)
    statuses = Statuses(clock, FdSignatures(Keyring("A")), 60.0, ask, ignore)
    try:
        assert loop.run_until_complete(run()) == [False, False]
    finally:
        loop.close()
