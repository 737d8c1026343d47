"""Who is online: in the welcome, by push, and by `GET /v1/devices`."""

from __future__ import annotations

import itertools
import time

import pytest

import duly
from duly.apps.gateway.device_list import DeviceList
from duly.apps.gateway.presence import PRESENT
from duly.core.operations import PutNewItem
from duly.core.units import MS
from duly.identity.accounts import Role
from duly.runtime.clock import SystemClock
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import curl


async def test_the_welcome_says_which_of_an_apps_devices_are_online(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        assert phone.heard[0]["online"] == []
    async with local.join("lock"), local.join("phone") as phone:
        assert phone.heard[0]["online"] == ["lock"]
        await local.hub.accounts.revoke("tablet", "lock")
        async with local.join("tablet") as tablet:
            assert tablet.heard[0]["online"] == [], "it is none of its devices any more"


async def test_after_the_welcome_pushes_say_who_comes_and_goes(local: HubUnderTest) -> None:
    async with local.join("phone") as phone:
        phone.presence = True
        async with local.join("lamp"):
            assert (await phone.hear())["data"] == {"online": True}
        assert (await phone.hear())["data"] == {"online": False}


async def test_an_app_that_is_back_before_its_devices_does_not_take_them_for_offline(
    local: HubUnderTest,
) -> None:
    await local.hub.ledger.write(PutNewItem(PRESENT, "lock", b""))  # as a hub leaves it that is killed
    await local.restart()
    async with local.join("phone") as phone:
        assert phone.heard[0]["online"] == ["lock"], "it has time to come back, and is told of otherwise"
        phone.presence = True
        async with local.join("lock"):
            pass
        assert (await phone.hear())["data"] == {"online": False}


async def test_an_app_hears_at_once_whether_a_device_is_online_that_it_is_granted(
    local: HubUnderTest,
) -> None:
    await local.hub.accounts.revoke("tablet", "lock")
    async with local.join("lock") as lock, local.join("tablet") as tablet:
        tablet.presence = True
        assert tablet.heard[0]["online"] == []
        wanted = {"app": "tablet", "device": "lock"}
        granted = await curl(f"{local.url}/v1/admin/grant", local.tokens["root"], body=wanted)
        assert granted.status == 200
        status = await tablet.hear()
        assert (status["type"], status["from"], status["data"]) == ("device_status", "lock", {"online": True})
        await lock.say("event_report", data={"bell": True})
        bell = await tablet.hear()
        assert (bell["type"], bell["cursor"]) == ("event_report", status["cursor"] + 1)


async def test_an_app_hears_that_a_device_is_no_longer_its_own_and_why(local: HubUnderTest) -> None:
    """One that was removed stayed online for ever, for an app that was connected."""

    async def do(verb: str, **wanted: str) -> None:
        done = await curl(f"{local.url}/v1/admin/{verb}", local.tokens["root"], body=wanted)
        assert done.status == 200

    async with local.join("lock"), local.join("lamp") as lamp, local.join("phone") as phone:
        phone.presence = True
        await do("revoke", app="phone", device="lock")
        await phone.first(lambda f: f["from"] == "lock" and f["data"] == {"online": False, "revoked": True})
        await do("grant", app="phone", device="lock")
        await phone.first(lambda f: f["from"] == "lock" and f["data"] == {"online": True})
        sent = await phone.command("lamp")
        assert (await lamp.hear())["seq_id"] == sent
        await do("remove", name="lamp")
        end = await phone.first(lambda f: f["type"] == "ack")
        assert (end["state"], end["detail"].partition(";")[0]) == ("unknown", "lamp was removed")
        status = await phone.first(lambda f: f["type"] == "device_status" and not f["data"]["online"])
        assert (status["from"], status["data"]) == ("lamp", {"online": False, "removed": True})


async def test_a_client_keeps_track_of_the_devices_that_it_is_granted_and_loses(local: HubUnderTest) -> None:
    """The status after a grant has the number of a push that the client knows, and was passed over."""
    async with local.join("lock"), duly.App(local.url, local.tokens["phone"]) as app:
        await local.until(lambda: app.online == {"lock"})
        wanted = {"app": "phone", "device": "lock"}
        await curl(f"{local.url}/v1/admin/revoke", local.tokens["root"], body=wanted)
        await local.until(lambda: app.online == set())
        await curl(f"{local.url}/v1/admin/grant", local.tokens["root"], body=wanted)
        await local.until(lambda: app.online == {"lock"})


class OneMillisecond(SystemClock):
    """A clock that goes on by a microsecond whenever it is asked."""

    def __init__(self) -> None:
        self._times = itertools.count(super().now() // MS * MS)

    def now(self) -> int:
        return next(self._times)


@pytest.mark.parametrize("within", ["a moment", "a millisecond"])
async def test_what_was_heard_of_a_removed_device_is_not_said_of_its_successor(
    local: HubUnderTest, within: str
) -> None:
    if within == "a millisecond":
        local.hub.ledger.clock = OneMillisecond()
    async with local.join("phone") as phone:
        phone.presence = True
        async with local.join("lock"):
            await phone.first(lambda f: f["type"] == "device_status" and f["data"]["online"])
        await phone.first(lambda f: f["type"] == "device_status" and not f["data"]["online"])
    await local.hub.accounts.remove("lock")
    await local.hub.accounts.add(Role.DEVICE, "lock")
    listed = (await curl(f"{local.url}/v1/devices", local.tokens["root"])).json["devices"]
    assert {one["name"]: one["last_heard"] for one in listed} == {"lamp": None, "lock": None}


async def test_devices_are_listed_with_when_they_were_last_heard(local: HubUnderTest) -> None:
    before = time.time_ns() // 1_000_000
    async with local.join("lock") as lock, local.join("phone") as phone:
        listed = (await curl(f"{local.url}/v1/devices", local.tokens["phone"])).json
        assert [(one["name"], one["online"]) for one in listed["devices"]] == [
            ("lamp", False),
            ("lock", True),
        ]
        assert listed["devices"][0]["last_heard"] is None
        came = listed["devices"][1]["last_heard"]
        assert came >= before
        assert listed["next"] is None
        await phone.command("lock")
        await lock.obey()
        await phone.first(lambda f: f["type"] == "ack")
        again = (await curl(f"{local.url}/v1/devices", local.tokens["phone"])).json["devices"][1]
        assert again["last_heard"] > came, "an answer is heard, too"


async def test_that_a_hub_reports_a_device_offline_is_not_when_it_was_last_heard(local: HubUnderTest) -> None:
    async def last_heard() -> int:
        listed = (await curl(f"{local.url}/v1/devices", local.tokens["phone"])).json["devices"]
        return int(next(one["last_heard"] for one in listed if one["name"] == "lock"))

    async with local.join("phone") as phone:
        phone.presence = True
        async with local.join("lock") as lock:
            await phone.command("lock")
            await lock.obey()
            await phone.first(lambda f: f["type"] == "ack")
            said = await last_heard()
            while time.time_ns() // 1_000_000 <= said:
                await last_heard()
        await phone.first(lambda f: f["type"] == "device_status" and not f["data"]["online"])
        assert await last_heard() == said
    after_a_restart = DeviceList(local.hub.ledger, local.hub.accounts, lambda _: False)
    assert await after_a_restart.last_heard(["lock"]) == {"lock": said}


async def test_devices_are_listed_by_page_and_only_ones_own(local: HubUnderTest) -> None:
    for n in range(5):
        await local.hub.accounts.add(Role.DEVICE, f"other-{n}")
    mine = await curl(f"{local.url}/v1/devices?limit=1", local.tokens["phone"])
    assert ([one["name"] for one in mine.json["devices"]], mine.json["next"]) == (["lamp"], "lamp")
    rest = await curl(f"{local.url}/v1/devices?limit=1&after=lamp", local.tokens["phone"])
    assert ([one["name"] for one in rest.json["devices"]], rest.json["next"]) == (["lock"], None)
    everything = (await curl(f"{local.url}/v1/devices", local.tokens["root"])).json["devices"]
    assert len(everything) == 7
    itself = (await curl(f"{local.url}/v1/devices", local.tokens["lock"])).json["devices"]
    assert [one["name"] for one in itself] == ["lock"]
    person = await local.hub.accounts.add(Role.USER, "ann")
    assert (await curl(f"{local.url}/v1/devices", person)).status == 403
    assert (await curl(f"{local.url}/v1/devices?limit=x", local.tokens["phone"])).status == 400
    assert (await curl(f"{local.url}/v1/devices")).status == 401
