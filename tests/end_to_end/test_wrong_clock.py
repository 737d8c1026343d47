"""A hub whose clock is wrong, on the wire: a wrong minute costs nothing, and a floor that was raised into the
future can be mended without anything running twice."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from duly.core.trusted_time import Floor
from duly.core.units import DAY, HOUR, MINUTE, SECOND
from duly.errors import LedgerError
from duly.runtime.clock import SystemClock
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Closed, Ids, curl


class Wrong(SystemClock):
    """The machine's clock, set to another day. No time has passed."""

    def now(self) -> int:
        return super().now() + 2 * DAY


async def established(local: HubUnderTest) -> None:
    """A hub that has run for two hours."""
    local.clock.seconds = 2 * HOUR / SECOND
    await local.hub.maintenance.run()
    assert (await local.hub.ledger.floor()).until > SystemClock().now()


@pytest.mark.parametrize("new", [True, False])
async def test_a_clock_that_was_wrong_for_a_moment_makes_nothing_stale(
    local: HubUnderTest, new: bool
) -> None:
    if not new:
        await established(local)
    async with local.join("lock") as lock, local.join("phone") as phone:
        phone.ids = Ids(-local.clock.seconds)
        await phone.command("lock")
        await lock.obey()
        await phone.first(lambda frame: frame.get("state") == "done")
    right = local.hub.ledger.clock
    local.hub.ledger.clock = Wrong()
    for _ in range(3):
        await local.hub.maintenance.run()
    local.hub.ledger.clock = right
    await local.hub.maintenance.run()
    async with local.join("lock") as lock, local.join("phone") as phone:
        phone.ids = Ids(-local.clock.seconds)
        seq_id = await phone.command("lock")
        assert (await phone.hear_of(seq_id))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(seq_id))["state"] == "done"
    assert (await curl(f"{local.url}/v1/health")).status == 200


async def poisoned(local: HubUnderTest) -> None:
    """The floor of a hub whose clock was two days ahead for hours: everything that has ended is forgotten."""
    ahead = SystemClock().now() + 2 * DAY
    await local.hub.ledger.set_floor(Floor(ahead, ahead))
    await local.hub.maintenance.run()


@pytest.mark.parametrize(("settings", "ahead"), [({"remember": 500, "max_age": 60}, 14), ({}, 16)])
async def test_a_hub_is_unhealthy_as_soon_as_the_floor_makes_it_refuse_anything(
    open_local: Open, settings: dict[str, Any], ahead: int
) -> None:
    """That is sooner where less is remembered: it was healthy, and refused every command."""
    local = await open_local(**settings)
    until = SystemClock().now() + ahead * MINUTE
    await local.hub.ledger.set_floor(Floor(until, until))
    await local.hub.maintenance.run()
    assert (await curl(f"{local.url}/v1/health")).status == 503


async def test_a_floor_in_the_future_is_unhealthy_and_can_be_mended_without_running_anything_twice(
    local: HubUnderTest,
) -> None:
    health, floor = f"{local.url}/v1/health", f"{local.url}/v1/admin/floor"
    async with local.join("lock") as lock, local.join("phone") as phone:
        old = await phone.command("lock")
        assert (await phone.hear_of(old))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(old))["state"] == "done"
        await poisoned(local)
        sick = await curl(health)
        assert (sick.status, sick.json["parts"]) == (503, ["floor"])
        assert "duly floor --mend" in sick.json["detail"]
        state = (await curl(f"{local.url}/v1/state", local.tokens["root"])).json
        assert "floor" in state["down"]
        assert "duly floor --mend" in state["down"]
        refused = await phone.command("lock")
        assert (await phone.hear_of(refused))["error"] == "stale"

        mended = await curl(floor, local.tokens["root"], body={"mend": "yes"})
        assert (mended.status, mended.json["ahead"]) == (200, 0)
        assert mended.json["barrier"] > time.time() * 1000
        assert (await curl(health)).status == 200
        fresh = await phone.command("lock")
        assert (await phone.hear_of(fresh))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(fresh))["state"] == "done"
        await phone.command("lock", seq_id=refused)
        assert (await phone.hear_of(refused))["error"] == "stale", "it may have been forgotten"
        assert await local.state("phone", old) is None, "this one was"
    await local.restart()
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.command("lock", seq_id=old)
        assert (await phone.hear_of(old))["error"] == "stale"
        assert await lock.hears_nothing()


@pytest.mark.parametrize("order", [{"key": "bolt", "mode": "latest"}, {"key": "bolt", "mode": "replay"}])
@pytest.mark.parametrize("restarted", [True, False])
async def test_a_lane_that_went_ahead_with_a_wrong_clock_is_mended(
    local: HubUnderTest, order: dict[str, str], restarted: bool
) -> None:
    """A phone and the hub were two days ahead. Whatever the phone said later was superseded for two days, if
    it counts anew at every start."""
    local.clock.seconds = 2 * DAY / SECOND
    async with local.join("lock") as lock, local.join("phone") as phone:
        phone.ids = Ids(-local.clock.seconds)
        early = await phone.command("lock", order=order)
        assert (await phone.hear_of(early))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(early))["state"] == "done"
        local.clock.seconds = 0
    if restarted:
        await local.restart()
    async with local.join("lock") as lock, local.join("phone") as phone:
        lost = await phone.command("lock", order=order)
        assert (await phone.hear_of(lost))["code"] == 0
        assert (await phone.hear_of(lost))["state"] == "superseded"
        assert await lanes_that_doctor_sees(local) == 1
        mended = await curl(f"{local.url}/v1/admin/floor", local.tokens["root"], body={"mend": "yes"})
        assert mended.json["lanes"] == 1
        phone.ids = Ids()
        later = await phone.command("lock", order=order)
        assert (await phone.hear_of(later))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(later))["state"] == "done"
        again = await curl(f"{local.url}/v1/admin/floor", local.tokens["root"], body={"mend": "yes"})
        assert again.json["lanes"] == 0
        assert await lanes_that_doctor_sees(local) == 0


async def lanes_that_doctor_sees(local: HubUnderTest) -> int:
    """The lanes in the future, as `duly doctor` and `duly floor` tell an operator of them."""
    doctor = await curl(f"{local.url}/v1/admin/doctor", local.tokens["root"], body={})
    floor = await curl(f"{local.url}/v1/admin/floor", local.tokens["root"], body={})
    seen: int = doctor.json["ledger"]["lanes_ahead"]
    assert floor.json["lanes_ahead"] == seen
    return seen


async def test_only_an_admin_may_mend_it(local: HubUnderTest) -> None:
    await poisoned(local)
    answer = await curl(f"{local.url}/v1/admin/floor", local.tokens["phone"], body={"mend": "yes"})
    assert answer.status == 403
    assert (await curl(f"{local.url}/v1/health")).status == 503


async def test_a_hub_whose_ledger_is_removed_under_it_accepts_nothing_and_is_unhealthy(
    local: HubUnderTest,
) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        first = await phone.command("lock")
        assert (await phone.hear_of(first))["code"] == 0
        await lock.obey()
        assert (await phone.hear_of(first))["state"] == "done"
        for file in local._folder.glob("ledger.db*"):
            file.unlink()
        assert (await curl(f"{local.url}/v1/health")).status == 503
        with suppress(Closed, ConnectionError):  # it may hang up on a client that it cannot serve
            for _ in range(5):
                seq_id = await phone.command("lock")
                assert (await phone.hear_of(seq_id))["code"] != 0
        frame = {"type": "lock_control", "seq_id": phone.ids(), "to": "lock"}
        assert (await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=frame)).status == 503
    with pytest.raises(LedgerError):
        await local.hub.ledger.size()
