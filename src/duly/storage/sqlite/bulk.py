"""Many groups at once in SQLite: what usually happens is carried out with a few statements of many rows.

The law: it is a bet that everything goes as usual, that every message is fresh, every mark rises, every
attempt still stands and every guard lets pass. The statements count what they changed; if that is less than
was bet, nothing of it stays, and the writes are carried out one by one. The results are the same either way.

Why: a statement per write lets go of the interpreter's lock and takes it again, and the event loop does the
same between them: each waits for the other at every row. Here SQLite works through dozens of rows while the
loop goes on. For the same reason writes become rows as they are added, and nobody goes over them twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any, Final, cast

import apsw

from duly.core import operations as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import FRESH, pack_answer
from duly.core.operations import (
    Admit,
    Advance,
    AppendEntry,
    CheckItem,
    Deliver,
    Finish,
    MoveCursor,
    RaiseMark,
)
from duly.core.units import FOREVER
from duly.storage import sql
from duly.storage.sql import rows

ROWS: Final = (128, 64, 32, 16, 8, 4, 2, 1)
"""How many rows a statement has: a few sizes, so that each is prepared once."""


LASTS_KEPT: Final = 50_000

_USUAL: Final = frozenset({Admit, CheckItem})
"""A guard usually lets pass: the way it goes is the one that leads to an admission."""

_STATE: Final = 4
"""Where the state stands in the row of an admission."""
_ADMIT_WIDTH: Final = 12


class UsualCase:
    """The writes of a flush as rows, sorted by verb, and what they do if all goes as usual."""

    def __init__(self, last_of: Callable[[str], int]) -> None:
        self._last_of = last_of
        self.until = FOREVER
        """the earliest time until which one of the messages is remembered"""
        self.admits: list[Any] = []
        self.ended: list[Any] = []
        """admissions whose end is an entry"""
        self.appends: list[Any] = []
        self.lasts: dict[str, int] = {}
        """the last number of each stream that is appended to"""
        self.cursors: dict[tuple[str, str], int] = {}
        self.given: set[tuple[str, str, bytes | None]] = set()
        """items that have to be there"""
        self.absent: set[tuple[str, str, bytes | None]] = set()
        """and those that must not"""
        self.delivers: list[Any] = []
        self.raises: dict[str, list[int]] = {}
        """for each mark where it rises from and where to: n and ms of the first, n and ms of the last"""
        self.finishes: list[Any] = []
        self.advances: dict[State, list[Any]] = {}
        self.applied: list[tuple[w.Write, w.Result]] = []
        self._admitted: set[bytes] = set()
        self._states: dict[bytes, State] = {}
        self._finished: set[w.DeliveryRef] = set()
        self._ending: set[bytes] = set()
        """the keys of those: a message is found faster than its delivery"""

    def add(self, group: w.Group) -> w.Results | None:
        """What these do, if all goes as usual; None if that cannot be told beforehand."""
        results: w.Results = []
        then: w.Group
        todo = list(group[::-1])
        while todo:
            write = todo.pop()
            then = ()
            if type(write) is Admit:
                if not self._add_admit(write):
                    return None
                self.applied.append((write, FRESH))
                results.append(FRESH)
                then = write.then
            elif type(write) is RaiseMark:
                if not self._add_raise(write):
                    return None
                results.append(True)
                then = write.then
            elif type(write) is Deliver:
                ref = write.ref
                if ref.key in self._ending and ref in self._finished:
                    return None
                self.delivers += rows.delivery_row(write)
                results.append(True)
            elif type(write) is Finish:
                ref = write.ref
                if ref.key in self._ending and ref in self._finished:
                    return None
                self._ending.add(ref.key)
                self._finished.add(ref)
                self.finishes += (
                    ref.key, ref.channel, ref.recipient, ref.round,
                    int(write.state), rows.plain(write.error), write.attempt,
                )  # fmt: skip
                results.append(True)
                then = write.then
            elif type(write) is Advance:
                moved = self._add_advance(write)
                if moved is None:
                    return None
                self.applied.append((write, moved))
                results.append(moved)
            elif type(write) is AppendEntry:
                n = self._add_append(write)
                if not n:
                    return None
                self.applied.append((write, n))
                results.append(n)
            elif type(write) is MoveCursor:
                where = (write.stream, write.reader)
                if where in self.cursors or write.n > self._last(write.stream):
                    return None
                self.cursors[where] = write.n
                results.append(write.n)
            elif type(write) is CheckItem:
                there = any(type(each) in _USUAL for each in write.then)
                checked = self.given if there else self.absent
                checked.add((write.bucket, write.name, write.body))
                results.append(there)
                then = write.then if there else write.otherwise
            else:
                return None
            if then:
                todo += then[::-1]
        return results

    def _add_admit(self, write: Admit) -> bool:
        key = write.message.key
        if key in self._admitted or key in self._states:
            return False
        self._admitted.add(key)
        self.until = min(self.until, write.until)
        self.admits += rows.admission_row(write)
        return True

    def _add_advance(self, write: Advance) -> w.Advanced | None:
        key, to, answer = write.key, write.to, write.answer
        # States are numbered in the order they are gone through; so are the statements.
        if self._states.get(key, State.ACCEPTED) >= min(to, State.DONE):
            return None
        self._states[key] = to
        advances = self.advances.get(to)
        if advances is None:
            advances = self.advances[to] = []
        advances += (key, int(to), None if answer is None else pack_answer(answer), write.at)
        return w.Advanced(True, to, answer)

    def _last(self, stream: str) -> int:
        last = self.lasts.get(stream)
        return self._last_of(stream) if last is None else last

    def _add_append(self, write: AppendEntry) -> int:
        """The number it gets; 0 if it ends a message that was not admitted just before."""
        n = self._last(write.stream) + 1
        if write.ends:
            row = self.admits[-_ADMIT_WIDTH:]
            if not row or row[0] != write.key:
                return 0
            del self.admits[-_ADMIT_WIDTH:]
            row[_STATE] = int(State.DONE)
            self.ended += (*row, pack_answer(w.numbered(n)))
        self.lasts[write.stream] = n
        self.appends += (write.stream, n, write.body, write.at, write.key)
        return n

    def _add_raise(self, write: RaiseMark) -> bool:
        rise = self.raises.get(write.mark)
        if rise is None:
            self.raises[write.mark] = [write.n, write.ms, write.n, write.ms]
            return True
        if write.n <= rise[2]:
            return False
        rise[2:] = write.n, max(write.ms, rise[3])
        return True


class BulkWriter:
    """Carries bets out on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._run = db.cursor().execute
        self._lasts: OrderedDict[str, int] = OrderedDict()
        """the last numbers of streams, as committed; nobody else writes"""

    def bet(self) -> UsualCase:
        return UsualCase(self._last_of)

    def forget(self) -> None:
        """Something was written that we have not seen."""
        self._lasts.clear()

    def _last_of(self, stream: str) -> int:
        last = self._lasts.get(stream)
        if last is None:
            found = self._run(sql.queries("sqlite")["last"], (stream,)).fetchall()
            last = self._lasts[stream] = cast("int", found[0][0]) if found else 0
            if len(self._lasts) > LASTS_KEPT:
                self._lasts.popitem(last=False)
        return last

    def settle(self, bet: UsualCase, floor: int) -> bool:
        """Whether all went as usual; if not, nothing was done, and the transaction begins anew."""
        if bet.until <= floor:
            return False
        won = self._carry_out(bet)
        if won:
            self._lasts.update(bet.lasts)
        else:
            self._db.execute("ROLLBACK")
            self._db.execute("BEGIN IMMEDIATE")
        return won

    def _carry_out(self, bet: UsualCase) -> bool:
        """Statement by statement; of most there is nothing in a flush."""
        return (
            (not bet.given or self._count("there", bet.given) == len(bet.given))
            and not (bet.absent and self._count("there", bet.absent))
            and (not bet.admits or self._all("admit", bet.admits, _ADMIT_WIDTH))
            and (not bet.ended or self._all("admit_ended", bet.ended, _ADMIT_WIDTH + 1))
            and (not bet.appends or self._all("append", bet.appends, 5))
            and (not bet.lasts or self._all("extend", _flat(bet.lasts.items()), 2))
            and (
                not bet.cursors
                or self._all("advance_cursors", _flat((*c, n) for c, n in bet.cursors.items()), 3)
            )
            and (not bet.delivers or self._all("deliver", bet.delivers, 10))
            and (
                not bet.raises
                or self._all("raise_from", _flat((m, *rise) for m, rise in bet.raises.items()), 5)
            )
            and (not bet.finishes or self._all("finish_all", bet.finishes, 7))
            and all(self._all("advance_all", bet.advances[to], 4, SOURCES[to]) for to in sorted(bet.advances))
        )

    def _count(self, name: str, values: Collection[tuple[Any, ...]]) -> int:
        """How many rows a question over all these finds."""
        flat = _flat(values)
        width = len(flat) // len(values)
        found = start = 0
        for size in ROWS:
            while len(values) - start >= size:
                part = flat[start * width : (start + size) * width]
                ((some,),) = self._run(_statement(name, size, frozenset()), part).fetchall()
                found += cast("int", some)
                start += size
        return found

    def _all(self, name: str, flat: list[Any], width: int, sources: frozenset[State] = frozenset()) -> bool:
        """Run a statement over all these rows, each of so many values; whether it changed each."""
        count = len(flat) // width
        changed = start = 0
        for size in ROWS:
            while count - start >= size:
                self._run(_statement(name, size, sources), flat[start * width : (start + size) * width])
                changed += self._db.changes()
                start += size
        return changed == count


def _flat(rows_: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(rows_))


@cache
def _statement(name: str, size: int, sources: frozenset[State]) -> str:
    """The statement of one row, for many; `sources` are the states it moves from."""
    states = ", ".join(f"{state:d}" for state in sorted(sources))
    head, values, tail = sql.queries("sqlite")[name].replace(":sources", states).partition("VALUES")
    row, close, rest = tail.partition(")")
    return head + values + ",".join([row + close] * size) + rest
