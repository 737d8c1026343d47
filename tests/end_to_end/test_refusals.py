"""Every refusal says what it refuses, and costs nobody else anything."""

from __future__ import annotations

import json
import time

import pytest

from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import curl, dial


@pytest.mark.parametrize("seq_id", ["1702234567890_0", "x", 17])
async def test_before_login_a_refusal_carries_the_id(local: HubUnderTest, seq_id: object) -> None:
    async with dial(local.url) as stranger:
        await stranger.say("lock_control", seq_id=seq_id, to="lock", data={})
        said = await stranger.hear()
        assert (said["type"], said["code"], said["seq_id"]) == ("server_ack", 3, seq_id)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_id": 1702234567890},
        {"type": 7},
        {"to": ["lock"]},
        {"exp": "soon"},
        {"order": "any"},
        {"timeout": 0},
        {"timeout": "long"},
        {"timeout": 10**12},
        {"data": [[]] * 1 + [json.loads("[" * 40 + "]" * 40)]},
        {"type": "No Type"},
        {"to": "nobody"},
        {"code": 0, "type": "ack"},
    ],
)
async def test_a_refusal_carries_the_id_whatever_else_is_wrong(
    local: HubUnderTest, wrong: dict[str, object]
) -> None:
    async with local.join("phone") as phone:
        frame = {"type": "lock_control", "seq_id": phone.ids(), "to": "lock"} | wrong
        await phone.say_text(json.dumps(frame))
        said = await phone.hear()
        assert (said["type"], said["seq_id"]) == ("server_ack", frame["seq_id"]), said
        assert said["code"] in (2, 3)


async def test_a_binary_frame_is_refused_with_its_id(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        await phone.socket.send_bytes(b'{"type":"query","seq_id":"bin-1","to":"lock"}')
        assert (await phone.hear_of("bin-1"))["error"] == "malformed"


async def test_a_frame_that_is_too_large_is_refused_and_the_next_one_taken(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        large = await phone.command("lock", data="x" * 262_144)
        said = await phone.hear_of(large)
        assert (said["code"], said["error"]) == (2, "too_large")
        await phone.command("lock", data="small")
        assert (await lock.obey())["data"] == "small"
    answer = await curl(
        f"{local.url}/v1/messages",
        local.tokens["phone"],
        body={"type": "query", "seq_id": "h-1", "to": "lock", "data": "x" * 262_144},
    )
    assert answer.status == 413
    assert (answer.json["seq_id"], answer.json["error"]) == ("h-1", "too_large")


@pytest.mark.parametrize(
    "wrong", [{"to": "nobody"}, {"exp": "soon"}, {"data": "x" * 262_144}, {"type": "No Type"}, {"timeout": 0}]
)
async def test_a_refused_number_is_no_gap(open_local: Open, wrong: dict[str, object]) -> None:
    local = await open_local(window=4)
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.command("lock")
        await lock.obey()
        refused = {"type": "lock_control", "seq_id": phone.ids(), "to": "lock"} | wrong
        await phone.say_text(json.dumps(refused))
        assert (await phone.first(lambda f: f.get("seq_id") == refused["seq_id"]))["code"] in (2, 3)
        began = time.monotonic()
        await phone.command("lock", data="next")
        assert (await lock.obey())["data"] == "next"
        assert time.monotonic() - began < 2, "it did not wait for the window"


async def test_a_refused_id_may_be_used_again(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("nobody")
        assert (await phone.hear_of(seq_id))["error"] == "not_allowed"
        await phone.command("lock", seq_id=seq_id)
        assert (await lock.obey())["seq_id"] == seq_id
