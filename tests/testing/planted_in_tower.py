"""Bugs to plant in the fanout of alerts. The checkers must find every one of them."""

from __future__ import annotations

from typing import Any

import pytest

from duly.core.fanout.active_messages import ActiveMessages
from duly.core.fanout.attempts import Attempts
from duly.core.fanout.machine import Fanout
from duly.core.fanout.recipient_queue import QueuedDelivery, QueueName
from duly.core.steps import Todo
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


def _unclaimed(self: Fanout, batch: list[QueuedDelivery], where: QueueName, now: int) -> list[Todo]:
    """Sends without claiming first."""
    for item in batch:
        item.attempt += 1
    return [self._start(batch, where[1])]


def _no_doubt(self: Attempts, item: QueuedDelivery, now: int) -> list[Todo]:
    """Takes what a crash cut off for not sent."""
    item.leased = False
    return self._again(item, "cut off", None, now, [])


def _forgetful(self: Attempts, item: QueuedDelivery, *_: Any) -> list[Todo]:
    """Loses what failed instead of trying it again."""
    self._active.strike(item)
    return []


def _shift_of_what_is_stored(self: ActiveMessages, by: int, seen: int) -> None:
    """Moves the timers of queues, and not what is in none."""
    for live in self.lives.values():
        live.planned = ()
    queued = {item for queue in self.queues._queues.values() for item in (*queue._waiting, *queue._first)}
    every, self.items = self.items, {ref: item for ref, item in self.items.items() if item in queued}
    _shift(self, by, seen)
    self.items = every


_shift = ActiveMessages.shift


@breaks("notified_once")
def sent_without_a_claim(patch: Patch) -> None:
    """An attempt is not noted before it is made, so a crash makes it again."""
    patch.setattr(Fanout, "_launch", _unclaimed)


@breaks("notified_once")
def cut_off_is_not_sent(patch: Patch) -> None:
    """What a crash cut off counts as not sent."""
    patch.setattr(Attempts, "cut_off", _no_doubt)


@breaks("deliveries_ended")
def what_failed_is_lost(patch: Patch) -> None:
    """What failed once is not tried again."""
    patch.setattr(Attempts, "_again", _forgetful)


@breaks("notified_in_time")
def a_clock_set_during_a_commit(patch: Patch) -> None:
    """A clock that is set while a message is stored delays its deliveries."""
    patch.setattr(ActiveMessages, "shift", _shift_of_what_is_stored)


PLANTED = planted(sent_without_a_claim, cut_off_is_not_sent, what_failed_is_lost, a_clock_set_during_a_commit)
