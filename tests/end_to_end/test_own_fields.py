"""Fields and types that the protocol does not know: passed on, and part of what an id stands for."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Json, curl


async def test_a_commands_own_fields_reach_its_device(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        own: Json = {
            "command": "unlock",
            "user": {"id": 7},
            "nothing": None,
            "code": "1234",
            "time": "now",
            "n": 3,
        }
        seq_id = await phone.command("lock", data={"open": True}, **own)
        heard = await lock.obey()
        assert {name: heard[name] for name in own} == own
        assert (heard["seq_id"], heard["from"], heard["data"]) == (seq_id, "phone", {"open": True})


async def test_the_same_id_with_another_field_is_a_conflict(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", command="unlock")
        assert (await phone.hear_of(seq_id))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(seq_id))["state"] == "done"
        await phone.command("lock", command="lock", seq_id=seq_id)
        assert (await phone.hear_of(seq_id))["error"] == "id_conflict"
        await phone.command("lock", command="unlock", seq_id=seq_id)
        assert (await phone.hear_of(seq_id))["code"] == 5


async def test_the_order_of_fields_means_nothing(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", command="unlock", door=2)
        assert (await phone.hear_of(seq_id))["code"] == 0
        await phone.command("lock", door=2, command="unlock", seq_id=seq_id)
        assert (await phone.hear_of(seq_id))["code"] == 5
        await lock.obey()


async def test_fields_survive_a_restart_with_their_command(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        seq_id = await phone.command("lock", command="unlock", queue=True)
        assert (await phone.hear_of(seq_id))["code"] == 0
    await local.restart()
    async with local.join("lock") as lock:
        assert (await lock.obey())["command"] == "unlock"


async def test_an_acks_own_fields_reach_the_app_now_and_with_every_repeat(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", command="unlock")
        await lock.obey(result="ok", battery=81, time="12:00", data={"open": True})
        for repeat in range(2):
            assert (await phone.hear_of(seq_id))["code"] == (5 if repeat else 0)
            ack = await phone.hear_of(seq_id)
            assert (ack["result"], ack["battery"], ack["time"], ack["data"]) == (
                "ok",
                81,
                "12:00",
                {"open": True},
            )
            assert (ack["from"], ack["state"]) == ("lock", "done")
            if not repeat:
                await phone.command("lock", command="unlock", seq_id=seq_id)
    shown = await curl(f"{local.url}/v1/messages/phone/{seq_id}", local.tokens["phone"])
    assert (shown.json["ack"]["result"], shown.json["ack"]["data"]) == ("ok", {"open": True})


async def test_a_pushs_own_fields_reach_the_apps_now_and_later(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        await lock.say("log_report", method="face", user=7, code=3, data=[1])
        heard = await phone.hear()
        assert (heard["method"], heard["user"], heard["code"], heard["data"]) == ("face", 7, 3, [1])
        assert (heard["from"], heard["type"]) == ("lock", "log_report")
    async with local.join("phone", {"lock": heard["cursor"] - 1}) as phone:
        again = await phone.first(lambda frame: frame["type"] == "log_report")
        assert again == heard


async def test_what_is_the_hubs_own_cannot_be_forged(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.say("query", seq_id=phone.ids(), to="lock", **{"from": "tablet", "x": 1})
        assert (await lock.obey())["from"] == "phone"
        await lock.say("status_report", **{"from": "lamp", "cursor": 99, "time": 1, "x": 1})
        heard = await phone.first(lambda frame: frame["type"] == "status_report")
        assert heard["from"] == "lock"
        assert heard["cursor"] < 99
        assert heard["time"] > 1_000


@pytest.mark.parametrize("type", ["set_temperature", "x", "a" * 64, "open_2"])
async def test_other_types_are_commands_of_apps_and_pushes_of_devices(local: HubUnderTest, type: str) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", type, data=21)
        assert (await lock.obey())["type"] == type
        assert [(await phone.hear_of(seq_id))["type"] for _ in range(2)] == ["server_ack", "ack"]
        await lock.say(type, data=22)
        heard = await phone.hear()
        assert (heard["type"], heard["data"], heard["from"]) == (type, 22, "lock")


@pytest.mark.parametrize("type", ["Set", "set-it", "1st", "", "a" * 65, "welcome", "device_status", "gap"])
async def test_what_cannot_be_a_type_is_refused_with_its_id(local: HubUnderTest, type: str) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", type)
        said = await phone.hear_of(seq_id)
        assert (said["code"], said["error"]) == (2, "malformed")
        await lock.say(type, seq_id="push-1")
        assert (await lock.hear_of("push-1"))["code"] == 2


async def test_other_types_by_http_keep_their_order(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        frames = [
            {"type": "set_temperature", "seq_id": f"1{n}-{n}", "to": "lock", "data": n} for n in range(20)
        ]
        answer = await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=frames)
        assert [one["code"] for one in answer.json] == [0] * 20
        assert [(await lock.obey())["data"] for _ in range(20)] == list(range(20))
