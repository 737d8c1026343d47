"""What needs a person is counted at once where something has changed, and all of it now and then."""

from __future__ import annotations

from duly.apps.alerts.alert_backlog import RECOUNT_SECONDS, AlertBacklog
from duly.apps.alerts.unnotified_alerts import LONG_TRIED
from duly.identity.accounts import Role
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from tests.apps.alerts.conftest import Tower, event
from tests.apps.alerts.test_telling import mail_to
from tests.receivers import Mailbox, Receiver, receiver

ANN = DashboardVisitor("ann", DashboardRole.VIEWER)


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


async def fail(tower: Tower, id_: str, **data: str) -> str:
    """Give up a notification; returns the label of its recipient."""
    async with receiver() as gone:
        url = gone.url
    await tower.profile("home", url, tries=1)
    assert (await tower.post(event(id_, **data)))[0] in (200, 202)
    shown = await tower.until_state(id_, "failed")
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    return str(shown["deliveries"][0]["recipient"])


async def test_what_has_changed_here_is_counted_at_once(tower: Tower, hook: Receiver) -> None:
    backlog = tower.hub.alerts.backlog
    await backlog.refresh()
    backlog._due = float("inf")  # all of them are not counted again
    failed = await fail(tower, "event-1")
    await backlog.refresh()
    assert backlog.dead_letters == 1
    await fail(tower, "event-2")
    await backlog.refresh()
    assert backlog.dead_letters == 2
    await tower.do("deliveries.edit", event="event-1", recipient=failed, url=hook.url)
    await hook.got(1)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await backlog.refresh()
    assert backlog.dead_letters == 1
    await tower.do("alert.resolve", event="event-2")
    await backlog.refresh()
    assert backlog.dead_letters == 0


async def test_what_another_hub_has_changed_is_counted_now_and_then(hubs: list[Tower]) -> None:
    one, two = hubs
    clock = HandClock()
    backlog = AlertBacklog(two.hub.alerts.operations, two.hub.alerts._fanout, shared=True, now=clock.now)
    await backlog.refresh()
    assert backlog.dead_letters == 0
    await one.add(Role.SENTINEL, "gate")
    await fail(one, "event-1")
    await backlog.refresh()
    assert backlog.dead_letters == 0, "it is not time yet"
    clock.time += RECOUNT_SECONDS
    await backlog.refresh()
    assert backlog.dead_letters == 1
    await one.do("alert.resolve", event="event-1")
    clock.time += RECOUNT_SECONDS
    await backlog.refresh()
    assert backlog.dead_letters == 0


async def test_a_ledger_that_nothing_has_changed_is_not_read(tower: Tower) -> None:
    clock, read = HandClock(), 0
    operations = tower.hub.alerts.operations
    backlog = AlertBacklog(operations, tower.hub.alerts._fanout, shared=False, now=clock.now)
    newest_pages = operations.newest_pages

    def counting(limit: int) -> object:
        nonlocal read
        read += 1
        return newest_pages(limit)

    operations.newest_pages = counting  # type: ignore[method-assign,assignment]  # counts the reads
    for _ in range(3):
        await backlog.refresh()
        clock.time += RECOUNT_SECONDS
    assert read == 1


async def now_needed(tower: Tower) -> tuple[int, int, int]:
    """What the status page shows: in doubt, critical without a recipient, and open deliveries."""
    counters = await tower.hub.dashboard.view(ANN, "alerts-status", {})
    assert isinstance(counters, dict)
    shown = {one["name"]: one["value"] for one in counters["counters"]}
    return shown["in_doubt"], shown["critical_untold"], shown["open_deliveries"]


async def test_what_needs_a_person_outlives_a_restart_and_goes_when_a_person_has_seen_to_it(
    tower: Tower, box: Mailbox, hook: Receiver
) -> None:
    await tower.profile("home", mail_to(box, "&doubt=stop"))
    box.words = ["close after"]
    await tower.post(event("event-1", severity="critical"))
    await tower.until_state("event-1", "unknown")
    failed = await fail(tower, "event-2", severity="critical")
    await tower.hub.alerts.backlog.refresh()
    assert await now_needed(tower) == (1, 2, 0)
    await tower.stop()
    await tower.start()
    assert await now_needed(tower) == (1, 2, 0)
    await tower.do("alert.ack", event="event-1")
    await tower.do("deliveries.edit", event="event-2", recipient=failed, url=hook.url)
    await hook.got(1)
    await tower.until(lambda: not tower.hub.alerts._fanout)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await tower.hub.alerts.backlog.refresh()
    assert await now_needed(tower) == (0, 0, 0)


async def test_the_status_page_shows_the_same_at_every_hub(hubs: list[Tower], hook: Receiver) -> None:
    one = hubs[0]
    await one.add(Role.SENTINEL, "gate")
    hook.words = ["500"] * 1_000
    await one.profile("home", hook.url)
    assert (await one.post(event("event-1", severity="critical")))[0] in (200, 202)
    await one.until(lambda: len(hook.requests) > LONG_TRIED)
    await one.until(lambda: not one.hub.alerts.tasks.busy)
    for tower in hubs:
        tower.hub.alerts.backlog._due = 0.0
        await tower.hub.alerts.backlog.refresh()
        assert await now_needed(tower) == (0, 1, 1)
    await one.do("alert.ack", event="event-1")
    await one.until(lambda: not one.hub.alerts._fanout)
    for tower in hubs:
        tower.hub.alerts.backlog._due = 0.0
        await tower.hub.alerts.backlog.refresh()
        assert await now_needed(tower) == (0, 0, 0)
