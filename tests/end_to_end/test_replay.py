"""A frame that was captured and is sent again has no effect: not after a second, not after a thousand other
commands, not when its id is long forgotten."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Ids, Json, Peer, curl

DAY = 86_400


def command(**more: Any) -> Json:
    if "lasts" in more:
        more["exp"] = round((time.time() + more.pop("lasts")) * 1000)
    seq_id = Ids(age=1)()  # the phone mints ids of its own, perhaps in the same millisecond
    return {"type": "lock_control", "seq_id": seq_id, "to": "lock", "data": {"open": True}} | more


CAPTURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "with order": {"order": {"key": "bolt", "mode": "latest"}},
    "without order": {"order": False},
    "that may wait": {"queue": True},
    "that may wait until its exp": {"queue": True, "lasts": 120},
    "with exp": {"lasts": 120},
    "with an id that tells no time": {"seq_id": "open-sesame"},
    "with a random id": {"seq_id": str(uuid.uuid4())},
}


@asynccontextmanager
async def captured(local: HubUnderTest, **more: Any) -> AsyncIterator[tuple[Peer, Peer, str]]:
    """A command that was done once, and its frame as it went over the wire."""
    async with local.join("lock") as lock, local.join("phone") as phone:
        frame = json.dumps(command(**more))
        await phone.say_text(frame)
        assert (await phone.hear())["code"] == 0
        await lock.obey()
        assert (await phone.hear())["state"] == "done"
        yield lock, phone, frame


async def fill(lock: Peer, phone: Peer, count: int) -> None:
    """That many other commands."""
    for _ in range(count // 100):
        for _ in range(100):
            await phone.command("lock")
        for _ in range(100):
            await lock.obey()
        for _ in range(200):
            assert (await phone.hear())["code"] == 0


async def test_a_second_later(local: HubUnderTest) -> None:
    async with captured(local) as (lock, phone, frame):
        for _ in range(50):
            await phone.say_text(frame)
        for _ in range(50):
            assert (await phone.hear())["code"] == 5
            assert (await phone.hear())["state"] == "done"
        local.clock.seconds = 1
        await phone.say_text(frame)
        assert (await phone.hear())["code"] == 5
        assert (await phone.hear())["state"] == "done"
        assert await lock.hears_nothing()


async def test_after_a_thousand_other_commands_and_a_restart(local: HubUnderTest) -> None:
    async with captured(local) as (lock, phone, frame):
        await fill(lock, phone, 1_000)
        await phone.say_text(frame)
        assert (await phone.hear())["code"] == 5
        assert (await phone.hear())["state"] == "done"
        assert await lock.hears_nothing()
    await local.restart()
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.say_text(frame)
        assert (await phone.hear())["code"] == 5
        assert (await phone.hear())["state"] == "done"
        assert await lock.hears_nothing()


@pytest.mark.parametrize("kind", CAPTURED)
async def test_after_the_horizon(open_local: Open, kind: str) -> None:
    local = await open_local(remember=320, max_age=5)
    async with captured(local, **CAPTURED[kind]) as (lock, phone, frame):
        for later in (10, 400, 700, DAY, 2 * DAY, 30 * DAY):
            local.clock.seconds = later
            await local.hub.maintenance.run()
            await phone.say_text(frame)
            answer = await phone.hear()
            assert answer["code"] in (2, 5), (later, answer)
            if answer["code"] == 5:
                assert (await phone.hear())["state"] == "done"
            else:
                assert answer["error"] in ("stale", "expired")
            assert await lock.hears_nothing(0.02), f"it was done again after {later} s"


@pytest.mark.parametrize("kind", CAPTURED)
async def test_after_the_horizon_to_a_device_that_is_away(open_local: Open, kind: str) -> None:
    """Nothing may be left waiting for the device, either."""
    local = await open_local(remember=320, max_age=5)
    async with captured(local, **CAPTURED[kind]) as (_, phone, frame):
        pass
    await local.until(lambda: not local.hub.gateway.online("lock"))
    async with local.join("phone") as phone:
        for later in (700, DAY, 2 * DAY):
            local.clock.seconds = later
            await local.hub.maintenance.run()
            await phone.say_text(frame)
            answer = await phone.first(lambda f: f["type"] == "server_ack")
            assert answer["code"] in (2, 5), (later, answer)
    async with local.join("lock") as lock:
        assert await lock.hears_nothing()


async def test_a_command_without_age_that_may_wait_must_say_how_long(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        await phone.command("lock", seq_id="open-sesame", queue=True)
        answer = await phone.hear()
        assert (answer["code"], answer["error"]) == (2, "malformed")
        assert "exp" in answer["detail"]
        await phone.command("lock", seq_id="open-sesame", queue=True, exp=round((time.time() + 9) * 1000))
        assert (await phone.hear())["code"] == 0


async def test_an_idempotency_key_is_not_forgotten(open_local: Open) -> None:
    local = await open_local(remember=320, max_age=5)
    key = f"Idempotency-Key: {uuid.uuid4()}"
    body = {"type": "lock_control", "to": "lock", "data": 1}
    async with local.join("lock") as lock:
        first = await curl(f"{local.url}/v1/messages", local.tokens["phone"], "-H", key, body=body)
        assert first.status == 202
        await lock.obey()
        await local.until(lambda: not local.hub.gateway._inbox.live)
        local.clock.seconds = 3 * DAY
        await local.hub.maintenance.run()
        again = await curl(f"{local.url}/v1/messages", local.tokens["phone"], "-H", key, body=body)
        assert (again.status, again.json["state"]) == (200, "done")
        assert await lock.hears_nothing()


async def test_a_refused_frame_may_be_sent_again_but_not_for_ever(local: HubUnderTest) -> None:
    """Only what was accepted is remembered; what was refused gets too old to be done."""
    frame = command()
    async with local.join("phone") as phone:
        await phone.say(**frame)
        assert (await phone.hear())["error"] == "offline"
        local.clock.seconds = 601
        async with local.join("lock") as lock:
            await phone.say(**frame)
            assert (await phone.hear())["error"] == "stale"
            assert await lock.hears_nothing()
