"""Every refusal says what it refuses, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import json

import pytest

from duly.identity.accounts import Role
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Closed, bare, curl, dial
from tests.guard import GUARD
from tests.stopwatch import Stopwatch


@pytest.mark.parametrize("seq_id", ["1702234567890_0", "x", 17])
async def test_before_login_a_refusal_carries_the_id(local: HubUnderTest, seq_id: object) -> None:
    async with dial(local.url) as stranger:
        await stranger.say("lock_control", seq_id=seq_id, to="lock", data={})
        said = await stranger.hear()
        assert (said["type"], said["code"], said["seq_id"]) == ("server_ack", 3, seq_id)


@pytest.mark.parametrize("first", [{"type": "auth", "token": "wrong"}, {"type": "query", "seq_id": "q"}])
async def test_a_connection_without_a_login_ends_as_a_violation_of_policy(
    local: HubUnderTest, first: dict[str, str]
) -> None:
    async with dial(local.url) as stranger:
        await stranger.say(**first)
        assert (await stranger.hear())["code"] == 3
        with pytest.raises(Closed, match="1008"):
            await stranger.hear()


async def test_a_connection_that_may_try_later_ends_with_that_code(local: HubUnderTest) -> None:
    answers = [(await curl(f"{local.url}/v1/messages", f"duly_{n}")).status for n in range(11)]
    assert answers[-1] == 429
    async with dial(local.url) as stranger:
        await stranger.say("auth", token="wrong")
        assert (await stranger.hear())["error"] == "too_many_logins"
        with pytest.raises(Closed, match="1013"):
            await stranger.hear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_id": 1702234567890},
        {"seq_id": 1702234567.25},
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
    recorded = (await curl(f"{local.url}/v1/refusals", local.tokens["phone"])).json["refusals"]
    assert [(one["id"], one["word"]) for one in recorded] == [("bin-1", "malformed")]


async def test_before_login_a_binary_frame_is_refused_with_its_id(local: HubUnderTest) -> None:
    async with dial(local.url) as stranger:
        await stranger.socket.send_bytes(b'{"type":"auth","seq_id":"bin-2"}')
        assert (await stranger.hear_of("bin-2"))["code"] == 3


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
    ("sent", "word"), [(b"\x81\xff" + (2 << 20).to_bytes(8), "too_large"), (b"\xf1\x80", "malformed")]
)
async def test_what_ends_a_connection_is_recorded(local: HubUnderTest, sent: bytes, word: str) -> None:
    """A frame of more than 1 MiB closed the connection, and 'duly why' knew nothing of it."""
    async with bare(local.url) as raw:
        await raw.upgrade(local.url, local.tokens["phone"])
        await raw.send(sent)
        await raw.gone()
    async with asyncio.timeout(GUARD):
        while ("phone", word) not in await local.refused():
            await asyncio.sleep(0.01)


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
        took = Stopwatch()
        await phone.command("lock", data="next")
        assert (await lock.obey())["data"] == "next"
        assert took.seconds < 2, "it did not wait for the window"


@pytest.mark.parametrize("data", ["NaN", r'"\ud800"', "[1,", '"not closed', ""])
@pytest.mark.parametrize("binary", [False, True])
async def test_the_number_of_a_text_that_is_not_json_is_no_gap(
    open_local: Open, data: str, binary: bool
) -> None:
    local = await open_local(window=4)
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.command("lock")
        await lock.obey()
        seq_id = phone.ids()
        text = f'{{"type":"query","more":{{"seq_id":"1_1"}},"to":"lock","seq_id":"{seq_id}","data":{data}}}'
        await (phone.socket.send_bytes(text.encode()) if binary else phone.say_text(text))
        assert (await phone.hear_of(seq_id))["code"] == 2
        took = Stopwatch()
        await phone.command("lock", data="next")
        assert (await lock.obey())["data"] == "next"
        assert took.seconds < 2, "it did not wait for the window"


async def test_a_refused_id_may_be_used_again(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("nobody")
        assert (await phone.hear_of(seq_id))["error"] == "not_allowed"
        await phone.command("lock", seq_id=seq_id)
        assert (await lock.obey())["seq_id"] == seq_id


async def test_an_account_gets_as_many_of_its_own_refusals_as_it_asks_for(local: HubUnderTest) -> None:
    """Those of others in between do not count."""
    async with local.join("phone") as phone, local.join("tablet") as tablet:
        mine = [await phone.command("nobody") for _ in range(3)]
        await phone.hear_of(mine[-1])
        theirs = [await tablet.command("nobody") for _ in range(3)]
        await tablet.hear_of(theirs[-1])
    answer = await curl(f"{local.url}/v1/refusals?limit=2", local.tokens["phone"])
    assert [one["id"] for one in answer.json["refusals"]] == [mine[2], mine[1]]


@pytest.mark.parametrize("type", ["", '"type":null,', '"type":7,'])
async def test_a_frame_without_a_type_is_told_so(local: HubUnderTest, type: str) -> None:
    async with local.join("phone") as phone:
        await phone.say_text(f'{{{type}"seq_id":"n-0","to":"lock"}}')
        said = await phone.hear_of("n-0")
        assert (said["code"], said["detail"]) == (2, "not a frame: its `type` is missing, or not a text")


async def test_a_refusal_names_the_kind_of_account_in_plain_words(local: HubUnderTest) -> None:
    async with local.join("phone") as phone, local.join("lock") as lock:
        await phone.say("No Type", seq_id="n-1", to="lock")
        assert (await phone.hear_of("n-1"))["detail"] == "there is no frame type 'No Type' for an app"
        await phone.say("ack", seq_id="n-2", to="lock", code=0)
        assert (await phone.hear_of("n-2"))["detail"] == "an app cannot send 'ack'"
        await lock.say("No Type", seq_id="n-3")
        assert (await lock.hear_of("n-3"))["detail"] == "there is no frame type 'No Type' for a device"


async def test_a_wrong_token_and_a_wrong_password_are_recorded(local: HubUnderTest) -> None:
    await curl(f"{local.url}/v1/messages", "duly_wrong")
    await curl(f"{local.url}/v1/people", body={"name": "ann", "password": "a-long-password"})
    for name in ("ann", "a-password-in-the-wrong-field"):
        await curl(f"{local.url}/v1/login", body={"name": name, "password": "a-wrong-password"})
    admin = await local.hub.accounts.add(Role.ADMIN, "boss")
    found = (await curl(f"{local.url}/v1/refusals", admin)).json["refusals"]
    logins = {one["reason"] for one in found if (one["scope"], one["id"]) == ("hub", "login")}
    assert logins == {
        "a token from 127.0.0.1 is not known",
        "the password of ann, from 127.0.0.1, is wrong",
        "the name of an account, from 127.0.0.1, is wrong",
    }
