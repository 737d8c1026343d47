"""A message is admitted only if what its sender's right rests on is still so, in the same transaction."""

from __future__ import annotations

import pytest

from duly.core.messages import Mode, Order
from duly.core.operations import CheckItem, DropItem, PutItem
from duly.core.steps import Arrived, Reachable, Reply, Transmit
from tests.core.driving import Driver, only
from tests.core.test_inbox import done, message, receiver, words

GIVEN = (CheckItem("principals", "app", b"row"), CheckItem("grants", "app/lock"))


def has_right(inbox: Driver) -> None:
    inbox.ledger.execute((PutItem("principals", "app", b"row"),))
    inbox.ledger.execute((PutItem("grants", "app/lock", b""),))


def test_who_still_has_the_right_is_served_as_ever() -> None:
    inbox = receiver()
    has_right(inbox)
    effects = inbox.give(Arrived(message(), "c1", given=GIVEN))
    assert [type(effect) for effect in effects] == [Reply, Transmit]
    assert words(inbox.give(Arrived(message(), "c2", given=GIVEN))) == ["duplicate"]


@pytest.mark.parametrize(
    "lost",
    [DropItem("grants", "app/lock"), DropItem("principals", "app"), PutItem("principals", "app", b"another")],
)
@pytest.mark.parametrize("order", [None, Order("power", Mode.REPLAY, 0), Order("power", Mode.LATEST, 0)])
def test_who_has_lost_it_meanwhile_is_refused_and_nothing_runs(
    lost: DropItem | PutItem, order: Order | None
) -> None:
    inbox = receiver()
    has_right(inbox)
    inbox.ledger.execute((lost,))
    effects = inbox.give(Arrived(message(0, order), "c1", given=GIVEN))
    assert [type(effect) for effect in effects] == [Reply]
    assert only(Reply, effects)[0].verdict.cause == "not_allowed"
    assert [r.word for r in inbox.ledger.disk.refusals] == ["not_allowed"]
    has_right(inbox)
    effects = inbox.give(Arrived(message(0, order), "c1", given=GIVEN))
    assert words(effects) == ["fresh"], "a refusal does not burn the id"


def test_those_behind_a_refused_one_need_not_wait_for_it() -> None:
    inbox = receiver()
    has_right(inbox)
    first, second, third = (message(n, Order("power", Mode.REPLAY, n)) for n in range(3))
    inbox.give(Arrived(first, "c1", given=GIVEN))
    inbox.ledger.execute((DropItem("grants", "app/lock"),))
    assert words(inbox.give(Arrived(second, "c1", given=GIVEN))) == ["refused"]
    has_right(inbox)
    assert words(inbox.give(Arrived(third, "c1", given=GIVEN))) == ["fresh"]
    effects = inbox.give(done(first))
    assert [one.message.id for one in only(Transmit, effects)] == [third.id]


def test_one_that_was_repeated_while_it_was_judged_is_answered_to_both() -> None:
    inbox = receiver()
    todo = inbox.machine.handle(Arrived(message(), "c1", given=GIVEN), inbox.clock.now())
    assert inbox.machine.handle(Arrived(message(), "c2", given=GIVEN), inbox.clock.now()) == []
    inbox.carry_out(todo)
    assert [reply.origin for reply in only(Reply, inbox.effects)] == ["c1", "c2"]
    assert words(inbox.effects) == ["refused", "refused"]
    assert not only(Transmit, inbox.give(Reachable("lock")))
