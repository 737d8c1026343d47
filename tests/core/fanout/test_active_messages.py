"""What a fanout has under way: deliveries come, expire and go, and a message goes with its last one."""

from __future__ import annotations

from duly.core.fanout.active_messages import ActiveMessage, ActiveMessages
from duly.core.fanout.recipient_queue import QueuedDelivery, RecipientPolicy
from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.operations import Delivery, DeliveryRef, OpenDelivery
from duly.core.units import SECOND

NOW = 1_700_000_000 * SECOND
MESSAGE = Message("gate", "event-1", "alert_event", "home", b"{}", NOW)
REF = DeliveryRef(MESSAGE.key, "alert", "ann")


def active() -> ActiveMessages:
    return ActiveMessages(lambda recipient: RecipientPolicy())


def delivery(recipient: str, expires: int = 0) -> QueuedDelivery:
    ref = DeliveryRef(MESSAGE.key, "alert", recipient)
    return QueuedDelivery(ref, MESSAGE, NOW, expires, "")


def test_a_message_goes_with_its_last_delivery() -> None:
    under_way = active()
    live = under_way.lives[MESSAGE.key] = ActiveMessage(MESSAGE, [], committed=True)
    ann, bob = delivery("ann"), delivery("bob")
    under_way.enter(live, ann)
    under_way.enter(live, bob)
    under_way.strike(ann)
    assert [*under_way.lives] == [MESSAGE.key]
    under_way.strike(bob)
    assert not under_way.lives
    assert not under_way.items


def test_a_delivery_may_go_after_its_message() -> None:
    under_way = active()
    late = delivery("ann")
    under_way.strike(late)
    assert late.gone
    assert not under_way.lives


def test_the_open_deliveries_of_a_message_are_revived_as_one_message() -> None:
    under_way = active()
    open_ = OpenDelivery(MESSAGE, State.DELIVERED, Delivery(REF, State.ACCEPTED, 0, NOW))
    first = under_way.revive(open_, {})
    assert first.reached
    assert under_way.revive(open_, {}) is first


def test_a_delivery_that_is_being_attempted_does_not_expire() -> None:
    under_way = active()
    live = ActiveMessage(MESSAGE, [], committed=True)
    waiting, attempted = delivery("ann", NOW + SECOND), delivery("bob", NOW + SECOND)
    attempted.under_way = True
    under_way.enter(live, waiting)
    under_way.enter(live, attempted)
    assert under_way.next_expiry() == NOW + SECOND
    assert [*under_way.expired(NOW)] == []
    assert [*under_way.expired(NOW + SECOND)] == [waiting]
