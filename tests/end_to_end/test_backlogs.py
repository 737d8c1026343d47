"""Backlogs larger than any queue are delivered, by windows of what is unacknowledged.

The law: a device that comes back gets everything that waits for it, in order, and an app everything it
missed; neither is hung up on for it. Only what stands still is. What is no longer allowed is cancelled, and
the sender told; what one app has waiting is bounded, and delays nobody else.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from duly.identity.accounts import Principal, Role
from duly.transports import websocket
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Ids, Json, Peer, curl
from tests.end_to_end.test_stalled import deaf, served


async def queue(app: Peer, count: int, size: int, to: str = "lock") -> list[str]:
    """Commands that wait for a device that is away; their ids."""
    exp, data = int((time.time() + 600) * 1000), "x" * size
    ids = [await app.command(to, data=data, queue=True, exp=exp) for _ in range(count)]
    for seq_id in ids:
        assert (await app.hear_of(seq_id))["code"] == 0
    return ids


async def obey(device: Peer, count: int) -> list[str]:
    return [(await device.obey())["seq_id"] for _ in range(count)]


@pytest.mark.parametrize(("count", "size"), [(70, 250_000), (3_000, 10)])
async def test_a_device_gets_a_backlog_larger_than_its_window(
    local: HubUnderTest, count: int, size: int
) -> None:
    async with local.join("phone", max_msg_size=0) as phone:
        ids = await queue(phone, count, size)
        async with local.join("lock", max_msg_size=0) as lock:
            assert await obey(lock, count) == ids
        for seq_id in ids:
            assert (await phone.hear_of(seq_id))["state"] == "done"


async def test_eleven_thousand_small_commands(open_local: Open) -> None:
    local = await open_local(max_queued=20_000)
    async with local.join("phone") as phone:
        ids = await queue(phone, 11_000, 10)
        async with local.join("lock") as lock:
            assert await obey(lock, len(ids)) == ids


async def test_no_more_than_the_window_is_unacknowledged(local: HubUnderTest) -> None:
    window = local.hub.gateway.policy.ahead.frames
    async with local.join("phone") as phone, local.join("lock") as lock:
        ids = [await phone.command("lock") for _ in range(window + 5)]
        heard = [await lock.hear() for _ in range(window)]
        assert [frame["seq_id"] for frame in heard] == ids[:window]
        assert await lock.hears_nothing()
        assert await local.state("phone", ids[-1]) == "accepted", "what waits has not been sent"
        await lock.ack(heard[0])
        assert (await lock.hear())["seq_id"] == ids[window]


async def test_a_deadline_counts_from_delivery_and_an_end_makes_room(open_local: Open) -> None:
    """A device that answers nothing: each window ends as unknown in its own time, and what waited expires."""
    local = await open_local(patience=2)
    window = local.hub.gateway.policy.ahead.frames
    async with local.join("phone") as phone, local.join("lock") as lock:
        ids = [await phone.command("lock") for _ in range(window)]
        waiting = await phone.command("lock")
        # Stored before it expires, also on a busy machine, and expired before the first one is given up.
        soon = await phone.command("lock", exp=int(time.time() * 1000) + 1_000)
        for _ in ids:
            await lock.hear()
        assert (await phone.first(lambda f: f["type"] == "ack" and f["seq_id"] == soon))["state"] == "expired"
        assert (await phone.first(lambda f: f["type"] == "ack"))["state"] == "unknown"
        frame = await lock.first(lambda f: f["seq_id"] == waiting)
        await lock.ack(frame)
        done = await phone.first(lambda f: f["type"] == "ack" and f["seq_id"] == waiting)
        assert done["state"] == "done"


async def test_lanes_take_turns(local: HubUnderTest) -> None:
    """A lane with a long queue does not keep another waiting until it is empty."""
    window = local.hub.gateway.policy.ahead.frames
    async with local.join("phone") as phone, local.join("tablet") as tablet, local.join("lock") as lock:
        for _ in range(2 * window):
            await phone.command("lock")
        await lock.hear()
        other = await tablet.command("lock", order={"key": "other", "mode": "latest"})
        assert (await tablet.hear_of(other))["code"] == 0
        heard = [await lock.hear() for _ in range(window - 1)]
        for frame in heard[:2]:
            await lock.ack(frame)
        assert other in [(await lock.hear())["seq_id"] for _ in range(2)]


async def test_an_app_catches_up_on_more_than_any_queue_holds(local: HubUnderTest) -> None:
    async with local.join("lock", max_msg_size=0) as lock, local.join("tablet", max_msg_size=0) as witness:
        for n in range(100):
            await lock.say("event_report", data=[n, "x" * 200_000])
            assert (await witness.hear())["data"][0] == n
        first = witness.heard[1]["cursor"]
        async with local.join("phone", {"lock": first - 1}, max_msg_size=0) as phone:
            await asyncio.sleep(0.2)  # it does not read for a while, which is no reason to hang up
            assert [(await phone.hear())["data"][0] for _ in range(100)] == list(range(100))
            await lock.say("event_report", data=["live"])
            assert (await phone.hear())["data"] == ["live"]


async def test_an_app_that_reads_slowly_is_waited_for(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is congested for much longer than a socket may stand still, but it moves."""
    monkeypatch.setattr(websocket, "STILL_SECONDS", 2.0)
    async with local.join("lock", max_msg_size=0) as lock, local.join("tablet", max_msg_size=0) as witness:
        for n in range(120):
            await lock.say("event_report", data=[n, "x" * 200_000])
            await witness.hear()
        async with local.join("phone", {"lock": 0}, max_msg_size=0) as phone:
            for n in range(120):
                assert (await phone.hear())["data"][0] == n
                await asyncio.sleep(0.02)


async def test_a_socket_that_stands_still_is_hung_up_on(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "STILL_SECONDS", 0.3)
    async with AsyncExitStack() as stack:
        names = ("lamp", "lock", "phone")
        lamp, lock, phone = [await stack.enter_async_context(local.join(name)) for name in names]
        async with deaf(local.url, local.tokens["tablet"]):
            await local.until(lambda: "tablet" in local.hub.gateway.sessions.apps)
            for n in range(400):
                await lamp.say("event_report", data=[n, "x" * 20_000])
                await phone.first(lambda f: f["type"] == "event_report")
            await local.until(lambda: "tablet" not in local.hub.gateway.sessions.apps)
            await served(phone, lock)


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("settings", [{"max_queued": 5}, {"max_queued_bytes": 500}])
async def test_what_an_app_has_waiting_is_bounded(open_local: Open, settings: dict[str, int]) -> None:
    local = await open_local(**settings)
    exp = int((time.time() + 600) * 1000)
    async with local.join("phone") as phone, local.join("lamp") as lamp:
        ids = [await phone.command("lock", queue=True, exp=exp, data="x" * 98) for _ in range(6)]
        answers = [await phone.hear_of(seq_id) for seq_id in ids]
        assert [answer["code"] for answer in answers] == [0] * 5 + [4]
        assert answers[5]["error"] == "rate_limited"
        assert answers[5]["retry_after"] > 0
        assert ("phone", "rate_limited") in await local.refused()
        again = await phone.command("lock", seq_id=ids[0], queue=True, exp=exp, data="x" * 98)
        assert (await phone.hear_of(again))["code"] == 5, "a repeat is answered all the same"
        other = await phone.command("lamp")
        assert (await lamp.obey())["seq_id"] == other, "what need not wait is done"
        async with local.join("lock") as lock:
            await obey(lock, 5)
            assert (await phone.hear_of(ids[4]))["state"] == "done"
        after = await phone.command("lock", seq_id=ids[5], queue=True, exp=exp, data="x" * 98)
        assert (await phone.hear_of(after))["code"] == 0, "a refused id is not burned"


@pytest.mark.parametrize("settings", [{"max_queued": 20}, {"max_queued_bytes": 2_000}])
async def test_one_app_does_not_fill_a_device_for_another(open_local: Open, settings: dict[str, int]) -> None:
    local = await open_local(**settings)
    exp = int((time.time() + 600) * 1000)

    async def codes(app: Peer, count: int) -> list[int]:
        ids = [await app.command("lock", queue=True, exp=exp, data="x" * 98) for _ in range(count)]
        return [(await app.hear_of(seq_id))["code"] for seq_id in ids]

    async with local.join("phone") as phone, local.join("tablet") as tablet:
        assert await codes(phone, 22) == [0] * 20 + [4] * 2
        assert await codes(tablet, 3) == [0] * 2 + [4], "a tenth of what may wait is open to each"
        assert ("tablet", "rate_limited") in await local.refused()


@pytest.mark.parametrize("query", ["", "?wait=1"])
async def test_by_http_who_asks_too_much_is_told_when_to_come_back(open_local: Open, query: str) -> None:
    """429 with Retry-After, the seconds in the body, and the id that is refused."""
    local = await open_local(max_queued=1)
    ids, exp = Ids(), int((time.time() + 600) * 1000)
    bodies = [
        {"type": "lock_control", "seq_id": ids(), "to": "lock", "queue": True, "exp": exp} for _ in range(2)
    ]
    url, token = f"{local.url}/v1/messages", local.tokens["phone"]
    assert (await curl(url, token, body=bodies[0])).status == 202
    refused = await curl(f"{url}{query}", token, body=bodies[1])
    assert (refused.status, refused.json["error"]) == (429, "rate_limited")
    assert refused.json["seq_id"] == bodies[1]["seq_id"]
    assert int(refused.headers["retry-after"]) >= refused.json["retry_after"] > 0


async def test_quotas_hold_after_a_restart(open_local: Open) -> None:
    local = await open_local(max_queued=3)
    exp = int((time.time() + 600) * 1000)
    async with local.join("phone") as phone:
        await queue(phone, 3, 10)
    await local.restart()
    async with local.join("phone") as phone:
        seq_id = await phone.command("lock", queue=True, exp=exp)
        assert (await phone.hear_of(seq_id))["error"] == "rate_limited"


# ── permission ───────────────────────────────────────────────────────────────────────────────────


async def administer(local: HubUnderTest, verb: str, **wanted: str) -> None:
    await local.hub.admin.run(Principal("root", Role.ADMIN), verb, wanted)


async def cancelled(app: Peer, seq_id: str) -> Json:
    ack = await app.first(lambda f: f.get("seq_id") == seq_id and f["type"] == "ack")
    assert ack["state"] == "cancelled", ack
    return ack


async def test_a_command_is_not_sent_after_its_grant_was_revoked(local: HubUnderTest) -> None:
    async with local.join("phone") as phone, local.join("tablet") as tablet:
        (lost,) = await queue(phone, 1, 10)
        (kept,) = await queue(tablet, 1, 10)
        await administer(local, "revoke", app="phone", device="lock")
        ack = await cancelled(phone, lost)
        assert ack["code"] != 0
        assert "no longer" in ack["detail"]
        async with local.join("lock") as lock:
            assert (await lock.obey())["seq_id"] == kept
            assert await lock.hears_nothing()


async def test_permission_is_judged_at_transmission_too(local: HubUnderTest) -> None:
    """Revoked where this hub does not see it at once: it is judged when the device comes."""
    async with local.join("phone") as phone:
        (lost,) = await queue(phone, 1, 10)
        await local.hub.accounts.revoke("phone", "lock")
        async with local.join("lock") as lock:
            assert "no longer" in (await cancelled(phone, lost))["detail"]
            assert await lock.hears_nothing()


@pytest.mark.parametrize("gone", ["phone", "lock"])
async def test_removing_an_app_or_a_device_cancels_what_is_queued(local: HubUnderTest, gone: str) -> None:
    async with local.join("phone") as phone:
        (lost,) = await queue(phone, 1, 10)
        await administer(local, "remove", name=gone)
        await local.until(lambda: not local.hub.gateway._inbox.live)
        assert await local.state("phone", lost) == "cancelled"
        if gone == "lock":
            await cancelled(phone, lost)
    token = await local.hub.accounts.add(Role.APP if gone == "phone" else Role.DEVICE, gone)
    local.tokens[gone] = token
    await local.hub.accounts.grant("phone", "lock")
    async with local.join("lock") as lock:
        assert await lock.hears_nothing(), "who has the name now did not ask for it"


async def test_a_command_is_not_sent_again_after_its_grant_was_revoked(open_local: Open) -> None:
    """It may have taken effect, so it is not called cancelled: the device's answer still counts."""
    local = await open_local(patience=30)
    async with local.join("phone") as phone:
        async with local.join("lock") as lock:
            seq_id = await phone.command("lock")
            command = await lock.hear()
            await local.hub.accounts.revoke("phone", "lock")
        async with local.join("lock") as lock:
            await lock.ack(command)
            ack = await phone.first(lambda f: f.get("seq_id") == seq_id and f["type"] == "ack")
            assert ack["state"] == "done"


async def test_an_exp_too_far_away_is_refused(open_local: Open) -> None:
    local = await open_local(max_exp=3600)
    async with local.join("phone") as phone:
        for away, code in ((3_700, 2), (3_500, 0)):
            exp = int((time.time() + away) * 1000)
            answer = await phone.hear_of(await phone.command("lock", queue=True, exp=exp))
            assert answer["code"] == code
            if code:
                assert "max_exp" in answer["detail"]
