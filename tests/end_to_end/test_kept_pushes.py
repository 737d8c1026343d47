"""Pushes with an id: stored once, acknowledged after that, answered when they are repeated.

And presence: which devices were online survives the hub's death.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from duly.apps.gateway import presence
from duly.apps.gateway.presence import DevicePresence
from duly.apps.gateway.remote_hubs import SingleHub
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Json, Peer, curl


async def say(device: Peer, **fields: object) -> Json:
    """Push something under an id; what the hub says of it."""
    seq_id = str(fields.pop("seq_id", None) or device.ids())
    await device.say(str(fields.pop("type", "event_report")), seq_id=seq_id, **fields)
    answer = await device.hear_of(seq_id)
    assert answer["type"] == "server_ack"
    return answer


async def test_a_push_with_an_id_is_acknowledged_when_it_is_stored(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        assert (await say(lock, data="first"))["code"] == 0
        assert (await local.hub.ledger.extent("push/lock")).last >= 2
        push = await phone.hear()
        assert (push["type"], push["from"], push["data"]) == ("event_report", "lock", "first")
        assert "seq_id" not in push


async def test_a_repeat_is_answered_and_not_stored_twice_also_after_a_restart(local: HubUnderTest) -> None:
    seq_id = f"{int(time.time() * 1000)}_0"
    async with local.join("lock") as lock, local.join("phone") as phone:
        assert (await say(lock, seq_id=seq_id, data=1))["code"] == 0
        assert (await phone.hear())["data"] == 1
        again = await say(lock, seq_id=seq_id, data=1)
        assert (again["code"], again["state"]) == (5, "done")
    await local.restart()
    async with local.join("phone") as phone, local.join("lock") as lock:
        assert (await say(lock, seq_id=seq_id, data=1))["code"] == 5
        assert (await say(lock, data="next"))["code"] == 0
        assert (await phone.hear())["data"] == "next"


async def test_other_content_under_the_same_id_is_a_conflict(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("lamp") as lamp, local.join("phone") as phone:
        seq_id = lock.ids()
        assert (await say(lock, seq_id=seq_id, data=1))["code"] == 0
        for other in ({"data": 2}, {"data": 1, "type": "log_report"}):
            answer = await say(lock, seq_id=seq_id, **other)
            assert (answer["code"], answer["error"]) == (2, "id_conflict")
        assert (await say(lamp, seq_id=seq_id, data=3))["code"] == 0, "another device's ids are its own"
        assert [(await phone.hear())["data"] for _ in range(2)] == [1, 3]
        assert ("lock", "conflict") in await local.refused()


async def test_what_is_too_old_to_be_remembered_is_not_stored(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        old = int((time.time() - 40 * 86_400) * 1000)
        answer = await say(lock, seq_id=f"{old}_0", data="last month")
        assert (answer["code"], answer["error"]) == (2, "stale")
        days = int((time.time() - 5 * 86_400) * 1000)
        assert (await say(lock, seq_id=f"{days}_1", data="last week"))["code"] == 0
        assert (await phone.hear())["data"] == "last week"


async def test_by_http_too(local: HubUnderTest) -> None:
    push = {"type": "event_report", "seq_id": f"{int(time.time() * 1000)}_0", "data": 1}
    for code in (0, 5):
        answer = await curl(f"{local.url}/v1/messages", local.tokens["lock"], body=push)
        assert answer.json["code"] == code
    extent = await local.hub.ledger.extent("push/lock")
    assert extent.last == 1


# ── presence ─────────────────────────────────────────────────────────────────────────────────────


async def kill(local: HubUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub dies: that its devices are gone is not written any more."""

    async def nothing(*_: object) -> None: ...

    remote = local.hub.gateway.remote
    assert isinstance(remote, SingleHub)
    monkeypatch.setattr(remote._presence, DevicePresence.went_offline.__name__, nothing)
    await local.hub.stop()


@pytest.mark.parametrize("returns", [False, True])
async def test_a_device_that_was_online_when_the_hub_died(
    local: HubUnderTest, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "GRACE", 0.5)
    async with local.join("phone") as phone, local.join("lock"):
        phone.presence = True
        status = await phone.first(lambda f: f["type"] == "device_status")
        assert status["data"] == {"online": True}
        await kill(local, monkeypatch)
    await local.start()
    async with local.join("phone", {"lock": status["cursor"]}) as phone:
        phone.presence = True
        if returns:
            async with local.join("lock") as lock:
                await asyncio.sleep(0.7)
                await lock.say("event_report", data="here")
                assert (await phone.hear())["data"] == "here", "for the apps it was never away"
        else:
            offline = await phone.hear()
            assert (offline["type"], offline["data"]) == ("device_status", {"online": False})
            assert await phone.hears_nothing(0.7), "once"
            async with local.join("lock"):
                assert (await phone.hear())["data"] == {"online": True}


async def test_a_device_that_was_reported_offline_is_not_reported_again_after_a_restart(
    open_local: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "GRACE", 0.2)
    local = await open_local()
    async with local.join("lock"):
        pass
    await local.until(lambda: not local.hub.gateway.online("lock"))
    await local.restart()
    async with local.join("phone") as phone:
        phone.presence = True
        assert await phone.hears_nothing(0.5)
