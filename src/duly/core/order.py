"""Order: in which sequence the messages for one thing take effect.

The law. A lane is (recipient, order key). Within it, one sender's messages take effect in that sender's
order; between senders, in order of arrival. The sender's own counter decides, its clock only where it
has no counter, and then never further ahead than `drift`: one fast clock cannot lock a lane.

A message that follows on is let go **at once**. Only a gap waits, at most the window; after that the
missing one is late, and a late one is superseded, never run. `replay` runs every message, `latest` the
newest. What was refused or went to another lane has arrived too: it leaves no gap.

What follows on? Usually "the number before mine has arrived", over all that this sender sends. A hub
that passes a message on, to its recipient or to another hub, says `after` which number it comes, because
the receiver does not see the rest.
A message without a counter follows on from nothing: `replay` must wait the window out to sort it.

A lane whose recipient cannot be reached, or that is serial and busy, queues; where only the latest counts,
what it queues is superseded by what comes after.

Nothing here is the truth: the durable high-water mark is, and the ledger asks it when a message starts.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from duly.core.lane import Lane, Release
from duly.core.messages import Message, Mode, Order
from duly.core.units import MS, SECOND
from duly.core.window import Outstanding, Window
from duly.core.writes import is_later
from duly.errors import Malformed

__all__ = ["LATE", "LanePolicy", "Lanes", "Move", "Release", "Supersede", "mark_name"]

CHAINS_KEPT: Final = 50_000
MARKS_KEPT: Final = 100_000
AHEAD_KEPT: Final = 1_024
"""A sender whose numbers stay ahead of a gap that nobody waits for: then the gap is given up."""

LATE: Final = "a later one took effect before it arrived"

_NEVER: Final = 1 << 62


class LanePolicy(Struct, frozen=True):
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
    ahead: Window | None = None
    """how much may be on its way to a recipient before it acknowledges; None: as much as comes"""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise Malformed("a lane is at least one message wide")
        if self.ahead is not None and (self.serial or self.width is not None):
            raise Malformed("a lane is bounded by acknowledgements or by what is under way, not by both")
        if self.window < 0 or self.drift < 0:
            raise Malformed("a lane's window and drift are lengths of time, 0 or more")


class Supersede(Struct, frozen=True):
    """This message must not take effect any more. One that is late says for which mark: where several hubs
    raise it, only the ledger can tell."""

    message: Message
    reason: str
    mark: str = ""
    n: int = 0
    ms: int = 0


Move: TypeAlias = Release | Supersede


class _Waiting(Struct, frozen=True, order=True):
    n: int
    turn: int
    """arrival, to break ties"""
    needs: int
    ms: int
    deadline: int
    mark: str
    message: Message


class _Chain:
    """The numbers of one sender that follow on from each other."""

    __slots__ = ("ahead", "held", "mark", "top_ms")

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.top_ms = 0
        self.ahead: dict[int, int] = {}
        """numbers behind a gap that need no lane, and until when the gap is waited for"""
        self.held: list[_Waiting] = []

    @property
    def idle(self) -> bool:
        return not self.ahead and not self.held


class Lanes:
    """All lanes of one inbox."""

    def __init__(
        self, policy: LanePolicy | None = None, marks: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._policy = policy or LanePolicy()
        self._counted = self._policy.serial or self._policy.width is not None
        """it matters what is under way"""
        ahead = self._policy.ahead
        self._outstanding = None if ahead is None else Outstanding(ahead)
        self._marks: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self._last: dict[str, int] = {}
        """the number last released under a mark: what a receiver is told came before"""
        self._passed: OrderedDict[str, int] = OrderedDict()
        """the number last left to another hub, by its mark"""
        self._of: dict[str, set[str]] = {}
        """the marks of each recipient"""
        self._lanes: dict[str, dict[str | None, Lane]] = {}
        self.reachable: set[str] = set()
        self._deadlines: list[tuple[int, str]] = []
        self._turn = 0
        for mark, (n, ms) in (marks or {}).items():
            if mark.startswith("["):  # others keep marks too, under other names
                self._restore(mark, n, ms)

    def _restore(self, mark: str, n: int, ms: int) -> None:
        self._marks[mark] = (n, ms)
        self._last[mark] = n
        recipient, _, scope = _names_in(mark)
        self._of.setdefault(recipient, set()).add(mark)
        for name in (scope, mark):
            chain = self._chain(name)
            chain.mark = max(chain.mark, n)
            chain.top_ms = max(chain.top_ms, ms)

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    def offer(self, message: Message, now: int) -> list[Move]:
        """A message has come. What may move now, in order; nothing if it has to wait."""
        order = message.order
        if order is None:
            return self._start(message)
        if order.mode is Mode.ANY:
            counted = order.n is not None and order.after is None
            moves = self.arrived(message.scope, order.n or 0, message.made, now) if counted else []
            return [*self._start(message), *moves]
        mark = _mark_name(message.recipient, order.key, message.scope)
        if order.n is None:
            ms = min(message.made or now, now + self._policy.drift) // MS
            last_n, last_ms = self._marks.get(mark, (-1, -1))
            # Made in the same millisecond: order of arrival.
            n = last_n + 1 if ms == last_ms else ms
            if order.mode is Mode.LATEST:
                return self._let_go([self._waiting(message, mark, n, ms, n, now)])
            name, needs = f"{mark}t", _NEVER
        else:
            # Its time is only ever compared with the same sender's: clamping it to our clock would make
            # a late message of a fast clock look like a sender that counts anew.
            n, ms = order.n, message.made // MS
            name, needs = (message.scope, n - 1) if order.after is None else (mark, order.after)
        chain = self._chain(name)
        if needs > chain.mark and name is mark and mark in self._marks:
            # It says what it comes after, and that was released here without saying so itself.
            chain.mark = max(chain.mark, self._marks[mark][0])
        if needs <= chain.mark < n and not chain.held and not chain.ahead:
            # As usual: it follows on, and nothing waits.
            chain.mark = n
            chain.top_ms = max(chain.top_ms, ms)
            if not self._raise(mark, n, ms):
                return [Supersede(message, LATE, mark, n, ms)]
            return self._start(message, mark, n, ms)
        waiting = self._waiting(message, mark, n, ms, needs, now)
        moves = self._count_anew(chain, n, ms, needs)
        chain.top_ms = max(chain.top_ms, ms)
        if n <= chain.mark:
            # Its number was given up or came through another hub; only its lane can say if it is late.
            return moves + self._let_go([waiting])
        heapq.heappush(chain.held, waiting)
        if needs > chain.mark:
            heapq.heappush(self._deadlines, (waiting.deadline, name))
        return moves + self._let_go(self._follow(chain))

    def arrived(self, scope: str, n: int, made: int, now: int) -> list[Move]:
        """A number of this sender has come that needs no lane here: it was refused, wants no order, or went
        to another hub."""
        ms = made // MS
        chain = self._chain(scope)
        moves = self._count_anew(chain, n, ms, n - 1)
        chain.top_ms = max(chain.top_ms, ms)
        if n > chain.mark:
            chain.ahead[n] = deadline = now + self._policy.window
            if n > chain.mark + 1:
                heapq.heappush(self._deadlines, (deadline, scope))
            if len(chain.ahead) > AHEAD_KEPT:
                chain.mark = min(chain.ahead) - 1
        return moves + self._let_go(self._follow(chain))

    # ── other hubs ───────────────────────────────────────────────────────────────────────────────

    def leave(self, message: Message, now: int) -> tuple[Message, list[Move]]:
        """A message whose lane another hub keeps has come here. If everything before it has, too, it says
        from now on what it comes after: the other hub does not see what went elsewhere."""
        order = message.order
        if order is None or order.n is None or order.after is not None:
            return message, []
        n, scope = order.n, message.scope
        chain = self._chain(scope)
        late = n <= chain.mark and message.made // MS <= chain.top_ms
        moves = self.arrived(scope, n, message.made, now)
        if order.mode is Mode.ANY or late:
            return message, moves
        mark = mark_name(message)
        after = max(self._passed.get(mark, -1), self._last.get(mark, -1))
        self._passed[mark] = n
        self._passed.move_to_end(mark)
        if len(self._passed) > CHAINS_KEPT:
            self._passed.popitem(last=False)
        if n > chain.mark or after >= n:
            return message, moves
        return msgspec.structs.replace(message, order=Order(order.key, order.mode, n, after)), moves

    def catch_up(self, message: Message) -> list[Move]:
        """A message that another hub left to us has been offered. If it says what it comes after, everything
        of its sender before it has arrived there, and nobody here need wait for that."""
        order = message.order
        if order is None or order.n is None or order.after is None:
            return []
        mark = mark_name(message)
        chain = self._chain(message.scope)
        chain.top_ms = max(chain.top_ms, message.made // MS)
        released, _ = self._marks.get(mark, (-1, 0))
        chain.mark = max(chain.mark, order.n - (released < order.n))
        moves = self._let_go(self._follow(chain))
        lane = self._chains.get(mark)
        if lane is not None and lane.held and mark in self._marks:
            lane.mark = max(lane.mark, self._marks[mark][0])
            moves += self._let_go(self._follow(lane))
        return moves

    def learn(self, marks: Mapping[str, tuple[int, int]]) -> None:
        """How far lanes have come that were another hub's until now."""
        for mark, (n, ms) in marks.items():
            if is_later(n, ms, self._marks.get(mark)):
                self._restore(mark, n, ms)

    def forget(self, recipient: str) -> None:
        """A recipient's lanes are no longer ours: what waits in them is dropped, and what we know of them."""
        self.lose(recipient)
        self._lanes.pop(recipient, None)
        for mark in self._of.pop(recipient, ()):
            self._marks.pop(mark, None)
            self._last.pop(mark, None)
            self._chains.pop(mark, None)
        for name in {name for _, name in self._deadlines}:
            chain = self._chains.get(name)
            if chain is not None and chain.held:
                chain.held = [held for held in chain.held if held.message.recipient != recipient]
                heapq.heapify(chain.held)

    def occupy(self, message: Message) -> None:
        """A message that was released before a restart is still under way."""
        if self._width(message):
            self._lane(message).holders.add(message.key)
        if self._outstanding is not None:
            self._outstanding.take(message.recipient, message.key, len(message.body))

    def acknowledged(self, message: Message) -> list[Move]:
        """The recipient has a released message: its window has room for the next."""
        recipient, outstanding = message.recipient, self._outstanding
        if outstanding is None or not outstanding.release(recipient, message.key):
            return []
        return self._advance(recipient) if recipient in self._lanes else []

    def has_room(self, recipient: str) -> bool:
        """Whether a message for this recipient would go at once, as far as its window is concerned."""
        return self._outstanding is None or self._outstanding.has_room(recipient)

    def _drop(self, message: Message) -> None:
        """A message that is over must not take room in a queue."""
        lanes = self._lanes.get(message.recipient)
        lane = None if lanes is None else lanes.get(_lane_key(message))
        if lane is not None:
            lane.drop(message.key)

    def finished(self, message: Message) -> list[Move]:
        """A message is through: the next one starts, if it waited for that. One that was never released is
        taken out of its queue."""
        if self._outstanding is not None:
            if not self._outstanding.release(message.recipient, message.key):
                self._drop(message)
            return self._advance(message.recipient) if message.recipient in self._lanes else []
        lanes = self._lanes.get(message.recipient)
        lane = None if lanes is None else lanes.get(_lane_key(message))
        if lane is None or message.key not in lane.holders:
            if lane is not None:
                lane.drop(message.key)
            return []
        lane.holders.remove(message.key)
        return self._advance(message.recipient)

    def reach(self, recipient: str) -> list[Move]:
        """A recipient can be reached: what was queued for it starts, in order."""
        self.reachable.add(recipient)
        return self._advance(recipient)

    def lose(self, recipient: str) -> None:
        """A recipient can no longer be reached: what comes now is queued."""
        self.reachable.discard(recipient)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Move]:
        """Gaps that were waited for long enough are given up."""
        moves: list[Move] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            chain = self._chains.get(name)
            if chain is None:
                continue
            overdue = [waiting.n for waiting in chain.held if waiting.deadline <= now]
            overdue += [n for n, until in chain.ahead.items() if until <= now]
            if overdue:
                moves += self._let_go(self._follow(chain, max(overdue)))
        return moves

    def next_wake(self) -> int | None:
        while self._deadlines:
            deadline, name = self._deadlines[0]
            chain = self._chains.get(name)
            if chain is not None and (
                any(waiting.deadline == deadline for waiting in chain.held)
                or deadline in chain.ahead.values()
            ):
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def shift(self, by: int) -> None:
        """The wall clock was set; windows go on as if it had not been."""
        self._deadlines.clear()
        for name, chain in self._chains.items():
            chain.held = [msgspec.structs.replace(w, deadline=w.deadline + by) for w in chain.held]
            chain.ahead = {n: until + by for n, until in chain.ahead.items()}
            self._deadlines += [(w.deadline, name) for w in chain.held]
            self._deadlines += [(until, name) for until in chain.ahead.values()]
        heapq.heapify(self._deadlines)

    @property
    def waiting(self) -> int:
        """How many messages wait for a gap or for their lane."""
        held = sum(len(chain.held) for chain in self._chains.values())
        return held + sum(len(lane.queue) for lanes in self._lanes.values() for lane in lanes.values())

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _chain(self, name: str) -> _Chain:
        chain = self._chains.get(name)
        if chain is None:
            chain = self._chains[name] = _Chain(-1)
            if len(self._chains) > CHAINS_KEPT:
                self._drop_idle_chain()
        return chain

    def _drop_idle_chain(self) -> None:
        for name, chain in self._chains.items():
            if chain.idle:
                del self._chains[name]
                return

    def _waiting(self, message: Message, mark: str, n: int, ms: int, needs: int, now: int) -> _Waiting:
        self._turn += 1
        return _Waiting(n, self._turn, needs, ms, now + self._policy.window, mark, message)

    def _count_anew(self, chain: _Chain, n: int, ms: int, needs: int) -> list[Move]:
        """A lower number made later than anything before: the sender has lost its counter and starts over."""
        if n > chain.mark or ms <= chain.top_ms:
            return []
        moves = self._let_go(self._follow(chain, _NEVER))
        chain.mark = -1 if needs == n - 1 else min(needs, n - 1)
        chain.ahead.clear()
        return moves

    def _follow(self, chain: _Chain, given_up: int = -1) -> list[_Waiting]:
        """Everything held that follows on now; gaps up to `given_up` are no longer waited for."""
        free: list[_Waiting] = []
        while True:
            if chain.mark + 1 in chain.ahead:
                chain.mark += 1
                del chain.ahead[chain.mark]
            elif chain.held and (chain.held[0].needs <= chain.mark or chain.held[0].n <= given_up):
                waiting = heapq.heappop(chain.held)
                chain.mark = max(chain.mark, waiting.n)
                free.append(waiting)
            elif given_up > chain.mark and any(n <= given_up for n in chain.ahead):
                skipped = min(chain.ahead)
                del chain.ahead[skipped]
                chain.mark = max(chain.mark, skipped)
            else:
                break
        if chain.ahead:
            chain.ahead = {n: until for n, until in chain.ahead.items() if n > chain.mark}
        return free

    def _let_go(self, free: Iterable[_Waiting]) -> list[Move]:
        moves: list[Move] = []
        going: dict[int, Release] = {}
        newest: dict[tuple[str, str], int] = {}
        for waiting in free:
            message, mark = waiting.message, waiting.mark
            order = message.order
            assert order is not None
            n = waiting.n
            before = self._marks.get(mark) if order.n is None else None
            if before is not None and waiting.ms == before[1]:
                n = max(n, before[0] + 1)  # made in the same millisecond as what waited with it
            if not self._raise(mark, n, waiting.ms):
                moves.append(Supersede(message, LATE, mark, n, waiting.ms))
                continue
            if order.mode is Mode.LATEST:
                older = going.pop(newest.get((message.recipient, order.key), -1), None)
                if older is not None:
                    moves.append(Supersede(older.message, "a newer one came with it"))
                newest[message.recipient, order.key] = waiting.turn
            going[waiting.turn] = Release(message, mark, n, waiting.ms, -1)
        for release in going.values():
            moves += self._start(release.message, release.mark, release.n, release.ms)
        return moves

    def _raise(self, mark: str, n: int, ms: int) -> bool:
        """Raise a mark; False if something later was there before."""
        marks = self._marks
        before = marks.get(mark)
        if not is_later(n, ms, before):
            return False
        marks[mark] = (n, max(ms, before[1] if before else 0))
        if before is None:
            self._of.setdefault(_names_in(mark)[0], set()).add(mark)
        marks.move_to_end(mark)
        if len(marks) > MARKS_KEPT:
            forgotten, _ = marks.popitem(last=False)
            self._last.pop(forgotten, None)
            self._of.get(_names_in(forgotten)[0], set()).discard(forgotten)
        return True

    def _start(self, message: Message, mark: str = "", n: int = 0, ms: int = 0) -> list[Move]:
        recipient = message.recipient
        lanes = self._lanes.get(recipient)
        lane = None if lanes is None else lanes.get(_lane_key(message))
        if (lane is None or (lane.free and not lane.queue)) and (
            not self._policy.gated or recipient in self.reachable
        ):
            outstanding = self._outstanding
            if outstanding is None or outstanding.has_room(recipient):
                return [self._release(message, mark, n, ms)]
        lane = self._lane(message)
        release = Release(message, mark, n, ms, -1)
        moves: list[Move] = []
        if _is_latest(release):
            moves += [
                Supersede(q.message, "a newer one came before its turn") for q in lane.queue if _is_latest(q)
            ]
            lane.queue = deque(queued for queued in lane.queue if not _is_latest(queued))
        lane.queue.append(release)
        return moves

    def _advance(self, recipient: str) -> list[Move]:
        """Start what is queued for a recipient, as far as it may; where it has to wait for an
        acknowledgement, lanes take turns."""
        lanes = self._lanes.get(recipient, {})
        moves: list[Move] = []
        if not self._policy.gated or recipient in self.reachable:
            if self._outstanding is None:
                for lane in list(lanes.values()):
                    while lane.free and (queued := lane.next()) is not None:
                        moves.append(self._release(queued.message, queued.mark, queued.n, queued.ms))
            else:
                while lanes and self._outstanding.has_room(recipient):
                    key = next(iter(lanes))
                    lane = lanes.pop(key)
                    if (queued := lane.next()) is not None:
                        moves.append(self._release(queued.message, queued.mark, queued.n, queued.ms))
                        lanes[key] = lane  # behind the others
        if self._outstanding is None:
            for key in [key for key, lane in lanes.items() if not lane.queue and not lane.holders]:
                del lanes[key]
        if not lanes:
            self._lanes.pop(recipient, None)
        return moves

    def _release(self, message: Message, mark: str, n: int, ms: int) -> Release:
        if self._outstanding is not None:
            self._outstanding.take(message.recipient, message.key, len(message.body))
        if self._counted and self._width(message):
            self._lane(message).holders.add(message.key)
        after = -1
        if mark:
            after = self._last.get(mark, -1)
            self._last[mark] = n
        return Release(message, mark, n, ms, after)

    def _width(self, message: Message) -> int:
        """How many of its kind may be under way at once; 0: nobody counts."""
        if _lane_key(message) is None:
            return self._policy.width or 0
        return 1 if self._policy.serial else 0

    def _lane(self, message: Message) -> Lane:
        lanes = self._lanes.setdefault(message.recipient, {})
        key = _lane_key(message)
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane(self._width(message))
        return lane


def _lane_key(message: Message) -> str | None:
    """Messages without order share a queue that no order key can name."""
    order = message.order
    return None if order is None or order.mode is Mode.ANY else order.key


def _is_latest(release: Release) -> bool:
    order = release.message.order
    return order is not None and order.mode is Mode.LATEST


def mark_name(message: Message) -> str:
    """The name of the durable high-water mark of one sender in one lane.

    >>> from duly.core.messages import Order
    >>> mark_name(Message("app-1", "x", "k", "lamp", order=Order("power")))
    '["lamp","power","app-1"]'
    """
    order = message.order
    return _mark_name(message.recipient, "" if order is None else order.key, message.scope)


def _names_in(mark: str) -> tuple[str, str, str]:
    """(recipient, order key, scope) of a mark's name."""
    return msgspec.json.decode(mark, type=tuple[str, str, str])


@lru_cache(maxsize=4096)
def _mark_name(recipient: str, key: str, scope: str) -> str:
    return msgspec.json.encode((recipient, key, scope)).decode()
