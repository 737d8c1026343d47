"""What devices tell: numbered per device, kept for those who are away, and honest about what is gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from duly.transports import websocket
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Json, Peer, bare, ws_frame

PUSHES = ["status_report", "event_report", "log_report", "visit_notification"]


async def told(app: Peer, count: int) -> list[Json]:
    return [await app.hear() for _ in range(count)]


@pytest.mark.parametrize("type", PUSHES)
async def test_a_push_reaches_every_app_that_may_hear_it(local: HubUnderTest, type: str) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone, local.join("tablet") as tablet:
        await lock.say(type, data={"n": [1, None, "é"]}, **{"from": "lamp", "cursor": 99})
        for app in (phone, tablet):
            push = await app.hear()
            assert (push["type"], push["from"], push["data"]) == (type, "lock", {"n": [1, None, "é"]})
            assert "seq_id" not in push
        assert phone.heard[-1]["cursor"] == tablet.heard[-1]["cursor"] != 99
        assert await lock.hears_nothing(0.05), "a push is not answered"


async def test_cursors_count_up_by_one_per_device(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("lamp") as lamp, local.join("phone") as phone:
        phone.presence = True
        before = phone.heard[0]["cursors"]
        for n in range(50):
            await lock.say("event_report", data=n)
            await lamp.say("log_report", data=n)
        seen: dict[str, list[Json]] = {"lock": [], "lamp": []}
        while any(not pushes or pushes[-1]["data"] != 49 for pushes in seen.values()):
            push = await phone.hear()
            seen[push["from"]].append(push)
        for device, pushes in seen.items():
            first = before[device] + 1
            assert [p["cursor"] for p in pushes] == list(range(first, first + len(pushes)))
            assert [p["data"] for p in pushes if p["type"] != "device_status"] == list(range(50))


async def test_an_app_that_was_away_gets_what_it_missed_also_after_a_restart(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        async with local.join("phone") as phone:
            await lock.say("event_report", data="seen")
            seen = (await phone.hear())["cursor"]
        for n in range(250):  # more than one page
            await lock.say("event_report", data=n)
        async with local.join("phone", {"lock": seen}) as phone:
            missed = await told(phone, 250)
            assert [push["data"] for push in missed] == list(range(250))
            await lock.say("event_report", data="now")
            assert (await phone.hear())["data"] == "now"
    await local.restart()
    async with local.join("phone", {"lock": seen}) as phone:
        assert [push["cursor"] for push in await told(phone, 251)] == [
            *(push["cursor"] for push in missed), missed[-1]["cursor"] + 1,
        ]  # fmt: skip


async def test_without_a_cursor_an_app_starts_now(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("tablet") as witness:
        await lock.say("event_report", data="before")
        cursor = (await witness.hear())["cursor"]
        async with local.join("phone") as phone:
            assert phone.heard[0]["cursors"] == {"lock": cursor, "lamp": 0}
            await lock.say("event_report", data="after")
            assert (await phone.hear())["data"] == "after"


@pytest.mark.parametrize("cursor", [0, -1, -(2**80), 2**80])
async def test_a_cursor_may_be_anything(local: HubUnderTest, cursor: int) -> None:
    """The beginning is the beginning, and not a gap; nobody has seen the future."""
    async with local.join("lock") as lock, local.join("tablet") as witness:
        await lock.say("event_report", data="first")
        await witness.hear()
        async with local.join("phone", {"lock": cursor, "nobody": 3}) as phone:
            if cursor <= 0:
                assert (await phone.hear())["data"] == "first"
            await lock.say("event_report", data="second")
            assert (await phone.hear())["data"] == "second"


async def test_a_gap_is_told(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("tablet") as witness:
        for n in range(10):
            await lock.say("event_report", data=n)
        pushes = await told(witness, 10)
        await local.hub.ledger.trim("push/lock", pushes[6]["cursor"])
        async with local.join("phone", {"lock": pushes[2]["cursor"]}) as phone:
            assert await phone.hear() == {
                "type": "gap", "from": "lock", "after": pushes[2]["cursor"], "first": pushes[7]["cursor"],
            }  # fmt: skip
            assert await told(phone, 3) == pushes[7:]
        async with local.join("phone", {"lock": pushes[6]["cursor"]}) as phone:
            assert await told(phone, 3) == pushes[7:], "what it had seen is no gap"


async def test_an_app_that_comes_and_goes_misses_nothing_and_hears_everything_in_order(
    local: HubUnderTest,
) -> None:
    """While pushes stream in, catching up and hearing live must not overtake each other."""

    async def stream(device: Peer) -> None:
        for n in range(1_500):
            await device.say("event_report", data=n)

    seen: list[int] = []
    async with local.join("lock") as lock:
        async with local.join("phone") as phone:
            cursor = phone.heard[0]["cursors"]["lock"]
        streaming = asyncio.create_task(stream(lock))
        while not seen or seen[-1] != 1_499:
            async with local.join("phone", {"lock": cursor}) as phone:
                phone.presence = True
                for _ in range(40):
                    push = await phone.hear()
                    assert push["cursor"] == cursor + 1
                    cursor = push["cursor"]
                    if push["type"] == "event_report":
                        seen.append(push["data"])
                    if push["data"] == 1_499:
                        break
        await streaming
    assert seen == list(range(1_500))


async def test_device_status_when_a_device_comes_and_goes(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        phone.presence = True
        async with local.join("lock"):
            online = await phone.hear()
            assert (online["type"], online["from"], online["data"]) == (
                "device_status",
                "lock",
                {"online": True},
            )
        offline = await phone.hear()
        assert (offline["data"], offline["cursor"]) == ({"online": False}, online["cursor"] + 1)


async def test_device_status_is_quiet_while_a_device_replaces_its_connection(local: HubUnderTest) -> None:
    async with local.join("phone") as phone, AsyncExitStack() as connections:
        phone.presence = True
        for _ in range(3):
            await connections.enter_async_context(local.join("lock"))
        assert (await phone.hear())["data"] == {"online": True}
        await connections.aclose()
        assert (await phone.hear())["data"] == {"online": False}
        assert await phone.hears_nothing()


async def test_device_status_when_a_device_falls_silent(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "HEARTBEAT_SECONDS", 0.2)
    async with local.join("phone") as phone:
        phone.presence = True
        async with bare(local.url) as device:  # answers no ping
            await device.upgrade(local.url)
            token = local.tokens["lock"]
            await device.send(ws_frame(b'{"type":"auth","token":"%b"}' % token.encode()))
            assert (await phone.hear())["data"] == {"online": True}
            assert (await phone.hear())["data"] == {"online": False}


async def test_only_the_hub_makes_device_status(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        await lock.say("device_status", data={"online": False})
        assert (await lock.hear())["code"] == 2
        await lock.say("event_report", data="after it")
        assert (await phone.hear())["data"] == "after it"
        said = [frame["data"] for frame in phone.heard if frame["type"] == "device_status"]
        assert {"online": False} not in said
