"""Gaps in the numbers of each sender: a message behind a gap is held for a limited time, until it is filled.

The laws. A message whose number follows the last one is released at once. A message behind a gap is held for
at most the window; then the missing numbers are given up. A lower number with a later time than all before
means that the sender has lost its counter and starts again, so nothing more is waited for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.high_water import names_in
from duly.core.messages import Message
from duly.core.timers import Timers
from duly.core.units import FOREVER

CHAINS_KEPT: Final = 50_000
AHEAD_KEPT: Final = 1_024
"""The most numbers of one sender beyond a gap for which no message waits; with more, the gap is given up."""
EVERY_GAP: Final = 1 << 62
"""A number beyond every sender's; gives up all gaps."""
_BY_TIME: Final = "t"
"""The suffix of the name of a chain whose messages are sorted by time; the rest is the name of their mark,
which ends with a bracket."""


class HeldMessage(Struct, frozen=True, order=True):
    """A held message: it waits for the number `needs`, at most until `deadline`."""

    n: int
    turn: int
    """order of arrival, to break ties"""
    needs: int
    ms: int
    deadline: int
    mark: str
    message: Message

    @property
    def number(self) -> int:
        """The message's own number if it has one, even if it is sorted by time."""
        order = self.message.order
        return self.n if order is None or order.n is None else order.n


class Chain:
    """The consecutive numbers of one sender."""

    __slots__ = ("_cleared", "_turns", "ahead", "held", "mark", "top_ms")

    def __init__(self) -> None:
        self.mark = self._cleared = -1
        self.top_ms = 0
        self.ahead: dict[int, int] = {}
        """numbers behind a gap that need no lane, and how long the gap is waited for"""
        self.held: list[HeldMessage] = []
        """messages behind a gap, sorted by their numbers"""
        self._turns: dict[bytes, tuple[int, int]] = {}
        """where each of them is: its number and turn, by key"""

    @property
    def deadline(self) -> int:
        """When the oldest gap of the chain is given up; `FOREVER` if there is none."""
        held = min((waiting.deadline for waiting in self.held), default=FOREVER)
        return min(held, min(self.ahead.values(), default=FOREVER))

    @property
    def idle(self) -> bool:
        """Whether no message waits in the chain."""
        return not self.ahead and not self.held

    def raise_to(self, n: int, ms: int) -> None:
        """Record a number that has arrived and its time; neither ever decreases."""
        self.mark = max(self.mark, n)
        self.top_ms = max(self.top_ms, ms)

    def hold(self, waiting: HeldMessage) -> None:
        """Hold a message behind a gap."""
        insort(self.held, waiting)
        self._turns[waiting.message.key] = waiting.n, waiting.turn

    def take(self, key: bytes) -> HeldMessage | None:
        """Remove a held message and return it; None if it is not held here."""
        at = self._turns.pop(key, None)
        if at is None:
            return None
        # Not by looking at each: when thousands end one after the other, that takes seconds.
        return self.held.pop(bisect_left(self.held, at, key=_place))

    def remove_messages(self, recipient: str) -> None:
        """Remove the held messages for one recipient."""
        for key in [held.message.key for held in self.held if held.message.recipient == recipient]:
            self.take(key)

    def count_anew(self, n: int, ms: int, needs: int) -> list[HeldMessage]:
        """Release all held messages and restart the chain before this number, if it shows that the sender
        starts over."""
        if n > self.mark or ms <= self.top_ms:
            return []
        free = self.follow(EVERY_GAP)
        self.mark = -1 if needs == n - 1 else min(needs, n - 1)
        self.ahead.clear()
        return free

    def follow(self, given_up: int = -1) -> list[HeldMessage]:
        """Release the held messages that follow now; gaps up to `given_up` are no longer waited for."""
        held, count = self.held, 0
        # Sorted once: with thousands of gaps, looking for the next number each time takes seconds.
        skipped = iter(sorted(n for n in self.ahead if n <= given_up) if given_up > self.mark else ())
        while True:
            if self.mark + 1 in self.ahead:
                self.mark += 1
                del self.ahead[self.mark]
            elif count < len(held) and (held[count].needs <= self.mark or held[count].n <= given_up):
                self.mark = max(self.mark, held[count].n)
                count += 1
            elif (n := next((n for n in skipped if n in self.ahead), None)) is not None:
                del self.ahead[n]
                self.mark = max(self.mark, n)
            else:
                break
        if self.mark != self._cleared:  # otherwise none of `ahead` is behind the mark
            self._cleared = self.mark
            self.ahead = {n: until for n, until in self.ahead.items() if n > self.mark}
        free = held[:count]
        del held[:count]
        for one in free:
            self._turns.pop(one.message.key, None)
        return free


def _place(held: HeldMessage) -> tuple[int, int]:
    return held.n, held.turn


class Chains:
    """The chains of one inbox, by the name of a sender or of a mark."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self.by_time: dict[str, set[str]] = {}
        """the chains in which numbered messages of a sender wait to be sorted by time"""
        self._deadlines = Timers[str]()
        """the deadline of each chain with a gap, perhaps too early; `next_wake` corrects it"""
        self._turn = 0

    def get(self, name: str) -> Chain | None:
        """Return the chain of this name, if there is one."""
        return self._chains.get(name)

    def open(self, name: str) -> Chain:
        """Return the chain of this name, creating it if necessary."""
        chain = self._chains.get(name)
        if chain is None:
            if len(self._chains) >= CHAINS_KEPT:
                self._drop_idle()  # before the new chain is added, which is idle as well
            chain = self._chains[name] = Chain()
        return chain

    def held_message(self, message: Message, mark: str, n: int, ms: int, needs: int, now: int) -> HeldMessage:
        """Return a message to hold from now on, for the window."""
        self._turn += 1
        return HeldMessage(n, self._turn, needs, ms, now + self._window, mark, message)

    def hold(self, name: str, chain: Chain, waiting: HeldMessage) -> None:
        """Hold a message behind a gap."""
        chain.hold(waiting)
        self._wait_until(waiting.deadline, name)

    def sort_by_time(self, scope: str, waiting: HeldMessage, *, counts: bool) -> None:
        """Hold a message that can only be sorted by its time. `counts`: it has a number, so a later message
        may show that its sender does count."""
        name = waiting.mark + _BY_TIME
        if counts:
            self.by_time.setdefault(scope, set()).add(name)
        self.hold(name, self.open(name), waiting)

    def stop_sorting(self, scope: str) -> Iterator[list[HeldMessage]]:
        """Release messages that were held to be sorted by time, because their sender does count."""
        for name in self.by_time.pop(scope, ()):
            chain = self._chains.get(name)
            if chain is not None:
                yield chain.follow(EVERY_GAP)

    def arrive(self, scope: str, n: int, ms: int, now: int) -> list[list[HeldMessage]]:
        """Record a number of this sender that needs no lane, and release the messages that follow."""
        chain = self.open(scope)
        free = chain.count_anew(n, ms, n - 1)
        chain.top_ms = max(chain.top_ms, ms)
        if n > chain.mark:
            chain.ahead[n] = deadline = now + self._window
            if n > chain.mark + 1:
                self._wait_until(deadline, scope)
            if len(chain.ahead) > AHEAD_KEPT:
                chain.mark = min(chain.ahead) - 1
        return [free, chain.follow()]

    def withdraw(self, scope: str, mark: str, key: bytes) -> list[HeldMessage]:
        """Remove a waiting message: its number has arrived, and the messages that follow are released."""
        for name in (scope, mark, mark + _BY_TIME):
            chain = self._chains.get(name)
            found = None if chain is None else chain.take(key)
            if chain is None or found is None:
                continue
            if name.endswith(f"]{_BY_TIME}"):
                if chain.idle:
                    self._sorted(name)
            elif found.n > chain.mark:
                chain.ahead[found.n] = found.deadline
            return chain.follow()
        return []

    def lower(self, limit: int) -> None:
        """Lower times that are later than `limit`."""
        for chain in self._chains.values():
            chain.top_ms = min(chain.top_ms, limit)

    def remove(self, name: str) -> None:
        """Remove a chain and the messages that wait in it."""
        self._chains.pop(name, None)

    def remove_messages(self, recipient: str) -> None:
        """Remove the waiting messages for one recipient."""
        for name in self._deadlines:
            chain = self._chains.get(name)
            if chain is not None:
                chain.remove_messages(recipient)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> Iterator[list[HeldMessage]]:
        """Give up the gaps whose window is over, and yield the released messages chain by chain."""
        for name in self._deadlines.due(now):
            chain = self._chains.get(name)
            if chain is None:
                continue
            overdue = [waiting.n for waiting in chain.held if waiting.deadline <= now]
            overdue += [n for n, until in chain.ahead.items() if until <= now]
            if overdue:
                yield chain.follow(max(overdue))
                if chain.idle and name.endswith(f"]{_BY_TIME}"):
                    self._sorted(name)
            self._deadlines.set(name, chain.deadline)

    def next_wake(self) -> int | None:
        """Return when the next gap is given up, or None."""
        while (first := self._deadlines.first()) is not None:
            name, deadline = first
            chain = self._chains.get(name)
            real = FOREVER if chain is None else chain.deadline
            if real == deadline:
                return deadline
            self._deadlines.set(name, real)
        return None

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: windows keep their length."""
        self._deadlines.shift(by)
        for chain in self._chains.values():
            if not chain.idle:
                chain.held = [msgspec.structs.replace(w, deadline=w.deadline + by) for w in chain.held]
                chain.ahead = {n: until + by for n, until in chain.ahead.items()}

    @property
    def waits(self) -> bool:
        """Whether messages may be waiting for a gap."""
        return self._deadlines.first() is not None

    @property
    def waiting(self) -> int:
        """The number of messages waiting for a gap."""
        return sum(len(chain.held) for chain in self._chains.values())

    def __len__(self) -> int:
        return len(self._chains)

    def _wait_until(self, deadline: int, name: str) -> None:
        earlier = self._deadlines.get(name)
        if earlier is None or deadline < earlier:
            self._deadlines.set(name, deadline)

    def _sorted(self, name: str) -> None:
        scope = names_in(name.removesuffix(_BY_TIME))[2]
        waiting = self.by_time.get(scope, set())
        waiting.discard(name)
        if not waiting:
            self.by_time.pop(scope, None)

    def _drop_idle(self) -> None:
        for name, chain in self._chains.items():
            if chain.idle:
                del self._chains[name]
                return
