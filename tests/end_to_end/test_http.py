"""The same frames over HTTP, by curl.

The law: a 2xx means stored, and the status alone tells a caller what to do next.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

import pytest

from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Ids, Json, Peer, Response, bare, curl
from tests.stopwatch import Stopwatch


def frame(ids: Ids, **more: Any) -> Json:
    return {"type": "lock_control", "seq_id": ids(), "to": "lock", "data": {"open": True}} | more


async def post(
    local: HubUnderTest, body: object, *options: str, query: str = "", who: str = "phone"
) -> Response:
    return await curl(f"{local.url}/v1/messages{query}", local.tokens[who], *options, body=body)


async def get(local: HubUnderTest, path: str, who: str = "phone") -> Response:
    return await curl(f"{local.url}{path}", local.tokens[who])


async def obeying(device: Peer) -> None:
    while True:
        await device.obey(data={"open": True})


async def test_202_stored_409_under_way_200_ended(local: HubUnderTest) -> None:
    command = frame(Ids())
    async with local.join("lock") as lock:
        stored = await post(local, command)
        assert (stored.status, stored.json) == (
            202, {"type": "server_ack", "seq_id": command["seq_id"], "code": 0},
        )  # fmt: skip
        assert stored.headers["content-type"].startswith("application/json")
        under_way = await post(local, command)
        assert (under_way.status, under_way.json["code"], under_way.json["state"]) == (409, 5, "sent")
        passed_on = await lock.hear()
        waiting = asyncio.create_task(post(local, command, query="?wait=5"))
        await asyncio.sleep(0.05)
        await lock.ack(passed_on, data={"open": True})
        ended = await waiting
        assert (ended.status, ended.json["ack"]["code"], ended.json["ack"]["data"]) == (
            200,
            0,
            {"open": True},
        )
        again = await post(local, command)
        assert (again.status, again.json["code"], again.json["state"]) == (200, 5, "done")
        assert again.json["ack"] == ended.json["ack"]
        assert await lock.hears_nothing()


async def test_wait_gets_both_acks_or_says_202_when_time_is_up(local: HubUnderTest) -> None:
    ids = Ids()
    async with local.join("lock") as lock:
        late = await post(local, frame(ids), query="?wait=0.2")
        assert (late.status, late.json["code"], "ack" in late.json) == (202, 0, False)
        await lock.obey()
        task = asyncio.create_task(obeying(lock))
        ended = await post(local, frame(ids), query="?wait=5")
        assert (ended.status, ended.json["code"], ended.json["ack"]["state"]) == (200, 0, "done")
        for wait in ("soon", "-1", "nan", "1e9"):
            assert (await post(local, frame(ids), query=f"?wait={wait}")).status == 400
        task.cancel()


async def test_an_end_is_heard_at_the_deadline_too(hasty: HubUnderTest) -> None:
    async with hasty.join("lock"):
        ended = await post(hasty, frame(Ids()), query="?wait=5")
        assert (ended.status, ended.json["ack"]["code"], ended.json["ack"]["state"]) == (200, 4, "unknown")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'"text"', 400),
        (b"[" * 100_000, 400),
        (b'{"type":"lock_control","to":"lock"}', 400),
        (b'{"type":"lock_control","seq_id":5,"to":"lock"}', 400),
        (b'{"type":"lock_control","seq_id":"1600000000000_0","to":"lock"}', 400),
        (b'{"type":"lock_control","seq_id":"a-word","to":"garage"}', 403),
        (b'{"type":"lock_control","seq_id":"a-word","to":"lock"}', 503),
        (b'{"type":"query","data":"%b"}' % (b"x" * 300_000), 413),
        (b" " * 9_000_000, 413),
    ],
)
async def test_refusals_have_their_status(local: HubUnderTest, body: bytes, status: int) -> None:
    answer = await post(local, body)
    assert answer.status == status
    if status == 503:
        assert int(answer.headers["retry-after"]) > 0


async def test_401_without_a_known_token_and_403_without_the_right(local: HubUnderTest) -> None:
    body = frame(Ids())
    for token in (None, "", "duly_nonsense", "schlüssel"):
        answer = await curl(f"{local.url}/v1/messages", token, body=body)
        assert answer.status == 401, token
    assert (await get(local, "/v1/state")).status == 403
    assert (await get(local, "/v1/state", "root")).json["devices"] == []
    assert (await post(local, body, who="lock")).status == 403


async def test_a_header_that_is_not_text_is_an_unknown_token(local: HubUnderTest) -> None:
    async with bare(local.url) as raw:
        await raw.send(
            b"GET /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
        )
        assert b" 401 " in await raw.reader.readline()


async def test_422_same_id_other_content(local: HubUnderTest) -> None:
    command = frame(Ids())
    async with local.join("lock"):
        assert (await post(local, command)).status == 202
        answer = await post(local, command | {"data": {"open": False}})
        assert (answer.status, answer.json["error"]) == (422, "id_conflict")


async def test_an_idempotency_key_is_the_id(local: HubUnderTest) -> None:
    key = str(uuid.uuid4())
    command = frame(Ids())
    bare_command = {name: value for name, value in command.items() if name != "seq_id"}
    async with local.join("lock") as lock:
        first = await post(local, bare_command, "-H", f"Idempotency-Key: {key}")
        assert (first.status, first.json["seq_id"]) == (202, key)
        assert (await lock.obey())["seq_id"] == key
        await local.until(lambda: not local.hub.gateway._inbox.live)
        again = await post(local, bare_command, "-H", f"Idempotency-Key: {key}")
        assert (again.status, again.json["state"]) == (200, "done")
        other = await post(local, bare_command | {"data": 1}, "-H", f"Idempotency-Key: {key}")
        assert other.status == 422
        both = await post(local, command, "-H", "Idempotency-Key: something-else")
        assert both.status == 400
        assert await lock.hears_nothing()


async def test_an_array_is_answered_by_an_array_in_its_order(local: HubUnderTest) -> None:
    ids = Ids()
    async with local.join("lock") as lock:
        batch: list[Any] = [frame(ids, data=n) for n in range(20)]
        batch[7:7] = [{"type": "nonsense"}, 5, frame(ids, to="garage")]
        task = asyncio.create_task(obeying(lock))
        answers = await post(local, batch, query="?wait=5")
        assert answers.status == 200
        assert [one["code"] for one in answers.json] == [0] * 7 + [2, 2, 3] + [0] * 13
        assert [one["ack"]["state"] for one in answers.json if one["code"] == 0] == ["done"] * 20
        task.cancel()
    done = [command["data"] for command in lock.heard[1:]]
    assert done == list(range(20)), "an array takes effect in its order"
    assert (await post(local, [{}] * 1_001)).status == 413


async def test_a_device_may_push_and_answer_by_http(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        took = Stopwatch()
        told = await post(local, {"type": "event_report", "data": {"n": 1}}, who="lock")
        assert told.status == 202
        assert took.seconds < 5
        assert (await phone.hear())["data"] == {"n": 1}
        async with local.join("lock") as lock:
            seq_id = await phone.command("lock")
            await lock.hear()
            ack = {"type": "ack", "seq_id": seq_id, "to": "phone", "code": 0}
            assert (await post(local, ack, who="lock")).status == 202
            assert (await phone.first(lambda f: f["type"] == "ack"))["state"] == "done"


async def test_the_outcome_of_a_message_is_its_senders_its_devices_and_the_admins_to_see(
    local: HubUnderTest,
) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", data={"open": True})
        await lock.obey(3, detail="jammed")
        assert (await phone.hear())["code"] == 0
        assert (await phone.hear())["state"] == "failed"
    path = f"/v1/messages/phone/{seq_id}"
    for who in ("phone", "lock", "root"):
        outcome = await get(local, path, who)
        assert outcome.status == 200
        assert outcome.json["state"] == "failed"
        assert outcome.json["ack"] == {"code": 3, "detail": "jammed"}
        (delivery,) = outcome.json["deliveries"]
        assert (delivery["recipient"], delivery["attempts"]) == ("lock", 1)
    assert (await get(local, path, "tablet")).status == 404
    assert (await get(local, "/v1/messages/phone/1_1")).status == 404
    assert (await get(local, f"/v1/messages/phone/{'x' * 300}")).status in (400, 413)
    assert (await get(local, "/v1/messages/phone/%00")).status == 400
    assert (await get(local, "/v1/messages/phone/%ff%fe")).status in (400, 404)


async def test_lists_come_by_page_and_show_only_what_is_ones_own(local: HubUnderTest) -> None:
    ids = Ids()
    async with local.join("lock") as lock, local.join("tablet") as tablet:
        task = asyncio.create_task(obeying(lock))
        await post(local, [frame(ids) for _ in range(5)], query="?wait=5")
        await tablet.command("lock")
        assert (await tablet.hear())["code"] == 0
        assert (await tablet.hear())["state"] == "done"
        task.cancel()
    seen: list[str] = []
    following: str | None = ""
    while following is not None:
        page = (await get(local, f"/v1/messages?limit=2{following and '&before=' + following}")).json
        assert len(page["messages"]) <= 2
        seen += [message["id"] for message in page["messages"]]
        following = page["next"]
    assert len(seen) == len(set(seen)) == 5
    assert seen == sorted(seen, reverse=True), "newest first"
    assert len((await get(local, "/v1/messages", "root")).json["messages"]) == 6
    assert len((await get(local, "/v1/messages?scope=tablet", "root")).json["messages"]) == 1
    assert (await get(local, "/v1/messages?open=1")).json["messages"] == []
    for query in ("limit=0", "limit=x", f"limit={'9' * 5000}", "before=zz", "before=%C3%A9"):
        assert (await get(local, f"/v1/messages?{query}")).status == 400, query


async def test_why_nothing_happened_can_be_asked(local: HubUnderTest) -> None:
    await post(local, frame(Ids()))
    (refusal,) = (await get(local, "/v1/refusals")).json["refusals"]
    assert (refusal["scope"], refusal["word"]) == ("phone", "offline")
    assert abs(refusal["at"] - time.time() * 1000) < 10_000
    assert (await get(local, "/v1/refusals", "tablet")).json["refusals"] == []


async def test_refusals_come_by_page(local: HubUnderTest) -> None:
    ids = Ids()
    for _ in range(5):
        await post(local, frame(ids))
    for who in ("phone", "root"):
        everything = (await get(local, "/v1/refusals", who)).json
        assert everything["next"] is None
        seen, place = [], ""
        while True:
            page = (await get(local, f"/v1/refusals?limit=2{place}", who)).json
            seen += page["refusals"]
            if page["next"] is None:
                break
            place = f"&before={page['next']}"
        assert seen == everything["refusals"]
        assert len(seen) == 5
    foreign = place.removeprefix("&before=")
    of_messages = (await get(local, "/v1/messages?limit=1", "root")).json["next"] or "zz"
    for cursor in ("", "zz", "%C3%A9", foreign, of_messages):
        assert (await get(local, f"/v1/refusals?before={cursor}")).status == 400, cursor
    documented = (await get(local, "/v1/openapi.json")).json["paths"]["/v1/refusals"]["get"]["parameters"]
    assert [one["name"] for one in documented] == ["limit", "before"]


async def test_openapi_describes_what_is_there(local: HubUnderTest) -> None:
    answer = await curl(f"{local.url}/v1/openapi.json")
    assert answer.status == 200
    described = answer.json
    assert described["openapi"].startswith("3.")
    responses = described["paths"]["/v1/messages"]["post"]["responses"]
    assert {"200", "202", "400", "401", "403", "409", "413", "422", "503"} <= set(responses)
    for path, verbs in described["paths"].items():
        for verb, operation in verbs.items():
            assert verb in ("get", "post", "put")
            assert all(one["description"] for one in operation["responses"].values())
            named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}
        if "get" in described["paths"][path]:
            there = await get(local, path.replace("{scope}", "phone").replace("{id}", "1_1"), "root")
            assert there.status in (200, 404), path
    assert json.dumps(described)


async def test_a_wrong_method_or_path_is_a_plain_error(local: HubUnderTest) -> None:
    assert (await curl(f"{local.url}/v1/messages", None, "-X", "DELETE")).status == 405
    assert (await curl(f"{local.url}/nothing/here")).status == 404
    assert (await curl(f"{local.url}/v1/ws", local.tokens["phone"])).status in (400, 426)
