"""Deliveries that people send again, and how often the tower tries by itself."""

from __future__ import annotations

import asyncio

import pytest

from duly.core.fanout.plan import FanoutPolicy
from duly.core.units import DAY
from duly.errors import Malformed
from duly.runtime.clock import SystemClock
from tests.apps.alerts.conftest import Tower, event
from tests.receivers import Receiver, receiver


async def test_trying_again_wakes_no_recipient_whose_time_has_not_come(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, escalate=((3_600, hook.url + "/boss"),))
    hook.words = ["500"]
    tower.hub.alerts._fanout.policy = FanoutPolicy("alert")
    await tower.post(event())
    await hook.got(1)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await tower.do("deliveries.retry", event="event-1")
    shown = await tower.until_state("event-1", "delivered")
    first, boss = sorted(shown["deliveries"], key=lambda one: one["round"])
    assert (first["state"], first["attempts"]) == ("done", 2)
    assert (boss["state"], boss["attempts"]) == ("accepted", 0)
    with pytest.raises(Malformed, match="--to"):
        await tower.do("deliveries.retry", event="event-1")
    await tower.do("deliveries.retry", event="event-1", recipient=boss["recipient"])
    await tower.until_state("event-1", "done")
    assert len(hook.requests) == 3


async def test_what_was_called_off_is_not_tried_again_unless_it_is_named(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, escalate=((3_600, hook.url + "/boss"),))
    hook.words = ["404"]
    await tower.post(event())
    await hook.got(1)
    await tower.do("alert.resolve", event="event-1", by="ann")
    made = (await tower.do("deliveries.retry", event="event-1"))["deliveries"]
    rounds = sorted((one["round"], one["state"]) for one in made)
    assert rounds[:2] == [(0, "failed"), (1, "cancelled")]
    assert [round_ for round_, _ in rounds[2:]] == [200]
    await hook.got(2)


async def test_a_delivery_is_tried_so_often_as_its_profile_says(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, tries=3)
    hook.words = ["500"] * 9
    await tower.post(event())
    shown = await tower.until_state("event-1", "failed")
    assert [(one["state"], one["attempts"]) for one in shown["deliveries"]] == [("failed", 3)]
    assert "given up after 3 attempts" in shown["deliveries"][0]["error"]
    assert len(hook.requests) == 3


async def test_silences_of_the_same_moment_are_several(tower: Tower) -> None:
    made = await asyncio.gather(
        *(tower.do("alert.silence", device=f"lock-{n}", lasts="60") for n in range(5))
    )
    assert sorted(one["silence"] for one in made) == ["1", "2", "3", "4", "5"]
    assert len((await tower.do("alert.silences"))["silences"]) == 5


class DayAhead(SystemClock):
    """A clock that is a day ahead."""

    def now(self) -> int:
        return super().now() + DAY


async def test_a_clock_that_is_set_back_makes_no_silence_longer(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    right, tower.hub.ledger.clock = tower.hub.ledger.clock, DayAhead()
    await tower.do("alert.silence", device="AA:*", lasts="60", critical="yes")
    tower.hub.ledger.clock = right
    await tower.post(event(severity="critical"))
    await hook.got(1)
    await tower.do("alert.silence", device="AA:*", lasts="60", critical="yes")
    _, said = await tower.post(event("event-2", severity="critical"), query="?wait=2")
    assert said["ack"]["detail"] == "silenced by ann; no recipient was told"


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────


async def dead(tower: Tower) -> list[str]:
    """The recipients of dead letters."""
    return [one["recipient"] for one in (await tower.do("deliveries.list", state="dead"))["deliveries"]]


async def counted(tower: Tower) -> float:
    """Dead letters as `/metrics` and the page count them."""
    await tower.hub.alerts.backlog.refresh()
    return tower.hub.metrics.telemetry.gauge("duly_dead_letters")[()]


async def told_in_part(tower: Tower, hook: Receiver) -> str:
    """An alert that one recipient has received and another has not; returns the label of the latter."""
    async with receiver() as gone:
        url = gone.url
    await tower.profile("home", hook.url, url, tries=1)
    await tower.post(event())
    shown = await tower.until_state("event-1", "done")
    (failed,) = [one["recipient"] for one in shown["deliveries"] if one["state"] == "failed"]
    return str(failed)


async def test_a_letter_is_dead_also_if_another_recipient_was_told(tower: Tower, hook: Receiver) -> None:
    failed = await told_in_part(tower, hook)
    assert await dead(tower) == [failed]


async def test_a_letter_that_was_sent_to_another_address_is_no_longer_dead(
    tower: Tower, hook: Receiver
) -> None:
    failed = await told_in_part(tower, hook)
    await tower.do("deliveries.edit", event="event-1", recipient=failed, url=hook.url + "/other")
    await hook.got(2)
    await tower.until_state("event-1", "done")
    assert await dead(tower) == []


async def test_a_letter_that_arrived_when_it_was_sent_again_is_no_longer_dead(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, tries=1)
    hook.words = ["404", "404", "200"]
    await tower.post(event())
    await tower.until_state("event-1", "failed")
    label = (await dead(tower))[0]
    await tower.do("deliveries.retry", event="event-1")
    await hook.got(2)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    assert await dead(tower) == [label], "it failed once more, and is one letter all the same"
    await tower.do("deliveries.retry", event="event-1")
    await hook.got(3)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    assert await dead(tower) == []


@pytest.mark.parametrize("verb", ["alert.ack", "alert.resolve"])
async def test_a_letter_that_is_no_longer_wanted_is_no_longer_dead(
    tower: Tower, hook: Receiver, verb: str
) -> None:
    await told_in_part(tower, hook)
    assert await counted(tower) == 1
    await tower.do(verb, event="event-1", by="ann")
    assert await dead(tower) == []
    assert await counted(tower) == 0


async def test_an_alert_that_is_sent_again_does_not_end_once_more(tower: Tower, hook: Receiver) -> None:
    failed = await told_in_part(tower, hook)
    await tower.do("deliveries.edit", event="event-1", recipient=failed, url=hook.url + "/other")
    await hook.got(2)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await tower.hub.metrics.trail.flush()
    (total,) = [
        one for one in (await tower.hub.metrics.measure()).metrics if one.name == "duly_messages_total"
    ]
    ends = {tuple(one.labels.values()): one.value for one in total.samples if one.value}
    assert ends == {("alert_event", "accepted"): 1, ("alert_event", "done"): 1}
