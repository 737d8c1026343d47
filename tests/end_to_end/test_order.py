"""Ordered control on the wire: off, on, off, on, in every order the network can make of it.

The law: the lamp ends as its remote meant it. `latest` may skip, `replay` shows every state in order; whoever
was overtaken is told.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Json, Peer
from tests.stopwatch import Stopwatch

STATES = ["off", "on", "off", "on"]


async def press(remote: Peer, ids: list[str], mode: str, order: tuple[int, ...]) -> None:
    """Four commands that arrive in this order."""
    for n in order:
        await remote.command(
            "lamp", "dev_control", seq_id=ids[n], data=[n, STATES[n]], order={"key": "power", "mode": mode}
        )


async def shine(lamp: Peer, remote: Peer, ids: list[str]) -> tuple[list[int], dict[str, str]]:
    """What the lamp shows, and what the remote is told of each, until all four have ended."""
    shown: list[int] = []
    ends: dict[str, str] = {}
    while len(ends) < len(ids):
        frame = await remote.hear()
        if frame["type"] == "ack" and frame["seq_id"] in ids:
            ends[frame["seq_id"]] = frame["state"]
    shown = [frame["data"][0] for frame in lamp.heard if frame.get("seq_id") in ids]
    return shown, ends


@pytest.mark.parametrize("mode", ["latest", "replay"])
async def test_all_24_orders_end_in_the_right_state(open_local: Open, mode: str) -> None:
    local = await open_local(window=2)
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        glowing = asyncio.create_task(lamp.obey_all())
        took = Stopwatch()
        for order in itertools.permutations(range(4)):
            ids = [remote.ids() for _ in range(4)]
            await press(remote, ids, mode, order)
            shown, ends = await shine(lamp, remote, ids)
            assert shown[-1] == 3, f"{order} ended {STATES[shown[-1]]}"
            assert shown == sorted(shown), f"{order} was shown as {shown}"
            if mode == "replay":
                assert shown == [0, 1, 2, 3], order
            told = {n: ends[ids[n]] for n in range(4)}
            assert told == {n: "done" if n in shown else "superseded" for n in range(4)}, order
        glowing.cancel()
        assert took.seconds < 10, "what is complete goes at once: 24 windows would be 48 s"


@pytest.mark.parametrize("mode", ["latest", "replay"])
async def test_only_a_gap_waits_and_only_so_long(local: HubUnderTest, mode: str) -> None:
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        ids = [remote.ids() for _ in range(3)]
        await press(remote, ids, mode, (0,))
        await lamp.obey()
        took = Stopwatch()
        await press(remote, ids, mode, (2,))
        assert (await lamp.obey())["seq_id"] == ids[2]
        assert took.wall > 0.25
        assert took.seconds < 2
        await press(remote, ids, mode, (1,))  # it comes after all, too late
        late = await remote.first(lambda f: f["seq_id"] == ids[1] and f["type"] == "ack")
        assert late["state"] == "superseded"
        assert late["code"] != 0, "simple apps read the code alone"
        assert await lamp.hears_nothing()


async def test_a_superseded_sender_that_asks_again_hears_the_same(local: HubUnderTest) -> None:
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        ids = [remote.ids() for _ in range(2)]
        await press(remote, ids, "latest", (1,))
        await lamp.obey()
        for attempt in range(2):
            await press(remote, ids, "latest", (0,))
            said = await remote.first(lambda f: f["seq_id"] == ids[0] and f["type"] == "server_ack")
            assert said["code"] == (0 if attempt == 0 else 5)
            end = await remote.first(lambda f: f["seq_id"] == ids[0] and f["type"] == "ack")
            assert end["state"] == "superseded"


async def test_order_keys_and_devices_do_not_wait_for_each_other(open_local: Open) -> None:
    local = await open_local(window=4)
    async with local.join("lamp") as lamp, local.join("lock") as lock, local.join("phone") as remote:
        took = Stopwatch()
        for n in range(10):
            to = "lamp" if n % 2 else "lock"
            await remote.command(to, "dev_control", data=n, order={"key": f"k{n % 3}", "mode": "latest"})
        assert [(await lamp.obey())["data"] for _ in range(5)] == [1, 3, 5, 7, 9]
        assert [(await lock.obey())["data"] for _ in range(5)] == [0, 2, 4, 6, 8]
        assert took.seconds < 3, "numbers that went remote are no gap"


async def test_when_a_device_comes_back_it_gets_the_latest_which_then_supersedes_the_others(
    local: HubUnderTest,
) -> None:
    async with local.join("phone") as remote:
        ids = [
            await remote.command(
                "lamp", "dev_control", data=n, queue=True, order={"key": "power", "mode": "latest"}
            )
            for n in range(4)
        ]
        for id_ in ids:
            assert (await remote.hear_of(id_))["code"] == 0
        assert await remote.hears_nothing(), "the newer one only waits, too: nothing is superseded yet"
        async with local.join("lamp") as lamp:
            assert (await lamp.obey())["data"] == 3
            assert await lamp.hears_nothing()
        ends: list[Json] = [await remote.first(lambda f: f["type"] == "ack") for _ in range(4)]
        told = {end["seq_id"]: end["state"] for end in ends}
        assert told == dict.fromkeys(ids[:3], "superseded") | {ids[3]: "done"}


@pytest.mark.parametrize("mode", ["latest", "replay"])
async def test_the_high_water_mark_survives_a_restart(local: HubUnderTest, mode: str) -> None:
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        ids = [remote.ids() for _ in range(6)]
        for n in (0, 3):
            await remote.command(
                "lamp", "dev_control", seq_id=ids[n], data=n, order={"key": "power", "mode": mode}
            )
            await lamp.obey()
        await remote.first(lambda f: f["type"] == "ack" and f["seq_id"] == ids[3])
    await local.restart()
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        for n in (2, 1):
            await remote.command(
                "lamp", "dev_control", seq_id=ids[n], data=n, order={"key": "power", "mode": mode}
            )
            assert (await remote.hear_of(ids[n]))["code"] == 0
            end = await remote.hear_of(ids[n])
            assert end["state"] == "superseded"
        await remote.command(
            "lamp", "dev_control", seq_id=ids[4], data=4, order={"key": "power", "mode": mode}
        )
        assert (await lamp.obey())["data"] == 4


async def test_a_sender_that_lost_its_counter_starts_over(local: HubUnderTest) -> None:
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        for _ in range(3):
            await remote.command("lamp", "dev_control", order={"key": "power", "mode": "latest"})
            await lamp.obey()
        now = time.time_ns() // 1_000_000 + 1
        await remote.command(
            "lamp", "dev_control", seq_id=f"{now}_0", order={"key": "power", "mode": "latest"}
        )
        assert (await lamp.obey())["seq_id"] == f"{now}_0"


async def test_a_late_one_goes_before_a_later_one_that_still_waits_for_its_device(
    local: HubUnderTest,
) -> None:
    async with local.join("phone") as remote:
        ids = [remote.ids() for _ in range(3)]
        for n in (0, 2):
            await remote.command("lamp", "dev_control", seq_id=ids[n], data=n, queue=True)
        await asyncio.sleep(0.4)  # the window is over: 1 is late
        await remote.command("lamp", "dev_control", seq_id=ids[1], data=1, queue=True)
        assert [(await remote.hear_of(id_))["code"] for id_ in ids] == [0, 0, 0]
        assert await remote.hears_nothing(), "nothing has ended"
        async with local.join("lamp") as lamp:
            assert [(await lamp.obey())["data"] for _ in range(3)] == [0, 1, 2]


async def test_a_late_one_goes_if_the_later_one_has_failed(local: HubUnderTest) -> None:
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        ids = [remote.ids() for _ in range(3)]
        await remote.command("lamp", "dev_control", seq_id=ids[0])
        await lamp.obey()
        await remote.command("lamp", "dev_control", seq_id=ids[2])
        await lamp.obey(code=3)
        await remote.first(lambda f: f["type"] == "ack" and f["state"] == "failed")
        await remote.command("lamp", "dev_control", seq_id=ids[1])
        assert (await lamp.obey())["seq_id"] == ids[1]
        assert (await remote.first(lambda f: f["type"] == "ack" and f["seq_id"] == ids[1]))["state"] == "done"


async def test_a_late_one_that_has_only_its_time_goes_if_the_later_one_has_failed(
    local: HubUnderTest,
) -> None:
    """`{ms}_0` every time."""
    async with local.join("lamp") as lamp, local.join("phone") as remote:
        now = time.time_ns() // 1_000_000
        ids = [f"{now - 400 + 100 * n}_0" for n in range(4)]
        power = {"key": "power", "mode": "replay"}
        for n, code in ((1, 0), (3, 3)):
            await remote.command("lamp", "dev_control", seq_id=ids[n], order=power)
            await lamp.obey(code=code)
        await remote.first(lambda f: f["type"] == "ack" and f["state"] == "failed")
        await remote.command("lamp", "dev_control", seq_id=ids[2], order=power)
        assert (await lamp.obey())["seq_id"] == ids[2]
        await remote.command("lamp", "dev_control", seq_id=ids[0], order=power)
        end = await remote.first(lambda f: f["type"] == "ack" and f["seq_id"] == ids[0])
        assert end["state"] == "superseded", "a later one is done"
