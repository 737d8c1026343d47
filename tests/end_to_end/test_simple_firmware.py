"""Firmware as simple as the documents describe it: no `to`, no memory, slow motors."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from duly.identity.accounts import Role
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Json, Peer, curl
from tests.stopwatch import Stopwatch


async def bare_ack(lock: Peer, command: Json, code: int = 0, **fields: object) -> None:
    await lock.say("ack", seq_id=command["seq_id"], code=code, **fields)


# ── whom it answers ──────────────────────────────────────────────────────────────────────────────


async def test_an_ack_without_to_answers_the_one_command_of_that_id(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        for _ in range(3):
            seq_id = await phone.command("lock")
            await bare_ack(lock, await lock.hear())
            assert [(await phone.hear_of(seq_id))["code"] for _ in range(2)] == [0, 0]
            assert await local.state("phone", seq_id) == "done"


async def test_an_ack_without_to_is_refused_if_two_apps_use_that_id(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone, local.join("tablet") as tablet:
        seq_id = await phone.command("lock")
        await tablet.command("lock", seq_id=seq_id)
        commands = [await lock.hear(), await lock.hear()]
        await bare_ack(lock, commands[0])
        said = await lock.hear_of(seq_id)
        assert (said["type"], said["code"]) == ("server_ack", 2)
        assert await local.state("phone", seq_id) == "sent"
        assert await local.state("tablet", seq_id) == "sent"
        await lock.ack(commands[0])
        first, second = (phone, tablet) if commands[0]["from"] == "phone" else (tablet, phone)
        await first.first(lambda f: f["type"] == "ack")
        await bare_ack(lock, commands[1])  # now it is the only one
        await second.first(lambda f: f["type"] == "ack")


async def test_an_ack_without_to_of_nothing_is_refused_and_recorded(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        await lock.say("ack", seq_id="1702234567890_0", code=0)
        assert (await lock.hear_of("1702234567890_0"))["code"] == 2
    assert ("lock", "malformed") in await local.refused()


async def test_a_late_ack_without_to_settles_what_is_unknown(hasty: HubUnderTest) -> None:
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        first = await phone.command("lock")
        await bare_ack(lock, await lock.hear())
        assert [(await phone.hear_of(first))["code"] for _ in range(2)] == [0, 0]
        seq_id = await phone.command("lock")
        command = await lock.hear()
        assert (await phone.hear_of(seq_id))["code"] == 0
        assert (await phone.hear_of(seq_id))["state"] == "unknown"
        await bare_ack(lock, command)
        assert (await phone.hear_of(seq_id))["state"] == "done"


async def test_the_first_ack_without_to_of_a_device_may_be_a_late_one(hasty: HubUnderTest) -> None:
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        seq_id = await phone.command("lock")
        command = await lock.hear()
        assert (await phone.hear_of(seq_id))["code"] == 0
        assert (await phone.hear_of(seq_id))["state"] == "unknown"
        await bare_ack(lock, command)
        assert (await phone.hear_of(seq_id))["state"] == "done"
        assert await hasty.state("phone", seq_id) == "done"


# ── a device without a memory ────────────────────────────────────────────────────────────────────


async def naive(local: HubUnderTest) -> None:
    local.tokens["naive"] = await local.hub.accounts.add(Role.DEVICE, "naive", once=True)
    await local.hub.accounts.grant("phone", "naive")


async def test_a_device_without_memory_is_sent_each_command_once(open_local: Open) -> None:
    local = await open_local(patience=4.5)
    await naive(local)
    async with local.join("naive") as motor, local.join("phone") as phone:
        seq_id = await phone.command("naive")
        command = await motor.hear()
        with pytest.raises(TimeoutError):
            await motor.hear(4)  # a hub that repeats does so after 3 s
        await bare_ack(motor, command)
        assert (await phone.hear_of(seq_id))["code"] == 0
        assert (await phone.hear_of(seq_id))["state"] == "done"


@pytest.mark.parametrize("how", ["the device reconnects", "the hub restarts"])
async def test_what_was_sent_to_it_once_is_unknown_at_the_deadline_and_never_sent_again(
    open_local: Open, how: str
) -> None:
    local = await open_local(patience=1.5)
    await naive(local)
    async with local.join("phone") as phone, local.join("naive") as motor:
        seq_id = await phone.command("naive")
        command = await motor.hear()
    if how == "the hub restarts":
        await local.restart()
    async with local.join("naive") as motor, local.join("phone") as phone:
        with pytest.raises(TimeoutError):
            await motor.hear(2.5)
        await local.reaches("phone", seq_id, "unknown")
        await motor.ack(command)
        ack = await phone.first(lambda f: f["type"] == "ack" and f["state"] == "done")
        assert ack["seq_id"] == seq_id


# ── slow work ────────────────────────────────────────────────────────────────────────────────────


async def test_a_device_at_work_is_not_sent_it_again_and_not_given_up(open_local: Open) -> None:
    local = await open_local(patience=2)
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock")
        command = await lock.hear()
        assert (await phone.hear_of(seq_id))["code"] == 0
        for percent in (20, 40, 60, 80):
            await lock.say("ack", seq_id=seq_id, to="phone", state="delivered", progress=percent)
            told = await phone.hear_of(seq_id)
            assert (told["type"], told["state"], told["progress"], told["from"]) == (
                "ack", "delivered", percent, "lock",
            )  # fmt: skip
            assert "code" not in told, "it has not ended"
            assert await local.state("phone", seq_id) == "delivered"
            assert await lock.hears_nothing(1)
        await lock.ack(command)
        assert (await phone.hear_of(seq_id))["state"] == "done"


async def test_who_says_working_and_then_nothing_is_unknown_at_the_new_deadline(hasty: HubUnderTest) -> None:
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        seq_id = await phone.command("lock")
        await lock.hear()
        await lock.say("ack", seq_id=seq_id, state="delivered")
        states = [(await phone.hear_of(seq_id)).get("state") for _ in range(3)]
        assert states == [None, "delivered", "unknown"]


async def test_working_on_nothing_is_refused(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("lamp") as lamp, local.join("phone") as phone:
        seq_id = await phone.command("lock")
        await lock.hear()
        await lamp.say("ack", seq_id=seq_id, to="phone", state="delivered")
        assert (await lamp.hear_of(seq_id))["code"] == 2
        assert await local.state("phone", seq_id) == "sent"


async def test_a_command_may_say_how_long_its_device_may_take(hasty: HubUnderTest) -> None:
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        slow = await phone.command("lock", timeout=2_500)
        took = Stopwatch()
        heard = await lock.hear()
        assert heard["timeout"] == 2_500
        assert (await phone.hear_of(slow))["code"] == 0
        assert (await phone.hear_of(slow))["state"] == "unknown"
        assert took.wall > 2.3
        assert took.seconds < 5
        patient = await phone.command("lock", timeout=5_000)
        command = await lock.hear()
        await asyncio.sleep(0.6)
        await lock.ack(command)
        assert [(await phone.hear_of(patient)).get("state") for _ in range(2)] == [None, "done"]


async def test_firmware_that_fills_in_a_code_while_it_is_at_work_has_not_ended(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock")
        command = await lock.hear()
        assert (await phone.hear_of(seq_id))["code"] == 0
        await bare_ack(lock, command, state="delivered", progress=50)
        assert (await phone.hear_of(seq_id))["state"] == "delivered"
        assert await local.state("phone", seq_id) == "delivered"
        await bare_ack(lock, command, 3)
        assert (await phone.hear_of(seq_id))["state"] == "failed"


async def test_who_waits_by_http_waits_for_the_end_not_for_progress(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        body = {"type": "query", "seq_id": "slow-1", "to": "lock"}
        asked = asyncio.create_task(curl(f"{local.url}/v1/messages?wait=5", local.tokens["phone"], body=body))
        command = await lock.hear()
        await lock.say("ack", seq_id="slow-1", to="phone", state="delivered", progress=50)
        await lock.ack(command, data={"open": True})
        answer = await asked
        assert (answer.status, answer.json["ack"]["state"]) == (200, "done")


# ── ids without a counter ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lane", ["power", ""])
async def test_ids_of_time_alone_are_shown_in_order_whatever_order_they_come_in(
    local: HubUnderTest, lane: str
) -> None:
    shown: list[int] = []

    async def glow(lamp: Peer) -> None:
        while True:
            shown.append((await lamp.obey())["data"])

    async with local.join("lamp") as lamp, local.join("phone") as phone:
        glowing = asyncio.create_task(glow(lamp))
        made = time.time_ns() // 1_000_000
        if not lane:  # without a name, only what follows closely on another is sorted
            await phone.command("lamp", seq_id=f"{made}_0", data=-1)
        for arrival in itertools.permutations(range(4)):
            made = max(made + 10, time.time_ns() // 1_000_000)
            ids = [f"{made + n}_0" for n in range(4)]
            made += 4
            order: dict[str, Any] = {"order": {"key": lane, "mode": "replay"}} if lane else {}
            for n in arrival:
                await phone.command("lamp", seq_id=ids[n], data=n, **order)
            ends = [await phone.first(lambda f: f["type"] == "ack") for _ in range(4)]
            if -1 in shown:
                ends.append(await phone.first(lambda f: f["type"] == "ack"))
                shown.remove(-1)
            assert {end["state"] for end in ends} == {"done"}, arrival
            assert shown == [0, 1, 2, 3], arrival
            shown.clear()
        glowing.cancel()


async def test_a_sender_that_counts_after_all_does_not_wait_the_window_out(open_local: Open) -> None:
    local = await open_local(window=4)
    async with local.join("lamp") as lamp, local.join("phone") as phone:
        took = Stopwatch()
        for n in range(3):
            await phone.command("lamp", data=n, order={"key": "power", "mode": "replay"})
        assert [(await lamp.obey())["data"] for _ in range(3)] == [0, 1, 2]
        assert took.seconds < 3
