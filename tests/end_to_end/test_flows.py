"""The gateway's four flows and both tables of codes, frame by frame, and what their description leaves open.

The law: two acknowledgements, `server_ack` for "stored" and `ack` for "done"; an id is used once; and
whatever happens, the app is told how it ended.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from duly.storage.records import StreamEntry
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Ids, Peer, curl, dial
from tests.guard import GUARD
from tests.stopwatch import Stopwatch

COMMANDS = [
    "lock_control", "dev_control", "user_mgmt", "system", "face_management", "query", "media_download",
    "media_download_chunk",
]  # fmt: skip
DATA = {"open": True, "note": "Küche 🚪", "deep": [[{"n": 1.5}], None], "big": 2**63}


def ms(ahead: float = 0.0) -> int:
    return round((time.time() + ahead) * 1000)


# ── 4.1 to 4.4 ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("type", COMMANDS)
async def test_flow_1_a_command_is_stored_passed_on_done_and_reported(local: HubUnderTest, type: str) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", type, data=DATA)
        assert await phone.hear() == {"type": "server_ack", "seq_id": seq_id, "code": 0}
        passed_on = await lock.hear()
        assert (passed_on["type"], passed_on["seq_id"], passed_on["from"]) == (type, seq_id, "phone")
        assert (passed_on["to"], passed_on["data"]) == ("lock", DATA)
        await lock.ack(passed_on, 0, data={"done": DATA})
        ack = {"type": "ack", "seq_id": seq_id, "from": "lock", "code": 0, "state": "done"}
        assert await phone.hear() == ack | {"data": {"done": DATA}}


async def test_flow_2_a_repeat_is_told_how_far_the_first_has_come_and_never_runs(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", data={"open": True})
        assert (await phone.hear())["code"] == 0
        command = await lock.hear()
        await phone.command("lock", seq_id=seq_id, data={"open": True})
        assert await phone.hear() == {"type": "server_ack", "seq_id": seq_id, "code": 5, "state": "sent"}
        await lock.ack(command, data={"open": True})
        first = await phone.hear()
        await phone.command("lock", seq_id=seq_id, data={"open": True})
        assert await phone.hear() == {"type": "server_ack", "seq_id": seq_id, "code": 5, "state": "done"}
        assert await phone.hear() == first, "the stored ack follows, word for word"
        assert await lock.hears_nothing()


async def test_flow_3_an_offline_device_is_code_1_and_does_not_burn_the_id(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        seq_id = await phone.command("lock", data={"open": True})
        answer = await phone.hear()
        assert (answer["type"], answer["seq_id"], answer["code"]) == ("server_ack", seq_id, 1)
        assert answer["error"] == "offline"
        assert "offline" in answer["detail"]
        async with local.join("lock") as lock:
            await phone.command("lock", seq_id=seq_id, data={"open": True})
            assert (await phone.hear_of(seq_id))["code"] == 0
            assert (await lock.obey())["seq_id"] == seq_id
            assert (await phone.hear_of(seq_id))["state"] == "done"
    assert await local.refused() == [("phone", "offline")]


async def test_flow_4_a_resend_after_a_lost_connection_gets_the_answer(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        async with local.join("phone") as phone:
            seq_id = await phone.command("lock", data={"open": True})
            command = await lock.hear()  # the phone is gone before it hears server_ack
        await lock.ack(command)
        async with local.join("phone") as phone:
            await phone.command("lock", seq_id=seq_id, data={"open": True})
            said = await phone.hear_of(seq_id)
            while said["type"] != "ack":
                assert said["code"] == 5
                said = await phone.hear_of(seq_id)
            assert (said["code"], said["state"]) == (0, "done")
        assert await lock.hears_nothing()


async def test_an_app_that_has_reconnected_hears_the_end_without_asking(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        async with local.join("phone") as phone:
            seq_id = await phone.command("lock")
            command = await lock.hear()
        async with local.join("phone") as phone:
            await local.until(lambda: local.hub.gateway.sessions.apps.get("phone") is not None)
            await lock.ack(command)
            assert (await phone.hear_of(seq_id))["state"] == "done"


async def test_the_hub_repeats_a_command_until_the_device_answers(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", data={"open": True})
        first = await lock.hear()
        took = Stopwatch()
        assert await lock.hear() == first
        assert took.wall > 2.5
        assert took.seconds < 6
        await lock.ack(first)
        assert (await phone.hear())["code"] == 0
        assert (await phone.hear_of(seq_id))["state"] == "done"


async def test_a_device_that_comes_back_is_asked_at_once_for_what_it_did_not_answer(
    local: HubUnderTest,
) -> None:
    async with local.join("phone") as phone:
        async with local.join("lock") as lock:
            seq_id = await phone.command("lock")
            first = await lock.hear()
        async with local.join("lock") as lock:
            assert await lock.hear() == first
            await lock.ack(first)
            assert (await phone.first(lambda f: f["type"] == "ack"))["seq_id"] == seq_id


# ── the tables ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("code", range(8))
async def test_every_code_of_a_device_is_passed_on(local: HubUnderTest, code: int) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock")
        await lock.obey(code, data={"why": code}, detail="because")
        assert (await phone.hear())["code"] == 0
        ack = await phone.hear()
        assert (ack["seq_id"], ack["code"], ack["data"]) == (seq_id, code, {"why": code})
        assert ack["state"] == ("done" if code == 0 else "failed")
        await phone.command("lock", seq_id=seq_id)
        assert (await phone.hear())["code"] == 5
        assert await phone.hear() == ack, "a failure is an outcome too: the same id does not run again"


def old(seconds: float) -> str:
    return Ids(age=seconds)()


@pytest.mark.parametrize(
    ("wrong", "code", "error"),
    [
        ({"to": None}, 2, "malformed"),
        ({"seq_id": None}, 2, "malformed"),
        ({"seq_id": ""}, 2, "malformed"),
        ({"seq_id": "0001_1"}, 2, "malformed"),
        ({"seq_id": "x" * 201}, 2, "too_large"),
        ({"seq_id": lambda: old(601)}, 2, "stale"),
        ({"seq_id": lambda: old(-400)}, 2, "future"),
        ({"exp": lambda: ms(-1)}, 2, "expired"),
        ({"exp": 1_700_000_000}, 2, "malformed"),
        ({"to": "nobody"}, 3, "not_allowed"),
        ({"type": "Self-Destruct"}, 2, "malformed"),
        ({"order": {"key": "k", "mode": "backwards"}}, 2, "malformed"),
    ],
)
async def test_what_is_wrong_with_a_command_has_its_code_and_word(
    local: HubUnderTest, wrong: dict[str, Any], code: int, error: str
) -> None:
    wrong = {name: value() if callable(value) else value for name, value in wrong.items()}
    async with local.join("lock") as lock, local.join("phone") as phone:
        frame: dict[str, Any] = {"type": "lock_control", "seq_id": phone.ids(), "to": "lock"} | wrong
        await phone.say(**{name: value for name, value in frame.items() if value is not None})
        answer = await phone.hear()
        assert (answer["type"], answer["code"], answer["error"]) == ("server_ack", code, error), answer
        assert len(answer["detail"]) > 10, "a sentence says what to do"
        assert await lock.hears_nothing(0.05)
    assert [word for _, word in await local.refused()] == [error]


async def test_the_same_id_with_other_content_is_a_loud_conflict(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", data={"open": True})
        await lock.obey()
        assert (await phone.hear())["code"] == 0
        assert (await phone.hear())["state"] == "done"
        for changed in ({"data": {"open": False}}, {"type": "system", "data": {"open": True}}):
            frame = {"type": "lock_control", "seq_id": seq_id, "to": "lock"} | changed
            await phone.say(**frame)
            answer = await phone.hear()
            assert (answer["code"], answer["error"]) == (2, "id_conflict")
        assert await lock.hears_nothing()


async def test_nothing_is_heard_before_auth(local: HubUnderTest) -> None:
    async with dial(local.url) as stranger:
        await stranger.command("lock")
        answer = await stranger.hear()
        assert (answer["code"], answer["error"]) == (3, "not_authenticated")
        await stranger.closed()
    async with dial(local.url) as stranger:
        await stranger.say("auth", token="duly_nonsense")
        assert (await stranger.hear())["code"] == 3
        await stranger.closed()


async def test_a_token_may_come_in_the_header(local: HubUnderTest) -> None:
    async with dial(local.url, headers={"Authorization": f"Bearer {local.tokens['phone']}"}) as phone:
        welcome = await phone.hear()
        assert (welcome["type"], welcome["you"]) == ("welcome", "phone")
        assert abs(welcome["time"] - ms()) < 5_000


# ── who is who ───────────────────────────────────────────────────────────────────────────────────


async def test_who_sends_is_who_has_authenticated_whatever_the_frame_says(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone, local.join("tablet") as tablet:
        seq_id = await phone.command("lock", **{"from": "tablet"})
        assert (await lock.obey())["from"] == "phone"
        assert (await phone.hear())["code"] == 0
        assert (await phone.hear())["state"] == "done"
        # The tablet may use the same id: ids are unique per sender only.
        await tablet.command("lock", seq_id=seq_id)
        assert (await tablet.hear())["code"] == 0
        assert (await lock.obey())["from"] == "tablet"


async def test_a_revoked_grant_counts_at_once(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.command("lock")
        await lock.obey()
        assert (await phone.hear())["code"] == 0
        assert (await phone.hear())["state"] == "done"
        await local.hub.accounts.revoke("phone", "lock")
        await phone.command("lock")
        answer = await phone.hear()
        assert (answer["code"], answer["error"]) == (3, "not_allowed")
        await lock.say("event_report", data={"secret": True})
        assert await phone.hears_nothing(), "nor does it hear the device any more"
        assert await lock.hears_nothing()


async def test_what_is_read_for_an_app_is_not_sent_once_its_grant_is_gone(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, reading, go_on = local.hub.ledger, asyncio.Event(), asyncio.Event()
    entries = ledger.entries

    async def read_late(stream: str, after: int, limit: int = 100) -> list[StreamEntry]:
        if stream == "push/lock" and not go_on.is_set():
            reading.set()
            await go_on.wait()
        return await entries(stream, after, limit)

    async with local.join("lock") as lock, local.join("lamp"):
        monkeypatch.setattr(ledger, "entries", read_late)
        async with local.join("phone") as phone:
            await reading.wait()
            before = (await ledger.extent("push/lock")).last
            await local.hub.accounts.revoke("phone", "lock")
            await lock.say("event_report", data={"secret": True})
            async with asyncio.timeout(GUARD):
                while (await ledger.extent("push/lock")).last == before:
                    await asyncio.sleep(0.01)
            go_on.set()
            assert await phone.hears_nothing()


@pytest.mark.parametrize("name", ["lock", "phone"])
@pytest.mark.parametrize("how", ["remove", "replace"])
async def test_a_token_that_is_void_ends_the_connections_that_came_with_it(
    local: HubUnderTest, name: str, how: str
) -> None:
    """A stolen lock must not stay connected, and get the commands of the one that took its name."""
    role = "device" if name == "lock" else "app"
    verb, body = ("remove", {}) if how == "remove" else ("add", {"role": role, "replace": ""})
    async with local.join(name) as thief, local.join("lamp") as lamp, local.join("tablet") as tablet:
        done = await curl(f"{local.url}/v1/admin/{verb}", local.tokens["root"], body={"name": name} | body)
        assert done.status == 200
        await thief.closed()
        async with dial(local.url) as again:
            await again.say("auth", token=local.tokens[name])
            assert (await again.hear())["code"] == 3
        await tablet.command("lamp")
        await lamp.obey()
        assert [(await tablet.hear())["type"] for _ in range(2)] == ["server_ack", "ack"]


async def test_devices_do_not_command_and_apps_do_not_answer(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        await lock.command("lamp")
        assert (await lock.hear())["code"] == 3
        for type in ("ack", "event_report", "device_status", "watch", "server_ack", "welcome"):
            await phone.say(type, seq_id="1_1", to="phone", code=0)
            assert (await phone.hear())["code"] == 2


async def test_only_the_addressed_device_can_answer(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("lamp") as lamp, local.join("phone") as phone:
        seq_id = await phone.command("lock")
        command = await lock.hear()
        assert (await phone.hear())["code"] == 0
        await lamp.ack(command, 3)
        told = await lamp.hear()
        assert (told["type"], told["seq_id"], told["error"]) == ("server_ack", seq_id, "not_allowed")
        assert await phone.hears_nothing()
        await lock.ack(command, 0)
        assert (await phone.hear())["code"] == 0
        await lamp.ack(command, 3)  # late, too
        assert (await lamp.hear())["error"] == "not_allowed"
        assert await phone.hears_nothing()
        assert await local.state("phone", seq_id) == "done"
    assert await local.refused() == [("lamp", "not_allowed"), ("lamp", "not_allowed")]


async def test_another_devices_answer_cannot_end_a_command_that_waits_for_its_device(
    local: HubUnderTest,
) -> None:
    async with local.join("lamp") as lamp, local.join("phone") as phone:
        seq_id = await phone.command("lock", queue=True)
        assert (await phone.hear())["code"] == 0
        await lamp.say("ack", seq_id=seq_id, to="phone", code=0)
        await lamp.say("ack", seq_id="1700000000000_9", to="phone", code=0)
        assert await phone.hears_nothing()
        assert await local.state("phone", seq_id) == "accepted"
        async with local.join("lock") as lock:
            await lock.obey()
            assert (await phone.first(lambda f: f["type"] == "ack"))["from"] == "lock"
    assert [word for who, word in await local.refused() if who == "lamp"] == ["not_allowed", "not_allowed"]


async def test_a_second_connection_of_a_device_replaces_the_first(local: HubUnderTest) -> None:
    async with local.join("lock") as first, local.join("phone") as phone, local.join("lock") as second:
        await first.closed()
        await phone.command("lock")
        await second.obey()
        assert [(await phone.hear())["type"] for _ in range(2)] == ["server_ack", "ack"]
        assert local.hub.gateway.presence() == ["lock"], "the first one's end does not make it offline"


async def test_two_connections_of_an_app_both_hear_the_end(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as one, local.join("phone") as two:
        seq_id = await one.command("lock")
        await lock.obey()
        assert (await one.hear())["code"] == 0
        for peer in (one, two):
            assert (await peer.hear())["type"] == "ack"
            assert peer.heard[-1]["seq_id"] == seq_id


# ── when the device says nothing ─────────────────────────────────────────────────────────────────


async def test_silence_ends_as_unknown_and_a_late_answer_settles_it(hasty: HubUnderTest) -> None:
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        seq_id = await phone.command("lock", data={"open": True})
        assert (await phone.hear())["code"] == 0
        command = await lock.hear()
        ended = await phone.hear(1)
        assert (ended["type"], ended["code"], ended["state"]) == ("ack", 4, "unknown")
        await phone.command("lock", seq_id=seq_id, data={"open": True})
        again = await phone.hear()
        assert (again["code"], again["state"]) == (5, "unknown")
        assert await phone.hear() == ended
        await lock.ack(command, 0, data={"open": True})
        settled = await phone.hear()
        assert (settled["type"], settled["code"], settled["state"]) == ("ack", 0, "done")
        assert (settled["from"], settled["data"]) == ("lock", {"open": True})
        await lock.ack(command, 3)  # a third word changes nothing
        assert await phone.hears_nothing()
        assert await hasty.state("phone", seq_id) == "done"


async def test_unknown_and_its_late_answer_survive_a_restart(hasty: HubUnderTest) -> None:
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        seq_id = await phone.command("lock")
        command = await lock.hear()
        assert (await phone.first(lambda f: f["type"] == "ack"))["state"] == "unknown"
    await hasty.restart()
    async with hasty.join("lock") as lock, hasty.join("phone") as phone:
        await lock.ack(command, 0)
        assert (await phone.first(lambda f: f["type"] == "ack"))["state"] == "done"
        assert await hasty.state("phone", seq_id) == "done"


# ── queued for a device that is away ─────────────────────────────────────────────────────────────


async def test_queued_commands_wait_for_their_device_in_order_and_through_a_restart(
    local: HubUnderTest,
) -> None:
    async with local.join("phone") as phone:
        sent = [await phone.command("lock", queue=True, exp=ms(60), data=n) for n in range(3)]
        assert [(await phone.hear())["code"] for _ in sent] == [0, 0, 0]
        await phone.command("lock", seq_id=sent[0], queue=True, exp=ms(60), data=0)
        again = await phone.hear()
        assert (again["code"], again["state"]) == (5, "accepted")
    await local.restart()
    async with local.join("phone") as phone, local.join("lock") as lock:
        assert [(await lock.obey())["seq_id"] for _ in sent] == sent
        ends = [await phone.first(lambda f: f["type"] == "ack") for _ in sent]
        assert [(end["seq_id"], end["state"]) for end in ends] == [(seq_id, "done") for seq_id in sent]


@pytest.mark.parametrize("ids", ["counted", "words"])
async def test_queued_commands_without_order_are_all_done(local: HubUnderTest, ids: str) -> None:
    async with local.join("phone") as phone:
        more: dict[str, Any] = {"order": False} if ids == "counted" else {}
        for n in range(3):
            seq_id = phone.ids() if ids == "counted" else f"word-{n}"
            await phone.command("lock", seq_id=seq_id, queue=True, exp=ms(60), data=n, **more)
        assert [(await phone.hear())["code"] for _ in range(3)] == [0, 0, 0]
        async with local.join("lock") as lock:
            served = asyncio.create_task(lock.obey_all())
            ends = [await phone.first(lambda f: f["type"] == "ack") for _ in range(3)]
            served.cancel()
            assert [end["state"] for end in ends] == ["done"] * 3


async def test_a_queued_command_expires_and_its_sender_is_told(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        seq_id = await phone.command("lock", queue=True, exp=ms(0.3))
        assert (await phone.hear())["code"] == 0
        ended = await phone.hear(2)
        assert (ended["type"], ended["seq_id"], ended["state"]) == ("ack", seq_id, "expired")
        assert ended["code"] != 0
        async with local.join("lock") as lock:
            assert await lock.hears_nothing(), "a late unlock is dangerous"


async def test_what_expired_while_the_hub_was_down_is_never_passed_on(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        seq_id = await phone.command("lock", queue=True, exp=ms(0.2))
        assert (await phone.hear())["code"] == 0
    await local.hub.stop()
    await asyncio.sleep(0.25)
    await local.start()
    async with local.join("lock") as lock:
        assert await lock.hears_nothing()
    assert await local.state("phone", seq_id) == "expired"


async def test_everybody_is_served_at_once(local: HubUnderTest) -> None:
    """Many commands in flight from two apps to two devices: each gets its own two acks."""

    async def serve(device: Peer) -> None:
        for _ in range(200):
            command = await device.hear()
            await device.ack(command, data=command["data"])

    async def use(app: Peer, name: str) -> None:
        sent = {await app.command(("lock", "lamp")[n % 2], data=[name, n]): n for n in range(200)}
        ends: dict[str, Any] = {}
        while len(ends) < 200:
            frame = await app.hear()
            assert frame["code"] == 0
            if frame["type"] == "ack":
                ends[frame["seq_id"]] = frame["data"]
        assert ends == {seq_id: [name, n] for seq_id, n in sent.items()}

    names = ("lock", "lamp", "phone", "tablet")
    async with AsyncExitStack() as stack:
        lock, lamp, phone, tablet = [await stack.enter_async_context(local.join(name)) for name in names]
        await asyncio.gather(serve(lock), serve(lamp), use(phone, "phone"), use(tablet, "tablet"))


async def test_the_timeline_says_told_only_of_a_sender_that_was_there(local: HubUnderTest) -> None:
    """It said so also of one that had left: by WebSocket, and by a request that did not wait."""

    async def untold(seq_id: str) -> bool:
        shown = await curl(f"{local.url}/v1/messages/phone/{seq_id}", local.tokens["phone"])
        (end,) = (hop for hop in shown.json["hops"] if hop["what"] == "done")
        return bool(end.get("untold", False))

    async with local.join("lock") as lock:
        async with local.join("phone") as phone:
            there = await phone.command("lock")
            await lock.obey()
            await phone.first(lambda f: f["type"] == "ack")
            left = await phone.command("lock")
            command = await lock.hear()
        await local.until(lambda: not local.hub.gateway.sessions.apps)
        await lock.ack(command)
        posted, waited = phone.ids(), phone.ids()
        for seq_id, query in ((posted, ""), (waited, "?wait=20")):
            frame = {"type": "lock_control", "seq_id": seq_id, "to": "lock", "data": 1}
            request = curl(f"{local.url}/v1/messages{query}", local.tokens["phone"], body=frame)
            if query:
                said, _ = await asyncio.gather(request, lock.obey())
                assert said.json["ack"]["state"] == "done"
            else:
                await request
                await lock.obey()
        assert [await untold(seq_id) for seq_id in (there, left, posted, waited)] == [
            False,
            True,
            True,
            False,
        ]
