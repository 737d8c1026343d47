"""Order: in which sequence the messages for one thing take effect.

The law. A lane is (recipient, order key). Within it, one sender's messages take effect in that sender's
order; between senders, in order of arrival. The sender's own counter decides, its clock only where it
has no counter, and then never further ahead than `drift`: one fast clock cannot lock a lane.

A message that follows on is let go **at once**. Only a gap waits, at most the window; after that the
missing one is late. `replay` runs every message, `latest` the newest. What was refused or went to another
lane has arrived too: it leaves no gap.

What supersedes what. In `latest` the newest that is handed over supersedes the older ones. In `replay` a
late message is superseded only if a later one is done, under way or unknown: one that still waits lets it go
first, one that failed does not count (`duly.core.high_water`).

What follows on? Usually "the number before mine has arrived", over all that this sender sends. A hub
that passes a message on, to its recipient or to another hub, says `after` which number it comes, because
the receiver does not see the rest.
A message without a counter follows on from nothing: `replay` must wait the window out to sort it. So must a
number 0 whose sender was never seen to count (`{ms}_0`), if its lane has a name or others came just before:
its time is all that there is to go by. A higher number shows that the sender counts, and ends the wait.

A lane whose recipient cannot be reached, or that is serial and busy, queues, in each sender's order.

Nothing here is the truth: the durable high-water mark is, and the ledger asks it when a message starts.
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

LATE: Final = "a later one took effect, or is under way, before it arrived"
NEWER: Final = "a newer one was handed over in its place"
_ANY: Final = Mode.ANY  # reading a member from its class takes nine times as long
BURST: Final = 1_000
"""Milliseconds: numbers 0 of one sender that were made so close together are sorted by their time."""


class LanePolicy(Struct, frozen=True):
    """How lanes wait for gaps, and how much they hand over at once."""

    window: int = 300 * MS
    """how long a gap is waited for"""
    drift: int = 2 * SECOND
    """how far ahead of ours a sender's clock is believed"""
    serial: bool = False
    """start a lane's next message only when the one before has finished (a handler), not when it has
    been handed over (a transport)"""
    gated: bool = False
    """recipients come and go: a lane moves only while its recipient is reachable"""
    width: int | None = None
    """how many messages without order a recipient has under way at once; None: as many as come"""
    ahead: FlowWindow | None = None
    """how much may be on its way to a recipient before it acknowledges; None: as much as comes"""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise Malformed("a lane is at least one message wide")
        if self.ahead is not None and (self.serial or self.width is not None):
            raise Malformed("a lane is bounded by acknowledgements or by what is under way, not by both")
        if self.window < 0 or self.drift < 0:
            raise Malformed("a lane's window and drift are lengths of time, 0 or more")


class Lanes:
    """The lanes of one inbox."""

    def __init__(
        self, policy: LanePolicy | None = None, marks: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._policy = policy or LanePolicy()
        self._gated = self._policy.gated
        self._counted = self._policy.serial or self._policy.width is not None
        """it matters what is under way"""
        ahead = self._policy.ahead
        self._outstanding = None if ahead is None else Outstanding(ahead)
        self._marks = HighWaterMarks()
        self._chains = Chains(self._policy.window)
        self._passed: OrderedDict[str, int] = OrderedDict()
        """the number last left to another hub, by its mark"""
        self._lanes: dict[str, dict[str | None, Lane]] = {}
        self.reachable: set[str] = set()
        for mark, (n, ms) in (marks or {}).items():
            if mark.startswith("["):  # others keep marks too, under other names
                self._restore(mark, n, ms)

    def _restore(self, mark: str, n: int, ms: int) -> None:
        self._marks.restore(mark, n, ms)
        timed = is_timed(n, ms)
        for name in (names_in(mark)[2], mark):
            self._chains.open(name).raise_to(0 if timed else n, ms)

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    def offer(self, message: Message, now: int) -> list[Move]:
        """Take in a message, and return what may move now, in order; nothing if it has to wait."""
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
        # Its time is only ever compared with the same sender's: clamping it to our clock would make
        # a late message of a fast clock look like a sender that counts anew.
        ms = message.made // MS
        chains = self._chains
        if after is None:
            name, needs = scope, n - 1
            chain = chains.open(name)
            if not n and self._has_only_time(order, chain, ms):
                # should it count after all, this was its 0
                chain.mark, chain.top_ms = 0, max(chain.top_ms, ms)
                return self._sort(message, mark, now)
        else:
            name, needs = mark, after
            chain = chains.open(name)
            if needs > chain.mark and (released := self._marks.get(mark)) is not None:
                # It says what it comes after, and that was released here without saying so itself.
                chain.mark = max(chain.mark, released[0])
        moves = self._let_all_go(chains.stop_sorting(scope)) if chains.by_time else []
        if needs <= chain.mark < n and not chain.held and not chain.ahead:
            # As usual: it follows on, and nothing waits.
            chain.mark = n
            chain.top_ms = max(chain.top_ms, ms)
            started = self._start(message, mark, n, ms)
            return moves + started if moves else started
        waiting = chains.held_message(message, mark, n, ms, needs, now)
        moves += self._let_go(chain.count_anew(n, ms, needs))
        chain.top_ms = max(chain.top_ms, ms)
        if n <= chain.mark:
            # Its number was given up or came through another hub; only its lane can say if it is late.
            return moves + self._let_go([waiting])
        chains.hold(name, chain, waiting)
        return moves + self._let_go(chain.follow())

    def _has_only_time(self, order: Order, chain: Chain, ms: int) -> bool:
        """Whether a number 0 is none: its sender was never seen to count, and others may come before it."""
        if order.mode is not Mode.REPLAY or chain.mark > 0 or not chain.idle:
            return False
        return bool(order.key) or 0 < abs(ms - chain.top_ms) < BURST

    def _sort(self, message: Message, mark: str, now: int) -> list[Move]:
        """Sort in a message that only its time can put in order. `replay` waits the window out for older
        ones."""
        assert message.order is not None
        ms = min(message.made or now, now + self._policy.drift) // MS
        if message.order.mode is Mode.LATEST:
            return self._let_go([self._chains.held_message(message, mark, ms, ms, ms, now)])
        waiting = self._chains.held_message(message, mark, ms, ms, EVERY_GAP, now)
        self._chains.sort_by_time(message.scope, waiting, counts=message.order.n is not None)
        return []

    def arrived(self, scope: str, n: int, made: int, now: int) -> list[Move]:
        """Note a number of this sender that needs no lane here: it was refused, wants no order, or went to
        another hub."""
        return self._let_all_go(self._chains.arrive(scope, n, made // MS, now))

    # ── other hubs ───────────────────────────────────────────────────────────────────────────────

    def leave(self, message: Message, now: int) -> tuple[Message, list[Move]]:
        """Pass on a message whose lane another hub keeps. If all numbers before it have arrived, the
        returned message says what it comes after, since the other hub does not see the rest."""
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
        """Stop waiting for numbers before a message that another hub passed on. If it says what it comes
        after, everything of its sender before it has arrived at that hub."""
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
        """Take over the marks of lanes that another hub kept until now."""
        for mark, (n, ms) in marks.items():
            if not self._marks.is_late(mark, n, ms):
                self._restore(mark, n, ms)

    def lower(self, limit: int) -> None:
        """Take back the times (ms) that a wrong clock has set into the future, as the ledger does."""
        self._marks.lower(limit)
        self._chains.lower(limit)

    def forget(self, recipient: str) -> None:
        """Drop a recipient's lanes, which another hub may keep now, with what waits in them."""
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
        """Free the window of a message that its recipient has, and return what may move now."""
        recipient, outstanding = message.recipient, self._outstanding
        if outstanding is None or not outstanding.release(recipient, message.key):
            return []
        return self._advance(recipient, now) if recipient in self._lanes else []

    def has_room(self, recipient: str) -> bool:
        """Return whether the window of this recipient has room for a message."""
        return self._outstanding is None or self._outstanding.has_room(recipient)

    def finished(self, message: Message, now: int = 0, *, counts: bool = True) -> list[Move]:
        """Record the end of a message, and return what may move now. A message that failed (`counts` off)
        does not make a late one late; one that was never released waits neither for a gap nor in a queue."""
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
        """Return the position that a mark goes back to if this message fails; None: it stays."""
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
        """Take out a message that has ended while it waited, and return what may move now."""
        self.drop(message)
        if not self._chains.waits or message.order is None or message.order.mode is _ANY:
            return []
        return self._let_go(self._chains.withdraw(message.scope, mark_name(message), message.key))

    def reach(self, recipient: str, now: int = 0) -> list[Move]:
        """Start what is queued for a recipient that can be reached now, in order."""
        self.reachable.add(recipient)
        return self._advance(recipient, now)

    def lose(self, recipient: str) -> None:
        """Queue what comes from now on for a recipient that can no longer be reached."""
        self.reachable.discard(recipient)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Move]:
        """Give up the gaps that were waited for long enough, and return what may move now."""
        return self._let_all_go(self._chains.wake(now))

    def next_wake(self) -> int | None:
        """Return when the next gap is given up; None: there is none."""
        return self._chains.next_wake()

    def shift(self, by: int) -> None:
        """Follow a wall clock that was set by this much: windows go on as if it had not been."""
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
        """Those whose turn has come: handed over, or queued where that cannot be yet."""
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
        """Whether others wait in its lane, or the lane is busy."""
        lane = self._lanes[message.recipient].get(lane_key(message))
        return lane is not None and not (lane.free and lane.empty)

    def _queue(self, message: Message, mark: str, n: int, ms: int) -> list[Move]:
        if mark and self._marks.is_late(mark, self._number(message, mark, n, ms), ms):
            return [Supersede(message, LATE, mark, n, ms)]
        self._lane(message).add(Release(message, mark, n, ms, -1))
        return []

    def _advance(self, recipient: str, now: int = 0) -> list[Move]:
        """Start what is queued for a recipient, as far as it may; where it has to wait for an
        acknowledgement, lanes take turns."""
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
        """The next of a queue. Where only the latest counts, one that another follows is superseded by it."""
        queued = lane.pop()
        if is_over(queued, now):
            return [queued]  # too late for itself: it supersedes nothing
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
                after = last  # else it counts anew, or comes after one that failed
        if self._outstanding is not None:
            self._outstanding.take(message.recipient, message.key, len(message.body))
        if self._counted and self._width(message):
            self._lane(message).holders.add(message.key)
        return Release(message, mark, n, ms, after)

    def _number(self, message: Message, mark: str, n: int, ms: int) -> int:
        """Its number; of those that are sorted by their time and were made in the same millisecond, in the
        order of arrival."""
        if message.order is not None and message.order.n == n:
            return n
        before = self._marks.get(mark)
        return max(n, before[0] + 1) if before is not None and ms == before[1] else n

    def _width(self, message: Message) -> int:
        """Return how many of its kind may be under way at once; 0: any number."""
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
    """Return the deliveries with each sender's own in the order of its numbers. A ledger sorts what was
    accepted in one moment by key, where 10 comes before 9."""
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
