"""Nobody sees what is another's: in lists, in cursors, and after a name was given to somebody else.

The law: the clients are curl and a plain WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import pytest

from duly.apps.alerts.profiles import ProfileDraft
from duly.core.operations import RecordRefusal
from duly.identity import temporary_tokens
from duly.identity.accounts import Role
from duly.storage import queries
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.people import enter
from tests.end_to_end.raw import Ids, Response, curl, join

PASSWORD = "correct horse"


async def get(local: HubUnderTest, path: str, token: str) -> Any:
    answer = await curl(f"{local.url}{path}", token)
    assert answer.status == 200, answer.body
    return answer.json


async def admin(local: HubUnderTest, verb: str, **wanted: str) -> Response:
    return await curl(f"{local.url}/v1/admin/{verb}", local.tokens["root"], body=wanted)


async def anew(local: HubUnderTest, role: Role, name: str) -> str:
    """Remove an account and make another of its name; the new one's token."""
    assert (await admin(local, "remove", name=name)).status == 200
    await asyncio.sleep(0.002)  # their times are told apart by the millisecond
    made = await admin(local, "add", role=role.value, name=name)
    assert made.status == 200, made.body
    return str(made.json["token"])


def queued(ids: Ids, to: str = "lock", **more: Any) -> dict[str, Any]:
    return {"type": "lock_control", "seq_id": ids(), "to": to, "data": {}, "queue": True} | more


# ── cursors ──────────────────────────────────────────────────────────────────────────────────────


async def test_an_unrelated_users_empty_page_says_nothing_of_others(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "LOOKED_AT", 3)
    ids = Ids()
    for _ in range(20):
        assert (await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=queued(ids))).status == 202
    page = await get(local, "/v1/messages?limit=1", local.tokens["tablet"])
    assert page == {"messages": [], "next": None}
    for _ in range(20):
        await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=queued(ids))
    page = await get(local, "/v1/messages?limit=1", local.tokens["tablet"])
    assert page["messages"] == []
    raw = base64.urlsafe_b64decode(page["next"] + "==")
    for form in (page["next"].encode(), raw):
        for name in (b"phone", b"phone".hex().encode()):
            assert name not in form, "it was a long look, no more"
    rest = await get(local, f"/v1/messages?limit=1&before={page['next']}", local.tokens["tablet"])
    assert rest == {"messages": [], "next": None}


async def test_pages_follow_each_other_and_the_last_one_says_so(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "LOOKED_AT", 3)
    ids, theirs = Ids(), Ids()
    sent = []
    for n in range(8):
        sent.append(queued(ids))
        await curl(f"{local.url}/v1/messages", local.tokens["tablet"], body=sent[-1])
        if n % 4 == 0:
            await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=queued(theirs))
    for limit in (1, 3, 4, 8, 9):
        found: list[str] = []
        before = ""
        while True:
            page = await get(local, f"/v1/messages?limit={limit}{before}", local.tokens["tablet"])
            found += [one["id"] for one in page["messages"]]
            if page["next"] is None:
                break
            assert len(page["messages"]) == limit
            before = f"&before={page['next']}"
        assert sorted(found) == sorted(one["seq_id"] for one in sent)
        assert len(found) % limit or len(page["messages"]) == limit, "nothing follows, so no empty page does"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/alerts"])
async def test_a_cursor_that_is_garbled_or_anothers_is_refused(local: HubUnderTest, path: str) -> None:
    names = ("phone", "tablet") if path == "/v1/messages" else ("s1", "s2")
    await local.hub.alerts.profiles.set("home", ProfileDraft(send=("console:",)))
    for name in ("s1", "s2"):
        local.tokens[name] = await local.hub.accounts.add(Role.SENTINEL, name)
    await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    now = time.time_ns() // 1_000_000
    for n in range(3):
        alert = {
            "type": "alert_event",
            "seq_id": f"e{n}",
            "data": {
                "profile_id": "home",
                "timestamp": now + n,
                "trigger_reason": "fall",
                "device_address": "d",
                "session_id": "s",
            },
        }
        frame = queued(Ids(n)) if path == "/v1/messages" else alert
        sent = await curl(f"{local.url}/v1/messages", local.tokens[names[0]], body=frame)
        assert sent.status in (200, 202), sent.body
    page = await get(local, f"{path}?limit=1", local.tokens[names[0]])
    cursor = page["next"]
    assert (await get(local, f"{path}?limit=1&before={cursor}", local.tokens[names[0]])) != page
    for who, before in (
        (names[1], cursor),
        (names[0], cursor[:-4]),
        (names[0], f"{cursor[:9]}x{cursor[10:]}" if cursor[9] != "x" else f"{cursor[:9]}y{cursor[10:]}"),
        (names[0], "00" * 20),
        (names[0], "%ff%00"),
        ("root", cursor),
    ):
        answer = await curl(f"{local.url}{path}?limit=1&before={before}", local.tokens[who])
        assert (answer.status, answer.json["error"]) == (400, "malformed"), answer.body


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["mqtt", "tower", "hub", "local", "$mqtt"])
async def test_no_account_is_called_what_the_hub_records_things_under(open_local: Open, name: str) -> None:
    local = await open_local(registration="open")
    body = {"name": name, "password": PASSWORD}
    assert (await curl(f"{local.url}/v1/people", body=body)).status == 400
    assert (await admin(local, "add", role="user", name=name)).status == 400


async def test_an_account_that_was_called_mqtt_before_sees_no_refusals_of_mqtt(local: HubUnderTest) -> None:
    from duly.core.acl import HUB
    from duly.identity import account_names

    now = local.hub.ledger.clock.now()
    await local.hub.ledger.write(RecordRefusal("mqtt", "topic", "malformed", "of long ago", now - 10**9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(account_names, "UNUSED", frozenset())
        token = await local.hub.accounts.add(Role.USER, "mqtt")
    await local.hub.activity.refuse(HUB, "nodes/x/status", "malformed", "of today")
    assert (await get(local, "/v1/refusals", token))["refusals"] == []
    everything = (await get(local, "/v1/refusals", local.tokens["root"]))["refusals"]
    assert {one["scope"] for one in everything} == {"mqtt", HUB}


async def test_an_app_of_a_name_that_was_anothers_sees_nothing_of_it(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        first = await phone.command("lock", data={"n": 1})
        await lock.obey(data={"secret": 1})
        await phone.hear_of(first)
        await phone.command("nobody")
        under_way = await phone.command("lock", data={"n": 2})
        await phone.hear_of(under_way)
        waiting = await lock.hear()
        token = await anew(local, Role.APP, "phone")
        assert (await get(local, "/v1/messages", token)) == {"messages": [], "next": None}
        assert (await get(local, "/v1/refusals", token)) == {"refusals": [], "next": None}
        assert (await curl(f"{local.url}/v1/messages/phone/{first}", token)).status == 404
        await admin(local, "grant", app="phone", device="lock")
        async with join(local.url, token) as again:
            await lock.ack(waiting, data={"secret": 2})
            assert await again.hears_nothing(), "how the other's command ended is the other's"
            repeat = {"type": "lock_control", "seq_id": first, "to": "lock", "data": {"n": 1}}
            said = await curl(f"{local.url}/v1/messages", token, body=repeat)
            assert (said.status, said.json["error"]) == (400, "stale"), said.body
            assert b"secret" not in said.body
            mine = await again.command("lock", data={"n": 3})
            assert (await again.hear_of(mine))["code"] == 0
            await lock.obey()
    assert [one["id"] for one in (await get(local, "/v1/messages", token))["messages"]] == [mine]
    assert (await get(local, f"/v1/messages/phone/{first}", local.tokens["root"]))["state"] == "done", (
        "P2 holds"
    )


@pytest.mark.parametrize("also", [(), ("phone",)])
async def test_a_command_of_a_name_that_was_anothers_is_not_sent_again(
    local: HubUnderTest, also: tuple[str, ...]
) -> None:
    async with join(local.url, local.tokens["phone"]) as phone, join(local.url, local.tokens["lock"]) as lock:
        await phone.command("lock", timeout=60_000)
        assert (await lock.hear())["type"] == "lock_control"
    local.tokens["lock"] = await anew(local, Role.DEVICE, "lock")
    for app in also:
        local.tokens[app] = await anew(local, Role.APP, app)
    assert (await admin(local, "grant", app="phone", device="lock")).status == 200
    async with join(local.url, local.tokens["phone"]) as phone, join(local.url, local.tokens["lock"]) as lock:
        seq_id = await phone.command("lock", data="its own", queue=True)
        assert (await lock.hear())["seq_id"] == seq_id
        assert await lock.hears_nothing(1)


async def test_a_command_whose_grant_is_gone_is_not_repeated_to_a_device_that_comes_back(
    local: HubUnderTest,
) -> None:
    async with join(local.url, local.tokens["phone"]) as phone:
        async with join(local.url, local.tokens["lock"]) as lock:
            command = await phone.command("lock", timeout=60_000)
            assert (await lock.hear())["seq_id"] == command
        assert (await admin(local, "revoke", app="phone", device="lock")).status == 200
        async with join(local.url, local.tokens["lock"]) as lock:
            assert await lock.hears_nothing(1)
            await lock.say("ack", seq_id=command, to="phone", code=0)
            told = [await phone.first(lambda frame: frame["type"] == "ack") for _ in range(2)]
            assert [ack["state"] for ack in told] == ["unknown", "done"], "its own answer still settles it"


async def test_what_a_device_said_is_not_said_by_the_next_of_its_name(local: HubUnderTest) -> None:
    async with local.join("lock") as lock:
        await lock.say("event_report", data={"of": "the first"})
        async with local.join("tablet", {"lock": 0}) as tablet:
            assert (await tablet.hear())["data"] == {"of": "the first"}
    token = await anew(local, Role.DEVICE, "lock")
    await admin(local, "grant", app="tablet", device="lock")
    async with join(local.url, token) as lock, local.join("tablet", {"lock": 0}) as tablet:
        await lock.say("event_report", data={"of": "the second"})
        assert (await tablet.hear())["data"] == {"of": "the second"}


async def test_a_sentinel_of_a_name_that_was_anothers_sees_none_of_its_alerts(local: HubUnderTest) -> None:
    await local.hub.alerts.profiles.set("home", ProfileDraft(send=("console:",)))
    local.tokens["s1"] = await local.hub.accounts.add(Role.SENTINEL, "s1")
    await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    event = {"profile_id": "home", "timestamp": time.time_ns() // 1_000_000, "trigger_reason": "fall"}
    event |= {"device_address": "d", "session_id": "s"}
    frame = {"type": "alert_event", "seq_id": "e1", "data": event}
    await curl(f"{local.url}/v1/messages", local.tokens["s1"], body=frame)
    assert len((await get(local, "/v1/alerts", local.tokens["s1"]))["alerts"]) == 1
    token = await anew(local, Role.SENTINEL, "s1")
    assert (await get(local, "/v1/alerts", token)) == {"alerts": [], "next": None}
    assert (await curl(f"{local.url}/v1/alerts/s1/e1", token)).status == 404


async def test_a_person_who_never_talked_leaves_no_blocks_to_the_next_of_their_name(open_local: Open) -> None:
    local = await open_local(registration="open")
    for name in ("ann", "bob"):
        local.tokens[name] = await local.hub.accounts.add(Role.USER, name)
    async with enter(local.url, local.tokens["ann"]) as ann:
        assert (await ann.ask("block", user="bob"))["code"] == 0
    assert (await admin(local, "remove", name="ann")).status == 200
    assert (await admin(local, "add", role="user", name="ann")).status != 200, "something of theirs is left"


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_51st_login_ends_the_oldest_and_no_other(open_local: Open) -> None:
    local = await open_local(registration="open")
    await curl(f"{local.url}/v1/people", body={"name": "ann", "password": PASSWORD})
    tokens = [await local.hub.people.let_in("ann") for _ in range(49)]

    async def log_in() -> str:
        answer = await curl(f"{local.url}/v1/login", body={"name": "ann", "password": PASSWORD})
        return str(answer.json["token"])

    tokens.append(await log_in())
    async with enter(local.url, tokens[0]) as oldest, enter(local.url, tokens[1]) as next_:
        tokens.append(await log_in())
        await oldest.closed()
        assert (await curl(f"{local.url}/v1/messages", tokens[0])).status == 401
        assert (await next_.ask("friends"))["code"] == 0, "the others go on"
    assert [(await curl(f"{local.url}/v1/messages", t)).status for t in tokens[1:]] == [200] * 50


async def test_logging_out_hangs_up_on_that_login_alone(open_local: Open) -> None:
    local = await open_local(registration="open")
    await curl(f"{local.url}/v1/people", body={"name": "ann", "password": PASSWORD})
    one, other = [await local.hub.people.let_in("ann") for _ in range(2)]
    async with enter(local.url, one) as phone, enter(local.url, other) as laptop:
        assert (await curl(f"{local.url}/v1/logout", one, body={})).json == {"ended": 1}
        await phone.closed()
        assert (await laptop.ask("friends"))["code"] == 0


# ── temporary tokens ────────────────────────────────────────────────────────────────────────────


async def test_a_temporary_token_ends_when_it_is_not_used_and_with_its_account(local: HubUnderTest) -> None:
    async def temporary_token() -> str:
        return str((await admin(local, "temporary_token", name="phone")).json["token"])

    async def works(token: str) -> bool:
        return (await curl(f"{local.url}/v1/messages", token)).status == 200

    used, idle = await temporary_token(), await temporary_token()
    half = temporary_tokens.LASTS / 1e6 / 2
    for _ in range(3):
        local.clock.seconds += half + 1
        assert await works(used)
    assert not await works(idle)
    await admin(local, "add", role="app", name="phone", replace="1")
    assert not await works(used), "its account has another token"
    used = await temporary_token()
    await anew(local, Role.DEVICE, "phone")
    assert not await works(used), "its account is another"
