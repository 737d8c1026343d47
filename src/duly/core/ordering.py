"""Ordering: decides in which order the messages of a lane take effect.

The law. A lane is (recipient, order key). Within a lane, one sender's messages take effect in that sender's
order; messages of different senders, in order of arrival. The sender's own counter decides. Its clock decides
only if it has no counter, and a time is never believed further ahead than `drift`, so one fast clock cannot
block a lane.

A message that follows the previous one is released **at once**. A message behind a gap waits, at most for the
window; after that the missing message is late. `replay` runs every message, `latest` only the newest. A
number that was refused or went to another lane counts as arrived and leaves no gap.

Superseding. In `latest`, the newest message that is handed over supersedes the older ones. In `replay`, a
late message is superseded only if a later one is done, under way or unknown: a later message that still waits
lets the late one go first, and one that failed does not count (`duly.core.high_water`).

Following. Usually a message follows if the number before it has arrived, counting everything that its sender
sends. A hub that passes a message on, to its recipient or to another hub, says `after` which number it comes,
because the receiver does not see the sender's other messages. A message without a counter follows nothing:
`replay` holds it for the whole window to sort it by time. A message numbered 0 (`{ms}_0`) may come from a
sender that does not count. As long as no higher number of its sender has come, it is sorted by time as well,
if its lane has a name or the sender made other messages at almost the same time. A higher number shows that
the sender counts, and ends the wait.

A lane whose recipient cannot be reached, or that is serial and busy, queues messages in each sender's order.

The state here is a copy: the durable high-water mark decides, and the ledger checks it when a message starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.flow_control import FlowWindow, Outstanding
from duly.core.high_water import HighWaterMarks, mark_name, name_of, names_in
from duly.core.lane import Lane, Move, Release, Supersede, is_latest, is_over, lane_key
from duly.core.messages import Message, Mode, Order
from duly.core.operations import OpenDelivery, is_timed
from duly.core.sender_gaps import CHAINS_KEPT, EVERY_GAP, Chain, Chains, HeldMessage
from duly.core.units import MS, SECOND
from duly.errors import Malformed

LATE: Final = "a later one took effect, or may have, before it arrived"
NEWER: Final = "a newer one was handed over in its place"
_ANY: Final = Mode.ANY  # reading a member from its class takes nine times as long
BURST: Final = 1_000
"""Messages of one sender with number 0 that were made within this time (ms) are sorted by time."""


class LanePolicy(Struct, frozen=True):
    """How lanes wait for gaps, and how much they hand over at once."""

    window: int = 300 * MS
    """how long a message waits for a gap before it"""
    drift: int = 2 * SECOND
    """how far ahead of the local clock a sender's time is believed"""
    serial: bool = False
    """whether a lane's next message starts only when the previous one has finished (a handler), rather than
    when it has been handed over (a transport)"""
    gated: bool = False
    """whether a lane moves only while its recipient is reachable, because recipients come and go"""
    width: int | None = None
    """how many messages without order a recipient may have under way at once; None: no limit"""
    ahead: FlowWindow | None = None
    """how much may be under way to a recipient before it acknowledges; None: no limit"""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise Malformed("the width of a lane must be at least one message")
        if self.ahead is not None and (self.serial or self.width is not None):
            raise Malformed("limit a lane either by acknowledgements or by messages under way, not by both")
        if self.window < 0 or self.drift < 0:
            raise Malformed("the window and drift of a lane must be lengths of time, 0 or more")


class Lanes:
    """The lanes of one inbox."""

    def __init__(
        self, policy: LanePolicy | None = None, marks: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._policy = policy or LanePolicy()
        self._gated = self._policy.gated
        self._counted = self._policy.serial or self._policy.width is not None
        """whether messages under way are counted, because their number is limited"""
        ahead = self._policy.ahead
        self._outstanding = None if ahead is None else Outstanding(ahead)
        self._marks = HighWaterMarks()
        self._chains = Chains(self._policy.window)
        self._passed: OrderedDict[str, int] = OrderedDict()
        """the number last passed on to another hub, by mark"""
        self._lanes: dict[str, dict[str | None, Lane]] = {}
        self.reachable: set[str] = set()
        for mark, (n, ms) in (marks or {}).items():
            if mark.startswith("["):  # marks with other names do not belong to lanes
                self._restore(mark, n, ms)

    def _restore(self, mark: str, n: int, ms: int) -> None:
        self._marks.restore(mark, n, ms)
        timed = is_timed(n, ms)
        for name in (names_in(mark)[2], mark):
            self._chains.open(name).raise_to(0 if timed else n, ms)

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    def offer(self, message: Message, now: int) -> list[Move]:
        """Add a message, and return the messages that may move now, in order; none if it has to wait."""
        order = message.order
        if order is None:
            return self._start(message)
        n, after, scope = order.n, order.after, message.scope
        if order.mode is _ANY:
            counted = n is not None and after is None
            following = self.arrived(scope, n or 0, message.made, now) if counted else []
            return [*self._start(message), *following]
        mark = name_of(message.recipient, order.key, scope)
        if n is None:
            return self._sort(message, mark, now)
        # The time is only compared with times of the same sender: limiting it to the local clock would make
        # a late message of a fast clock look like a sender that starts counting again.
        ms = message.made // MS
        chains = self._chains
        if after is None:
            name, needs = scope, n - 1
            chain = chains.open(name)
            if not n and self._has_only_time(order, chain, ms):
                # If the sender turns out to count, this was its number 0.
                chain.mark, chain.top_ms = 0, max(chain.top_ms, ms)
                return self._sort(message, mark, now)
        else:
            name, needs = mark, after
            chain = chains.open(name)
            if needs > chain.mark and (released := self._marks.get(mark)) is not None:
                # The message names the one before it, which was released here without naming its own.
                chain.mark = max(chain.mark, released[0])
        moves = self._let_all_go(chains.stop_sorting(scope)) if chains.by_time else []
        if needs <= chain.mark < n and not chain.held and not chain.ahead:
            # The usual case: the message follows the previous one, and none waits.
            chain.mark = n
            chain.top_ms = max(chain.top_ms, ms)
            started = self._start(message, mark, n, ms)
            return moves + started if moves else started
        waiting = chains.held_message(message, mark, n, ms, needs, now)
        moves += self._let_go(chain.count_anew(n, ms, needs))
        chain.top_ms = max(chain.top_ms, ms)
        if n <= chain.mark:
            # The number was given up or came through another hub; only the lane's mark shows if it is late.
            return moves + self._let_go([waiting])
        chains.hold(name, chain, waiting)
        return moves + self._let_go(chain.follow())

    def _has_only_time(self, order: Order, chain: Chain, ms: int) -> bool:
        """Return whether a number 0 is no position: the sender was never seen to count, and earlier messages
        may still come."""
        if order.mode is not Mode.REPLAY or chain.mark > 0 or not chain.idle:
            return False
        return bool(order.key) or 0 < abs(ms - chain.top_ms) < BURST

    def _sort(self, message: Message, mark: str, now: int) -> list[Move]:
        """Add a message that can only be sorted by its time. `replay` holds it for the window, in case older
        messages come."""
        assert message.order is not None
        ms = min(message.made or now, now + self._policy.drift) // MS
        if message.order.mode is Mode.LATEST:
            return self._let_go([self._chains.held_message(message, mark, ms, ms, ms, now)])
        waiting = self._chains.held_message(message, mark, ms, ms, EVERY_GAP, now)
        self._chains.sort_by_time(message.scope, waiting, counts=message.order.n is not None)
        return []

    def arrived(self, scope: str, n: int, made: int, now: int) -> list[Move]:
        """Record a number of this sender that needs no lane here, because its message was refused, has no
        order, or went to another hub; return the messages that may move now."""
        return self._let_all_go(self._chains.arrive(scope, n, made // MS, now))

    # ── other hubs ───────────────────────────────────────────────────────────────────────────────

    def leave(self, message: Message, now: int) -> tuple[Message, list[Move]]:
        """Pass on a message whose lane another hub keeps. If all numbers before it have arrived, the returned
        message says which number it comes after, since the other hub does not see the sender's other
        messages."""
        order = message.order
        if order is None or order.n is None or order.after is not None:
            return message, []
        n, scope = order.n, message.scope
        chain = self._chains.open(scope)
        late = n <= chain.mark and message.made // MS <= chain.top_ms
        moves = self.arrived(scope, n, message.made, now)
        if order.mode is Mode.ANY or late:
            return message, moves
        mark = mark_name(message)
        after = max(self._passed.get(mark, -1), self._marks.last(mark))
        self._passed[mark] = n
        self._passed.move_to_end(mark)
        if len(self._passed) > CHAINS_KEPT:
            self._passed.popitem(last=False)
        if n > chain.mark or after >= n:
            return message, moves
        return msgspec.structs.replace(message, order=Order(order.key, order.mode, n, after)), moves

    def catch_up(self, message: Message) -> list[Move]:
        """Stop waiting for numbers before a message that another hub passed on. If the message says which
        number it comes after, all earlier numbers of its sender have arrived at that hub."""
        order = message.order
        if order is None or order.n is None or order.after is None:
            return []
        mark = mark_name(message)
        chain = self._chains.open(message.scope)
        at = self._marks.get(mark)
        released = -1 if at is None else at[0]
        chain.raise_to(order.n - (released < order.n), message.made // MS)
        moves = self._let_go(chain.follow())
        lane = self._chains.get(mark)
        if lane is not None and lane.held and (at := self._marks.get(mark)) is not None:
            lane.mark = max(lane.mark, at[0])
            moves += self._let_go(lane.follow())
        return moves

    def learn(self, marks: Mapping[str, tuple[int, int]]) -> None:
        """Adopt the marks of lanes that another hub kept until now."""
        for mark, (n, ms) in marks.items():
            if not self._marks.is_late(mark, n, ms):
                self._restore(mark, n, ms)

    def lower(self, limit: int) -> None:
        """Lower the times (ms) that a wrong clock has set into the future, as the ledger does."""
        self._marks.lower(limit)
        self._chains.lower(limit)

    def forget(self, recipient: str) -> None:
        """Drop a recipient's lanes, which another hub may keep now, with the messages that wait in them."""
        self.lose(recipient)
        self._lanes.pop(recipient, None)
        for mark in self._marks.forget(recipient):
            self._chains.remove(mark)
        self._chains.remove_messages(recipient)

    def occupy(self, message: Message) -> None:
        """Count a message that was released before a restart as under way."""
        if self._width(message):
            self._lane(message).holders.add(message.key)
        if self._outstanding is not None:
            self._outstanding.take(message.recipient, message.key, len(message.body))

    def acknowledged(self, message: Message, now: int = 0) -> list[Move]:
        """Free the window of an acknowledged message, and return the messages that may move now."""
        recipient, outstanding = message.recipient, self._outstanding
        if outstanding is None or not outstanding.release(recipient, message.key):
            return []
        return self._advance(recipient, now) if recipient in self._lanes else []

    def has_room(self, recipient: str) -> bool:
        """Return whether the window of this recipient has room for a message."""
        return self._outstanding is None or self._outstanding.has_room(recipient)

    def finished(self, message: Message, now: int = 0, *, counts: bool = True) -> list[Move]:
        """Record the end of a message, and return the messages that may move now. A message that failed
        (`counts` off) does not make earlier messages late; one that was never released is removed from its
        gap and its queue."""
        order, recipient, key = message.order, message.recipient, message.key
        if order is not None and order.mode is not _ANY:
            self._marks.settled(name_of(recipient, order.key, message.scope), key, counts=counts)
        lanes, outstanding = self._lanes.get(recipient), self._outstanding
        if outstanding is not None:
            freed = [] if outstanding.release(recipient, key) else self._withdraw(message)
            return freed if recipient not in self._lanes else freed + self._advance(recipient, now)
        lane = None if lanes is None else lanes.get(lane_key(message))
        if lane is None or key not in lane.holders:
            return self._withdraw(message)
        lane.holders.remove(key)
        return self._advance(recipient, now)

    def without(self, message: Message) -> Release | None:
        """Return the position to which a mark is lowered if this message fails; None if it stays."""
        order = message.order
        if order is None or order.mode is Mode.ANY:
            return None
        mark = mark_name(message)
        at = self._marks.without(mark, message.key)
        return None if at is None else Release(message, mark, *at, -1)

    def drop(self, message: Message) -> None:
        """Remove a queued message that has ended, so that it supersedes nothing."""
        lanes = self._lanes.get(message.recipient)
        lane = None if lanes is None else lanes.get(lane_key(message))
        if lane is not None:
            lane.drop(message.key)

    def _withdraw(self, message: Message) -> list[Move]:
        """Remove a message that has ended while it waited, and return the messages that may move now."""
        self.drop(message)
        if not self._chains.waits or message.order is None or message.order.mode is _ANY:
            return []
        return self._let_go(self._chains.withdraw(message.scope, mark_name(message), message.key))

    def reach(self, recipient: str, now: int = 0) -> list[Move]:
        """Release the messages that are queued for a recipient that can be reached now, in order."""
        self.reachable.add(recipient)
        return self._advance(recipient, now)

    def lose(self, recipient: str) -> None:
        """Queue later messages for a recipient that can no longer be reached."""
        self.reachable.discard(recipient)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Move]:
        """Give up the gaps whose window is over, and return the messages that may move now."""
        return self._let_all_go(self._chains.wake(now))

    def next_wake(self) -> int | None:
        """Return when the next gap is given up, or None."""
        return self._chains.next_wake()

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: windows keep their length."""
        self._chains.shift(by)

    @property
    def waiting(self) -> int:
        """The number of messages that wait for a gap or in a lane."""
        lanes = [lane for lanes in self._lanes.values() for lane in lanes.values()]
        return self._chains.waiting + sum(lane.waiting for lane in lanes)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _let_all_go(self, freed: Iterable[list[HeldMessage]]) -> list[Move]:
        return [move for free in freed for move in self._let_go(free)]

    def _let_go(self, free: Sequence[HeldMessage]) -> list[Move]:
        """Release messages that no longer wait for a gap, or queue them if their lane cannot move yet."""
        if len(free) == 1:
            (one,) = free
            return self._start(one.message, one.mark, one.number, one.ms)
        moves: list[Move] = []
        for one in free:
            moves += self._queue(one.message, one.mark, one.number, one.ms)
        for recipient in dict.fromkeys(one.message.recipient for one in free):
            moves += self._advance(recipient)
        return moves

    def _start(self, message: Message, mark: str = "", n: int = 0, ms: int = 0) -> list[Move]:
        recipient = message.recipient
        if (
            (recipient in self._lanes and self._has_to_wait(message))
            or (self._gated and recipient not in self.reachable)
            or (self._outstanding is not None and not self._outstanding.has_room(recipient))
        ):
            return self._queue(message, mark, n, ms)
        return [self._release(message, mark, n, ms)]

    def _has_to_wait(self, message: Message) -> bool:
        """Return whether other messages wait in this message's lane, or the lane is busy."""
        lane = self._lanes[message.recipient].get(lane_key(message))
        return lane is not None and not (lane.free and lane.empty)

    def _queue(self, message: Message, mark: str, n: int, ms: int) -> list[Move]:
        if mark and self._marks.is_late(mark, self._number(message, mark, n, ms), ms):
            return [Supersede(message, LATE, mark, n, ms)]
        self._lane(message).add(Release(message, mark, n, ms, -1))
        return []

    def _advance(self, recipient: str, now: int = 0) -> list[Move]:
        """Release queued messages of a recipient, as many as its limits allow; if acknowledgements limit
        them, its lanes take turns."""
        lanes = self._lanes.get(recipient, {})
        moves: list[Move] = []
        if not self._gated or recipient in self.reachable:
            if self._outstanding is None:
                for lane in list(lanes.values()):
                    while lane.free and not lane.empty:
                        moves += self._take(lane, now)
            else:
                while lanes and self._outstanding.has_room(recipient):
                    key = next(iter(lanes))
                    lane = lanes.pop(key)
                    if not lane.empty:
                        moves += self._take(lane, now)
                        lanes[key] = lane  # behind the others
        if self._outstanding is None:
            for key in [key for key, lane in lanes.items() if lane.empty and not lane.holders]:
                del lanes[key]
        if not lanes:
            self._lanes.pop(recipient, None)
        return moves

    def _take(self, lane: Lane, now: int) -> list[Move]:
        """Return the move of the next message in a queue. In `latest`, a message with a newer one behind it
        is superseded."""
        queued = lane.pop()
        if is_over(queued, now):
            return [queued]  # expired: it supersedes nothing
        if is_latest(queued) and (follows := lane.peek(now)) is not None and is_latest(follows):
            return [Supersede(queued.message, NEWER)]
        return [self._release(queued.message, queued.mark, queued.n, queued.ms)]

    def _release(self, message: Message, mark: str, n: int, ms: int) -> Move:
        after = -1
        if mark:
            if message.order is None or message.order.n != n:
                n = self._number(message, mark, n, ms)
            last = self._marks.hand_over(mark, message.key, n, ms)
            if last is None:
                return Supersede(message, LATE, mark, n, ms)
            if last < n:
                after = last  # otherwise the sender counts again, or the last message failed
        if self._outstanding is not None:
            self._outstanding.take(message.recipient, message.key, len(message.body))
        if self._counted and self._width(message):
            self._lane(message).holders.add(message.key)
        return Release(message, mark, n, ms, after)

    def _number(self, message: Message, mark: str, n: int, ms: int) -> int:
        """Return the number of a message. Messages sorted by time and made in the same millisecond get
        numbers in order of arrival."""
        if message.order is not None and message.order.n == n:
            return n
        before = self._marks.get(mark)
        return max(n, before[0] + 1) if before is not None and ms == before[1] else n

    def _width(self, message: Message) -> int:
        """Return how many messages may be under way at once in this message's lane; 0: no limit."""
        if lane_key(message) is None:
            return self._policy.width or 0
        return 1 if self._policy.serial else 0

    def _lane(self, message: Message) -> Lane:
        lanes = self._lanes.setdefault(message.recipient, {})
        key = lane_key(message)
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane(self._width(message))
        return lane


def in_senders_order(open_: Sequence[OpenDelivery]) -> list[OpenDelivery]:
    """Return the deliveries with those of each sender sorted by number. A ledger sorts messages that were
    accepted at the same moment by key, where 10 comes before 9."""
    positions: dict[str, list[int]] = {}
    for at, item in enumerate(open_):
        if item.message.order is not None and item.message.order.n is not None:
            positions.setdefault(item.message.scope, []).append(at)
    sorted_ = list(open_)
    for taken in positions.values():
        items = sorted((open_[at] for at in taken), key=_number)
        for at, item in zip(taken, items, strict=True):
            sorted_[at] = item
    return sorted_


def _number(item: OpenDelivery) -> tuple[int, int]:
    order = item.message.order
    return item.message.made, 0 if order is None else order.n or 0
