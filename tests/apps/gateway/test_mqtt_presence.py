"""Who is online: by a device's own word, by its silence, and after the broker has died."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from duly.apps.gateway.mqtt_presence import GRACE, SESSIONS, MqttPresence
from duly.core.units import SECOND
from duly.testing.loops import VirtualLoop
from duly.wire.fd import FdStatus


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def online(session: str = "1", heartbeat: int = 0) -> FdStatus:
    return FdStatus(online=True, session=session, heartbeat=heartbeat * SECOND)


def test_a_device_is_silent_after_three_heartbeats(loop: VirtualLoop) -> None:
    async def run() -> None:
        presence = MqttPresence()
        presence.came_online("lock", online(heartbeat=10), old=False)
        presence.came_online("lamp", online(), old=False)
        await asyncio.sleep(25)
        presence.heard("lock")
        await asyncio.sleep(25)
        assert presence.silent() == []
        await asyncio.sleep(6)
        assert presence.silent() == ["lock"]

    loop.run_until_complete(run())


def test_the_end_of_an_older_session_is_not_the_end_of_a_newer_one(loop: VirtualLoop) -> None:
    async def run() -> None:
        presence = MqttPresence()
        presence.came_online("lock", online("2"), old=False)
        assert not presence.ends("lock", "1")
        assert presence.ends("lock", "2")
        assert presence.ends("lock", "")
        presence.went_offline("lock")
        assert presence.ends("lock", "1")

    loop.run_until_complete(run())


def test_after_the_broker_has_died_only_a_new_session_is_news(loop: VirtualLoop) -> None:
    async def run() -> None:
        presence = MqttPresence()
        presence.came_online("lock", online("1"), old=False)
        presence.note_session("lock", "1")
        presence.came_online("lamp", online("1"), old=False)
        presence.broker_restarted()
        assert presence.is_repeat("lock", "1")
        assert not presence.is_repeat("lock", "2")
        presence.heard("lock")
        presence.came_online("lamp", online("2"), old=False)
        await asyncio.sleep(GRACE)
        assert presence.silent() == ["lock"]

    loop.run_until_complete(run())


def test_a_device_that_connects_to_the_broker_anew_without_a_word_stays_online(loop: VirtualLoop) -> None:
    """Firmware may say only at its start that it is online. One that promised a heartbeat has to report."""

    async def run() -> None:
        presence = MqttPresence()
        presence.watch_connections()
        for name, status in (("lock", online()), ("lamp", online()), ("bell", online(heartbeat=5))):
            presence.connections(name, True)
            presence.came_online(name, status, old=False)
        presence.broker_restarted()
        presence.connections("lock", True)
        presence.connections("bell", True)
        await asyncio.sleep(GRACE)
        assert presence.silent() == ["lamp", "bell"]

    loop.run_until_complete(run())


def test_a_session_before_the_last_one_is_no_news_either_after_the_broker_has_died(loop: VirtualLoop) -> None:
    """All that the hub had not acknowledged comes again, in its order: also what an earlier session said."""

    async def run() -> None:
        presence = MqttPresence()
        for session in ("1", "2"):
            presence.came_online("lock", online(session), old=False)
            presence.note_session("lock", session)
        assert not presence.is_former("lock", "1")
        presence.broker_restarted()
        assert presence.is_former("lock", "1")
        assert not presence.is_former("lock", "2")
        assert not presence.is_former("lock", "3")
        assert not presence.is_former("lock", "")

    loop.run_until_complete(run())


def test_the_latest_sessions_are_remembered(loop: VirtualLoop) -> None:
    presence = MqttPresence()
    for n in range(1_000):
        presence.note_session("lock", str(n))
    assert len(presence._sessions["lock"]) == SESSIONS


def test_a_device_that_is_not_heard_of_in_a_new_session_of_the_hub_is_given_up(loop: VirtualLoop) -> None:
    async def run() -> None:
        presence = MqttPresence()
        presence.came_online("lock", online(), old=False)
        await asyncio.sleep(1)
        presence.link_lost()
        await asyncio.sleep(1)
        presence.came_online("lamp", online(), old=False)
        presence.session_began()
        await asyncio.sleep(GRACE)
        assert presence.silent() == ["lock"]

    loop.run_until_complete(run())


def test_what_the_broker_kept_is_overtaken_by_a_report_on_the_same_connection_only(
    loop: VirtualLoop,
) -> None:
    async def run() -> None:
        presence = MqttPresence()
        await presence.link_connects()
        before = presence.connection
        presence.reported("lock", before)
        assert presence.is_overtaken("lock", before)
        assert not presence.is_overtaken("lamp", before)
        await presence.link_connects()
        assert not presence.is_overtaken("lock", presence.connection)

    loop.run_until_complete(run())
