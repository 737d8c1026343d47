"""An app asks how a command ended: the question runs nothing, and answers as a repeat is answered."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Json, curl


async def test_the_outcome_of_a_command_is_told_without_a_repeat(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        id_ = await phone.command("lock", data={"open": True})
        assert (await phone.hear_of(id_))["code"] == 0
        assert (await lock.hear())["seq_id"] == id_
        await phone.say("outcome", seq_id=id_)
        said = await phone.hear_of(id_)
        assert (said["type"], said["code"], said["state"]) == ("server_ack", 5, "sent")
        await lock.say("ack", seq_id=id_, to="phone", code=0, data="open")
        assert (await phone.hear_of(id_))["type"] == "ack"
        await phone.say("outcome", seq_id=id_)
        said, ack = await phone.hear_of(id_), await phone.hear_of(id_)
        assert (said["type"], said["code"], said["state"]) == ("server_ack", 5, "done")
        assert (ack["type"], ack["from"], ack["state"], ack["data"]) == ("ack", "lock", "done", "open")
        assert [frame["seq_id"] for frame in lock.heard if "seq_id" in frame] == [id_]


async def test_what_the_hub_does_not_have_is_not_found_and_its_id_stays_free(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone, local.join("tablet") as tablet:
        id_ = phone.ids()
        await phone.say("outcome", seq_id=id_)
        said = await phone.hear_of(id_)
        assert (said["type"], said["code"], said["error"]) == ("server_ack", 2, "not_found")
        assert await phone.command("lock", data={"open": True}, seq_id=id_) == id_
        assert (await phone.hear_of(id_))["code"] == 0
        assert (await lock.hear())["seq_id"] == id_
        await tablet.say("outcome", seq_id=id_)
        assert (await tablet.hear_of(id_))["error"] == "not_found", "the id of another app is none of its own"


@pytest.mark.parametrize(
    ("name", "frame"), [("lock", {"seq_id": "1_0"}), ("phone", {}), ("phone", {"seq_id": ""})]
)
async def test_a_question_without_an_id_or_of_a_device_is_refused(
    local: HubUnderTest, name: str, frame: Json
) -> None:
    async with local.join(name) as client:
        await client.say("outcome", **frame)
        said = await client.hear()
        assert (said["type"], said["code"], said["error"]) == ("server_ack", 2, "malformed")


async def test_a_question_by_http_is_answered_with_the_stored_ack(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        id_ = await phone.command("lock")
        await lock.say("ack", seq_id=(await lock.hear())["seq_id"], to="phone", code=0)
        while (await phone.hear_of(id_))["type"] != "ack":
            pass
    question = {"type": "outcome", "seq_id": id_}
    said = await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=question)
    assert (said.status, said.json["code"], said.json["state"]) == (200, 5, "done"), said
