"""Dead letters are counted at once where something has changed, and all of them now and then."""

from __future__ import annotations

from duly.apps.alerts.dead_letter_count import RECOUNT_SECONDS, DeadLetterCount
from duly.core.fanout.plan import FanoutCounts
from duly.identity.accounts import Role
from tests.apps.alerts.conftest import Tower, event
from tests.receivers import Receiver, receiver


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


async def fail(tower: Tower, id_: str) -> str:
    """Give up a notification; returns the label of its recipient."""
    async with receiver() as gone:
        url = gone.url
    await tower.profile("home", url, tries=1)
    assert (await tower.post(event(id_)))[0] in (200, 202)
    shown = await tower.until_state(id_, "failed")
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    return str(shown["deliveries"][0]["recipient"])


async def test_what_has_changed_here_is_counted_at_once(tower: Tower, hook: Receiver) -> None:
    letters = tower.hub.alerts.dead_letters
    await letters.refresh()
    letters._due = float("inf")  # all of them are not counted again
    failed = await fail(tower, "event-1")
    await letters.refresh()
    assert letters.value == 1
    await fail(tower, "event-2")
    await letters.refresh()
    assert letters.value == 2
    await tower.do("deliveries.edit", event="event-1", recipient=failed, url=hook.url)
    await hook.got(1)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await letters.refresh()
    assert letters.value == 1
    await tower.do("alert.resolve", event="event-2")
    await letters.refresh()
    assert letters.value == 0


async def test_what_another_hub_has_changed_is_counted_now_and_then(hubs: list[Tower]) -> None:
    one, two = hubs
    clock = HandClock()
    letters = DeadLetterCount(
        two.hub.alerts.operations, FanoutCounts(), shared=not two.hub.ledger.sole, now=clock.now
    )
    await letters.refresh()
    assert letters.value == 0
    await one.add(Role.SENTINEL, "gate")
    await fail(one, "event-1")
    await letters.refresh()
    assert letters.value == 0, "it is not time yet"
    clock.time += RECOUNT_SECONDS
    await letters.refresh()
    assert letters.value == 1
    await one.do("alert.resolve", event="event-1")
    clock.time += RECOUNT_SECONDS
    await letters.refresh()
    assert letters.value == 0


async def test_a_ledger_that_nothing_has_changed_is_not_read(tower: Tower) -> None:
    clock, read = HandClock(), 0
    operations = tower.hub.alerts.operations
    letters = DeadLetterCount(operations, FanoutCounts(), shared=False, now=clock.now)
    deliveries = operations.deliveries

    async def counting(*, state: str = "", limit: int = 50) -> object:
        nonlocal read
        read += 1
        return await deliveries(state=state, limit=limit)

    operations.deliveries = counting  # type: ignore[method-assign,assignment]  # counts the reads
    for _ in range(3):
        await letters.refresh()
        clock.time += RECOUNT_SECONDS
    assert read == 1
