"""Many groups at once in SQLite: what usually happens is carried out with a few statements of many rows.

The law: it is a bet that everything goes as usual, that every message is fresh, every mark rises, every
attempt still stands and every guard lets pass. The statements count what they changed; if that is less than
was bet, nothing of it stays, and the writes are carried out one by one. The results are the same either way.

Why: a statement per write lets go of the interpreter's lock and takes it again, and the event loop does the
same between them: each waits for the other at every row. Here SQLite works through dozens of rows while the
loop goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any, Final, cast

import apsw

from duly.core import writes as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import FRESH, pack_answer
from duly.ledgers import rows, sql

ROWS: Final = (64, 16, 4, 1)
"""How many rows a statement has: a few sizes, so that each is prepared once."""


LASTS_KEPT: Final = 50_000

_USUAL: Final = frozenset({w.Admit, w.Given})
"""A guard usually lets pass: the way it goes is the one that leads to an admission."""


class Bet:
    """The writes of a flush, sorted by verb, and what they do if all goes as usual."""

    def __init__(self, last_of: Callable[[str], int]) -> None:
        self._last_of = last_of
        self.admits: list[w.Admit] = []
        self.ended: list[tuple[w.Admit, int]] = []
        """those whose end is an entry, with its number"""
        self.appends: list[tuple[w.Append, int]] = []
        self.lasts: dict[str, int] = {}
        """the last number of each stream that is appended to"""
        self.cursors: dict[tuple[str, str], int] = {}
        self.given: set[tuple[str, str, bytes | None]] = set()
        """items that have to be there"""
        self.absent: set[tuple[str, str, bytes | None]] = set()
        """and those that must not"""
        self.delivers: list[w.Deliver] = []
        self.raises: dict[str, list[int]] = {}
        """for each mark where it rises from and where to: n and ms of the first, n and ms of the last"""
        self.finishes: dict[w.Ref, w.Finish] = {}
        self.advances: dict[State, list[w.Advance]] = {}
        self.applied: list[tuple[w.Write, w.Result]] = []
        self._keys: set[bytes] = set()
        self._states: dict[bytes, State] = {}

    def add(self, group: w.Group) -> w.Results | None:
        """What these do, if all goes as usual; None if that cannot be told beforehand."""
        results: w.Results = []
        return results if self._add(group, results) else None

    def _add(self, group: w.Group, results: w.Results) -> bool:
        then: w.Group
        for write in group:
            kind = type(write)
            then = ()
            if kind is w.Admit:
                assert isinstance(write, w.Admit)
                key = write.message.key
                if key in self._keys or key in self._states:
                    return False
                self._keys.add(key)
                self.admits.append(write)
                self.applied.append((write, FRESH))
                results.append(FRESH)
                then = write.then
            elif kind is w.Raise:
                assert isinstance(write, w.Raise)
                if not self._add_raise(write):
                    return False
                results.append(True)
                then = write.then
            elif kind is w.Append:
                assert isinstance(write, w.Append)
                n = self._add_append(write)
                if not n:
                    return False
                self.applied.append((write, n))
                results.append(n)
            elif kind is w.MoveCursor:
                assert isinstance(write, w.MoveCursor)
                where = (write.stream, write.reader)
                if where in self.cursors or write.n > self._last(write.stream):
                    return False
                self.cursors[where] = write.n
                results.append(write.n)
            elif kind is w.Given:
                assert isinstance(write, w.Given)
                there = any(type(each) in _USUAL for each in write.then)
                checked = self.given if there else self.absent
                checked.add((write.shelf, write.name, write.body))
                results.append(there)
                then = write.then if there else write.otherwise
            elif kind is w.Deliver:
                assert isinstance(write, w.Deliver)
                if write.ref in self.finishes:
                    return False
                self.delivers.append(write)
                results.append(True)
            elif kind is w.Finish:
                assert isinstance(write, w.Finish)
                if write.ref in self.finishes:
                    return False
                self.finishes[write.ref] = write
                results.append(True)
                then = write.then
            elif kind is w.Advance:
                assert isinstance(write, w.Advance)
                to = write.to
                # States are numbered in the order they are gone through; so are the statements.
                if self._states.get(write.key, State.ACCEPTED) >= min(to, State.DONE):
                    return False
                self._states[write.key] = to
                self.advances.setdefault(to, []).append(write)
                moved = w.Moved(True, to, write.answer)
                self.applied.append((write, moved))
                results.append(moved)
            else:
                return False
            if then and not self._add(then, results):
                return False
        return True

    def _last(self, stream: str) -> int:
        last = self.lasts.get(stream)
        return self._last_of(stream) if last is None else last

    def _add_append(self, write: w.Append) -> int:
        """The number it gets; 0 if it ends a message that was not admitted just before."""
        n = self._last(write.stream) + 1
        if write.ends:
            if not self.admits or self.admits[-1].message.key != write.key:
                return 0
            self.ended.append((self.admits.pop(), n))
        self.lasts[write.stream] = n
        self.appends.append((write, n))
        return n

    def _add_raise(self, write: w.Raise) -> bool:
        rise = self.raises.get(write.mark)
        if rise is None:
            self.raises[write.mark] = [write.n, write.ms, write.n, write.ms]
            return True
        if write.n <= rise[2]:
            return False
        rise[2:] = write.n, max(write.ms, rise[3])
        return True


class Bulk:
    """Carries bets out on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._run = db.cursor().execute
        self._lasts: OrderedDict[str, int] = OrderedDict()
        """the last numbers of streams, as committed; nobody else writes"""

    def bet(self) -> Bet:
        return Bet(self._last_of)

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

    def settle(self, bet: Bet, floor: int) -> bool:
        """Whether all went as usual; if not, nothing was done."""
        fresh = [*bet.admits, *(admit for admit, _ in bet.ended)]
        if fresh and min(write.until for write in fresh) <= floor:
            return False
        self._run("SAVEPOINT bet")
        won = self._carry_out(bet)
        if not won:
            self._run("ROLLBACK TO bet")
        self._run("RELEASE bet")
        if won:
            self._lasts.update(bet.lasts)
        return won

    def _carry_out(self, bet: Bet) -> bool:
        return (
            self._count("there", bet.given) == len(bet.given)
            and not self._count("there", bet.absent)
            and self._all("admit", len(bet.admits), map(rows.admission_row, bet.admits))
            and self._all("admit_ended", len(bet.ended), map(_ended_row, bet.ended))
            and self._all("append", len(bet.appends), map(_entry_row, bet.appends))
            and self._all("extend", len(bet.lasts), bet.lasts.items())
            and self._all("advance_cursors", len(bet.cursors), ((*c, n) for c, n in bet.cursors.items()))
            and self._all("deliver", len(bet.delivers), map(rows.delivery_row, bet.delivers))
            and self._all("raise_from", len(bet.raises), ((m, *rise) for m, rise in bet.raises.items()))
            and self._all("finish_all", len(bet.finishes), map(_finish_row, bet.finishes.values()))
            and all(
                self._all("advance_all", len(writes), map(_advance_row, writes), SOURCES[to])
                for to, writes in sorted(bet.advances.items())
            )
        )

    def _count(self, name: str, values: Collection[tuple[Any, ...]]) -> int:
        """How many rows a question over all these finds."""
        flat = list(chain.from_iterable(values))
        found = start = 0
        for size in ROWS if flat else ():
            while len(values) - start >= size:
                width = len(flat) // len(values)
                part = flat[start * width : (start + size) * width]
                ((some,),) = self._run(_statement(name, size, frozenset()), part).fetchall()
                found += cast("int", some)
                start += size
        return found

    def _all(
        self,
        name: str,
        count: int,
        values: Iterable[tuple[Any, ...]],
        sources: frozenset[State] = frozenset(),
    ) -> bool:
        """Run a statement over all these rows; whether it changed each."""
        if not count:
            return True
        flat = list(chain.from_iterable(values))
        width = len(flat) // count
        changed = start = 0
        for size in ROWS:
            while count - start >= size:
                statement = _statement(name, size, sources)
                self._run(statement, flat[start * width : (start + size) * width])
                changed += self._db.changes()
                start += size
        return changed == count


@cache
def _statement(name: str, size: int, sources: frozenset[State]) -> str:
    """The statement of one row, for many; `sources` are the states it moves from."""
    states = ", ".join(f"{state:d}" for state in sorted(sources))
    head, values, tail = sql.queries("sqlite")[name].replace(":sources", states).partition("VALUES")
    row, close, rest = tail.partition(")")
    return head + values + ",".join([row + close] * size) + rest


def _ended_row(ended: tuple[w.Admit, int]) -> tuple[Any, ...]:
    admit, n = ended
    row = rows.admission_row(admit)
    return (*row[:4], int(State.DONE), *row[5:], pack_answer(w.numbered(n)))


def _entry_row(entry: tuple[w.Append, int]) -> tuple[Any, ...]:
    write, n = entry
    return write.stream, n, write.body, write.at, write.key


def _finish_row(write: w.Finish) -> tuple[Any, ...]:
    return (*rows.names(write.ref), int(write.state), rows.plain(write.error), write.attempt)


def _advance_row(write: w.Advance) -> tuple[Any, ...]:
    return write.key, int(write.to), None if write.answer is None else pack_answer(write.answer), write.at
