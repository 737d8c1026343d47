"""One account cannot send or store more than its limits, is told when to come back, harms no other."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
from typer.testing import CliRunner

from duly.apps.alerts.profiles import ProfileDraft
from duly.cli import app as command_line
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.conftest import HubUnderTest, HubWithPeople, Open
from tests.end_to_end.raw import Ids, Json, curl
from tests.end_to_end.test_kept_pushes import say
from tests.end_to_end.test_mqtt_firmware import Firmware
from tests.guard import GUARD


def is_limited(answer: Json) -> bool:
    """Whether this is the honest refusal: code 4, the word, and when to come back."""
    return (answer["code"], answer.get("error")) == (4, "rate_limited") and answer["retry_after"] > 0


async def recorded(local: HubUnderTest) -> list[tuple[str, str]]:
    await local.hub.activity.settle()
    return await local.refused()


async def test_commands_beyond_the_rate_are_refused_and_recorded_and_others_are_served(
    open_local: Open,
) -> None:
    local = await open_local(commands_per_minute=3)
    async with local.join("phone") as phone, local.join("tablet") as tablet, local.join("lock") as lock:
        ids = [await phone.command("lock") for _ in range(4)]
        answers = [await phone.hear_of(seq_id) for seq_id in ids]
        assert [answer["code"] for answer in answers[:3]] == [0, 0, 0]
        assert is_limited(answers[3]), answers[3]
        for seq_id in ids[:3]:
            assert (await lock.obey())["seq_id"] == seq_id
        other = await tablet.command("lock")
        assert (await lock.obey())["seq_id"] == other, "another account has its own limit"
        assert ("phone", "rate_limited") in await recorded(local)
        assert [r.id for r in await local.hub.ledger.refusals(10)] == [ids[3]], "duly why finds it by its id"
        local.clock.seconds += 61
        await phone.command("lock", seq_id=ids[3])
        assert (await lock.obey())["seq_id"] == ids[3], "a refused id is not burned"


async def test_a_repeat_is_answered_whatever_its_sender_has_used_up(open_local: Open) -> None:
    local = await open_local(commands_per_minute=2, pushes_per_minute=1)
    async with local.join("phone") as phone, local.join("lock") as lock:
        ended, open_ = [await phone.command("lock") for _ in range(2)]
        assert (await lock.obey())["seq_id"] == ended
        assert (await lock.hear())["seq_id"] == open_
        assert [(await phone.hear_of(ended))["type"] for _ in range(2)] == ["server_ack", "ack"]
        assert (await phone.hear_of(open_))["code"] == 0
        assert is_limited(await phone.hear_of(await phone.command("lock"))), "a new one is refused"
        await phone.command("lock", seq_id=ended)
        again = [await phone.hear_of(ended) for _ in range(2)]
        assert [(one["type"], one["code"], one.get("state")) for one in again] == [
            ("server_ack", 5, "done"), ("ack", 0, "done"),
        ]  # fmt: skip
        await phone.command("lock", seq_id=open_)
        duplicate = await phone.hear_of(open_)
        assert (duplicate["code"], duplicate["state"]) == (5, "sent")
        await phone.command("lock", seq_id=ended, data="another")
        assert (await phone.hear_of(ended))["error"] == "id_conflict"
        push = lock.ids()
        codes = [(await say(lock, seq_id=seq_id, data=1))["code"] for seq_id in (push, lock.ids(), push)]
        assert codes == [0, 4, 5]
        assert local.hub.health.limited()["commands"] == 1


async def test_a_repeated_line_and_a_repeated_alert_are_answered_too(open_chat_hub: Any) -> None:
    local: HubWithPeople = await open_chat_hub(lines_per_minute=1, alerts_per_minute=1)
    async with local.enter("ann") as ann:
        seq_id = ann.ids()
        for code in (0, 5):
            await ann.say("one_chat", seq_id=seq_id, to="bob", data={"text": "once"})
            assert (await ann.hear_of(seq_id))["code"] == code
        assert is_limited(await ann.chat("bob", "another"))
    await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    token = await local.hub.accounts.add(Role.SENTINEL, "gate")
    data = {"profile_id": "home", "trigger_reason": "smoke", "timestamp": int(time.time() * 1000)}

    async def report(seq_id: str) -> Json:
        body = {"type": "alert_event", "seq_id": seq_id, "data": data}
        answer: Json = (await curl(f"{local.url}/v1/messages", token, body=body)).json
        return answer

    assert [(await report("a"))["code"] for _ in range(2)] == [0, 5]
    assert is_limited(await report("b"))
    assert local.hub.health.limited()["lines"] == local.hub.health.limited()["alerts"] == 1


async def test_a_stranger_puts_others_into_so_many_groups_only(open_chat_hub: Any) -> None:
    local: HubWithPeople = await open_chat_hub(groups_per_day=2)
    async with local.enter("ann") as ann:

        async def group(seq_id: str, name: str = "us") -> Json:
            await ann.say("group_create", seq_id=seq_id, data={"name": name, "members": ["bob"]})
            answer: Json = await ann.hear_of(seq_id)
            return answer

        ids = [ann.ids() for _ in range(3)]
        assert (await group(ann.ids(), ""))["code"] == 2, "what is refused is not counted"
        told = [(await group(seq_id))["code"] for seq_id in (ids[0], ids[0], ids[1])]
        assert told == [0, 5, 0], "a repeat is not counted either"
        refused = await group(ids[2])
        assert is_limited(refused)
        assert refused["retry_after"] > 3_600
        assert "groups_per_day" in refused["detail"]
        assert (await group(ids[0]))["code"] == 5
    assert local.hub.health.limited()["groups"] == 1


async def test_by_http_it_is_429_with_retry_after(open_local: Open) -> None:
    local = await open_local(commands_per_minute=1)
    ids, url, token = Ids(), f"{local.url}/v1/messages", local.tokens["phone"]
    async with local.join("lock"):
        bodies = [{"type": "lock_control", "seq_id": ids(), "to": "lock"} for _ in range(2)]
        assert (await curl(url, token, body=bodies[0])).status == 202
        refused = await curl(url, token, body=bodies[1])
    assert (refused.status, refused.json["error"]) == (429, "rate_limited")
    assert refused.json["seq_id"] == bodies[1]["seq_id"]
    assert int(refused.headers["retry-after"]) >= refused.json["retry_after"] > 0


async def test_one_account_cannot_fill_the_disk(open_local: Open) -> None:
    local = await open_local(stored_mb_per_day=1)
    async with local.join("lock", max_msg_size=0) as lock, local.join("lamp") as lamp:
        answers = [await say(lock, data="x" * 240_000) for _ in range(8)]
        assert [answer["code"] for answer in answers] == [0] * 4 + [4] * 4
        assert all(map(is_limited, answers[4:]))
        assert "stored_mb_per_day" in answers[4]["detail"]
        assert (await say(lamp, data="x"))["code"] == 0


async def test_lines_that_are_refused_as_too_large_are_not_counted_as_stored(open_chat_hub: Any) -> None:
    local: HubWithPeople = await open_chat_hub(stored_mb_per_day=1)
    async with local.enter("ann") as ann:
        for _ in range(6):
            refused = await ann.chat("bob", "x" * 240_000)
            assert (refused["code"], refused["error"]) == (2, "too_large")
        assert (await ann.chat("bob", "hello"))["code"] == 0


async def test_pushes_are_stored_in_their_order_also_when_one_was_refused(open_local: Open) -> None:
    local = await open_local(pushes_per_minute=2)
    async with local.join("lock") as lock, local.join("phone") as phone:
        ids = [lock.ids() for _ in range(4)]
        codes = [(await say(lock, seq_id=seq_id, data=n))["code"] for n, seq_id in enumerate(ids)]
        assert codes == [0, 0, 4, 4]
        local.clock.seconds += 61
        early = await say(lock, seq_id=ids[3], data=3)
        assert is_limited(early), "the one before it comes first"
        assert local.hub.health.limited()["pushes"] == 3, "what is refused for its order counts as well"
        for n in (2, 3):
            assert (await say(lock, seq_id=ids[n], data=n))["code"] == 0
        assert [(await phone.hear())["data"] for _ in range(4)] == [0, 1, 2, 3]


async def test_a_device_that_gives_a_refused_push_up_is_not_shut_out(open_local: Open) -> None:
    local = await open_local(pushes_per_minute=1)
    async with local.join("lock") as lock:
        assert [(await say(lock, data=n))["code"] for n in range(2)] == [0, 4]
        local.clock.seconds += 300
        assert (await say(lock, data="another"))["code"] == 0


async def test_chat_lines_beyond_the_rate_are_refused_and_acks_are_not(
    open_chat_hub: Any,
) -> None:
    local: HubWithPeople = await open_chat_hub(lines_per_minute=2)
    async with local.enter("ann") as ann, local.enter("bob") as bob:
        said = [await ann.chat("bob", f"line {n}") for n in range(3)]
        assert [answer["code"] for answer in said[:2]] == [0, 0]
        assert is_limited(said[2]), said[2]
        assert await bob.texts(2) == ["line 0", "line 1"]
        assert (await bob.chat("ann", "still here"))["code"] == 0


async def test_an_mqtt_device_beyond_its_rate_is_refused_told_and_recorded(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0, pushes_per_minute=2)
    hub = Hub(settings)
    await hub.start()
    firmware = Firmware(hub.mqtt_url, "lock", await hub.accounts.add(Role.DEVICE, "lock"))
    try:
        async with asyncio.timeout(GUARD):
            while not hub.gateway.online("lock"):
                await asyncio.sleep(0.01)
            now = int(time.time() * 1000)
            for n in range(3):
                push = {"type": "event_report", "seq_id": f"{now}_{n}", "data": n}
                content = base64.b64encode(json.dumps(push).encode()).decode()
                firmware.say("nodes/lock/status", {"time": 0, "online": True, "data": content})
            answers = [await firmware.tasks.get() for _ in range(3)]
            failed = [answer for answer in answers if "error" in answer]
            assert len(failed) == 1, answers
            why = json.loads(base64.b64decode(failed[0]["error"]))
            assert (why["code"], why["error"]) == (4, "rate_limited")
            assert why["retry_after"] > 0
            await hub.activity.settle()
            assert ("lock", "rate_limited") in [(r.scope, r.word) for r in await hub.ledger.refusals(10)]
    finally:
        firmware.stop()
        await hub.stop()


async def test_doctor_and_metrics_show_the_limits_and_what_was_refused(open_local: Open) -> None:
    local = await open_local(commands_per_minute=1, lines_per_minute=0, stored_mb_per_day=1)
    async with local.join("phone") as phone, local.join("lock"):
        for _ in range(3):
            await phone.hear_of(await phone.command("lock"))
    headers = {"Authorization": f"Bearer {local.tokens['root']}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{local.url}/metrics") as answer:
        text = await answer.text()
    shown = {line for line in text.splitlines() if line.startswith(("duly_limit{", "duly_limited_total{"))}
    assert any('kind="commands"' in line and line.endswith(" 2.0") for line in shown), shown
    assert any('kind="stored"' in line and line.endswith(" 1.0") for line in shown), shown
    arguments = ["doctor", "--url", local.url, "--token", local.tokens["root"], "--json"]
    told = await asyncio.to_thread(CliRunner().invoke, command_line, arguments)
    findings = {one["what"]: one for one in json.loads(told.output)["findings"]}
    fact = findings["limits"]["fact"]
    assert fact.startswith("one account: 1 commands, any number of lines, 600,000 pushes")
    assert findings["limited"] == {
        "what": "limited",
        "is": "warn",
        "fact": "refused since the start: 2 commands; most of phone (2)",
    }


async def test_commands_that_are_refused_are_not_counted_as_stored(open_local: Open) -> None:
    """A few large commands to a device that was offline used up the bytes of a day."""
    local = await open_local(stored_mb_per_day=1)
    async with local.join("phone") as phone, local.join("lock") as lock:
        same = phone.ids()
        refused: list[dict[str, Any]] = [
            {"to": "lamp"}, {"to": "nobody"}, {"to": "lock", "exp": 9_999_999_999_999},
            {"to": "lock", "seq_id": same},
        ]  # fmt: skip
        await phone.command("lock", seq_id=same)
        await lock.obey()
        assert [(await phone.hear_of(same))["type"] for _ in range(2)] == ["server_ack", "ack"]
        for wrong in refused:
            for _ in range(5):
                sent = {"seq_id": phone.ids(), **wrong}
                await phone.say("lock_control", data="x" * 240_000, **sent)
                answer = await phone.hear_of(sent["seq_id"])
                assert answer["error"] in ("offline", "not_allowed", "malformed", "id_conflict"), wrong
        stored = [await phone.command("lock", data="x" * 240_000) for _ in range(5)]
        answers = [await phone.hear_of(seq_id) for seq_id in stored]
        assert [answer["code"] for answer in answers] == [0] * 4 + [4], "what is stored is counted"


async def test_lines_that_are_refused_are_not_counted_as_stored(open_chat_hub: Any) -> None:
    local: HubWithPeople = await open_chat_hub(stored_mb_per_day=1)
    async with local.enter("ann") as ann, local.enter("bob") as bob:
        await bob.ask("block", user="ann")
        for name in ("bob", "no-such-person"):
            for _ in range(70):
                assert (await ann.chat(name, "x" * 16_000))["error"] == "not_allowed"
        assert (await ann.chat("cid", "hello"))["code"] == 0


async def test_pushes_and_repeats_that_are_not_stored_are_not_counted(open_local: Open) -> None:
    local = await open_local(stored_mb_per_day=1)
    async with local.join("lock") as lock:
        first = lock.ids()
        codes = [(await say(lock, seq_id=first, data="x" * 240_000))["code"] for _ in range(8)]
        assert codes == [0] + [5] * 7
        conflicts = [await say(lock, seq_id=first, data="y" * 240_000) for _ in range(8)]
        assert {answer["error"] for answer in conflicts} == {"id_conflict"}
        assert [(await say(lock, data="z" * 240_000))["code"] for _ in range(4)] == [0, 0, 0, 4]
