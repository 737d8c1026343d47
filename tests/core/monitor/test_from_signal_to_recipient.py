"""From a signal to its recipients: a sentinel and a tower in one virtual time (验证方式: the list of checks).

The same over real connections: tests/clients/test_sentinel.py and tests/apps/alerts; with kills:
tests/clients/test_sentinel_kills.py and tests/end_to_end/test_alert_kills.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from duly.core.fanout.plan import AttemptResult
from duly.core.messages import Message, VerdictKind
from duly.core.monitor.signals import DeviceBack, SentinelPolicy, SignalRuling
from duly.core.monitor.suppression import Ruling
from duly.core.operations import Admit, Deliver, DeliveryRef
from duly.core.retry import RetryPolicy
from duly.core.steps import MachineEffect, MachineEvent, Reachable, Transmit, Unreachable
from duly.core.units import DAY, HOUR, SECOND
from duly.storage import open_ledger
from tests.core.driving import only
from tests.core.fanout.test_machine import FanoutTower, batches, verdicts
from tests.core.monitor.watching import Watch

AT_ONCE = SentinelPolicy(countdown=0)

# ── 1: Sentinel 端幂等验证 ────────────────────────────────────────────────────────────────────────


def test_1_a_fast_disconnects_and_reconnects_start_one_countdown_and_one_event_id() -> None:
    watch = Watch()
    ids = {watch.signal().event}
    for _ in range(5):
        watch.wait(1)
        watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
        ids.add(watch.signal().event)
    watch.wait(60)
    assert [message.id for message in watch.sent()] == [*ids]


def test_1_b_the_same_device_disconnecting_again_is_one_event_id() -> None:
    watch = Watch(AT_ONCE)
    first = watch.signal()
    watch.wait(29)
    assert watch.signal().decision.ruling is Ruling.DEBOUNCED
    assert [message.id for message in watch.sent()] == [first.event]


def test_1_c_a_disconnect_after_a_cancel_obeys_the_cooldown() -> None:
    watch = Watch()
    watch.signal()
    watch.call_off()
    watch.wait(299)
    assert watch.signal().decision.ruling is Ruling.COOLING
    assert watch.wait(0.9) == []
    ruled = [
        one.what
        for one in watch.wait(0.1)
        if isinstance(one, MachineEffect) and isinstance(one.what, SignalRuling)
    ]
    assert [one.decision.passes for one in ruled] == [True]  # the device is still away: it is judged again


# ── 2: Tower 端去重验证 ───────────────────────────────────────────────────────────────────────────


def test_2_a_the_same_event_id_sent_again_is_processed_once() -> None:
    tower = FanoutTower("mail")
    first = tower.report()
    again = [effect for _ in range(5) for effect in tower.report()]
    assert (len(batches(first)), batches(again)) == (1, [])
    assert verdicts(again) == ["duplicate"] * 5


async def test_2_b_the_unique_key_refuses_a_second_row_of_an_event_and_of_a_delivery(tmp_path: Path) -> None:
    async with await open_ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        now = ledger.clock.now()
        message = Message("gate", "event-1", "alert_event", "home", b"{}", now)
        delivery = Deliver(DeliveryRef(message.key, "alert", "mail", 0), now, now + DAY)
        for word in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
            admit = Admit(message, now + DAY, now, then=(delivery, delivery))
            verdict = await ledger.apply(admit)
            assert verdict.kind is word
        assert len(await ledger.deliveries(message.key)) == 1


async def test_2_c_concurrent_uploads_of_one_event_are_one_event(tmp_path: Path) -> None:
    async with await open_ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        now = ledger.clock.now()
        message = Message("gate", "event-1", "alert_event", "home", b"{}", now)
        found = await asyncio.gather(*(ledger.apply(Admit(message, now + DAY, now)) for _ in range(100)))
        words = [verdict.kind for verdict in found]
        assert (words.count(VerdictKind.FRESH), words.count(VerdictKind.DUPLICATE)) == (1, 99)


# ── 3: 重试机制验证 ───────────────────────────────────────────────────────────────────────────────


def test_3_a_a_network_that_fails_is_tried_again_ever_more_slowly() -> None:
    tower = FanoutTower("hook")
    (batch,) = batches(tower.report())
    for wait in (5, 10, 20, 40, 80):
        tower.went(batch, AttemptResult.NOT_SENT, "no network")
        assert batches(tower.driver.wait(wait - 0.001)) == []
        (batch,) = batches(tower.driver.wait(0.001))


def test_3_b_the_queues_of_both_survive_a_restart() -> None:
    watch = Watch(AT_ONCE, online=False)
    event = watch.signal().event
    watch = watch.restarted()
    assert [message.id for message in watch.sent()] == [event]
    before = FanoutTower("hook")
    (batch,) = batches(before.report())
    before.went(batch, AttemptResult.NOT_SENT, "no network")
    after = FanoutTower("hook", disk=before.disk, clock=before.clock, worker="next")
    assert [one.items[0].attempt for one in batches(after.driver.wait(5))] == [2]


def test_3_c_after_the_last_allowed_attempt_it_stops_and_says_so() -> None:
    tower = FanoutTower("hook", retry=RetryPolicy.exponential(5 * SECOND, HOUR, tries=10, jitter=0))
    (batch,) = batches(tower.report())
    for _ in range(9):
        tower.went(batch, AttemptResult.NOT_SENT, "no network")
        (batch,) = batches(tower.driver.wait(3_600))
    tower.went(batch, AttemptResult.NOT_SENT, "no network")
    assert tower.state() == "failed"
    assert tower.driver.wait(100_000) == []


# ── 4: Failure Modes ─────────────────────────────────────────────────────────────────────────────


def test_4_fm_d2_an_event_that_is_sent_twice_is_recorded_once() -> None:
    watch, tower = Watch(AT_ONCE), FanoutTower("mail")
    watch.signal()
    watch.wait(6)  # the answer was lost
    sent = [one.message for one in only(Transmit, watch.effects)]
    said = [word for message in sent for word in verdicts(tower.report(message))]
    assert said == ["fresh", "duplicate"]
    assert len(tower.disk.messages) == 1


def test_4_fm_n1_without_a_network_for_a_day_the_event_arrives_in_the_end() -> None:
    watch, tower = Watch(AT_ONCE, online=False), FanoutTower("mail")
    watch.signal()
    watch.wait(86_400)
    tower.clock.set(watch.clock.now())
    (sent,) = only(Transmit, watch.give(Reachable("")))
    assert verdicts(tower.report(sent.message)) == ["fresh"]


def test_4_fm_d1_a_crash_on_either_side_of_the_answer_leaves_both_in_agreement() -> None:
    watch, tower = Watch(AT_ONCE), FanoutTower("mail")
    watch.signal()
    (message,) = watch.sent()
    (batch,) = batches(tower.report(message))
    tower = FanoutTower("mail", disk=tower.disk, clock=tower.clock, worker="next")
    watch = watch.restarted()
    assert [verdicts(tower.report(one)) for one in watch.sent()] == [["duplicate"]]
    (again,) = batches(tower.driver.wait(0))
    assert again.items[0].ref == batch.items[0].ref, "the same key, so that the receiver can tell"
    tower.went(again)
    watch.take(message)
    assert tower.states() == {("mail", 0): "done"}
    assert watch.restarted().sent() == []


# ── 5: Journey ───────────────────────────────────────────────────────────────────────────────────


def test_5_sentinel_c2_an_event_keeps_the_id_it_was_made_with_until_the_tower_has_it() -> None:
    watch = Watch()
    event = watch.signal().event
    watch.wait(20)
    watch.give(Unreachable(""))
    watch = watch.restarted()
    watch.wait(3_600)  # another full hour
    assert {one.message.id for one in only(Transmit, watch.effects)} == {event}


def test_5_tower_c2_what_comes_again_gets_the_state_it_has_come_to() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    tower.went(batch)
    assert (tower.state(), verdicts(tower.report())) == ("done", ["duplicate"])


def test_5_r4_over_a_bad_network_each_of_five_alarms_is_told_once_and_in_order() -> None:
    watch, tower = Watch(AT_ONCE, online=False), FanoutTower("mail")
    ids = [watch.signal(device=f"band-{n}").event for n in range(5)]
    told: list[str] = []
    for taken in range(5):  # each time the network holds for one answer only
        for one in only(Transmit, watch.give(Reachable(""))):
            for batch in batches(tower.report(one.message)):
                told += (item.message.id for item in batch.items)
                tower.went(batch)
        watch.take(watch.sent()[taken])
        watch.give(Unreachable(""))
    assert told == ids
    assert only(Transmit, watch.give(Reachable(""))) == []
