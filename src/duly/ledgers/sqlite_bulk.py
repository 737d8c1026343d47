"""Many groups at once in SQLite: what usually happens is carried out with a few statements of many rows.

The law: it is a bet that everything goes as usual, that every message is fresh, every mark rises and every
attempt still stands. The statements count what they changed; if that is less than was bet, nothing of it
stays, and the writes are carried out one by one. The results are the same either way.

Why: a statement per write lets go of the interpreter's lock and takes it again, and the event loop does the
same between them: each waits for the other at every row. Here SQLite works through dozens of rows while the
loop goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any, Final

import apsw

from duly.core import writes as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import FRESH, pack_answer
from duly.ledgers import rows, sql

ROWS: Final = (64, 16, 4, 1)
"""How many rows a statement has: a few sizes, so that each is prepared once."""


class Bet:
    """The writes of a flush, sorted by verb, and what they do if all goes as usual."""

    def __init__(self) -> None:
        self.admits: list[w.Admit] = []
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

    def settle(self, bet: Bet, floor: int) -> bool:
        """Whether all went as usual; if not, nothing was done."""
        if bet.admits and min(write.until for write in bet.admits) <= floor:
            return False
        self._run("SAVEPOINT bet")
        won = self._carry_out(bet)
        if not won:
            self._run("ROLLBACK TO bet")
        self._run("RELEASE bet")
        return won

    def _carry_out(self, bet: Bet) -> bool:
        return (
            self._all("admit", len(bet.admits), map(rows.admission_row, bet.admits))
            and self._all("deliver", len(bet.delivers), map(rows.delivery_row, bet.delivers))
            and self._all("raise_from", len(bet.raises), ((m, *rise) for m, rise in bet.raises.items()))
            and self._all("finish_all", len(bet.finishes), map(_finish_row, bet.finishes.values()))
            and all(
                self._all("advance_all", len(writes), map(_advance_row, writes), SOURCES[to])
                for to, writes in sorted(bet.advances.items())
            )
        )

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


def _finish_row(write: w.Finish) -> tuple[Any, ...]:
    return (*rows.names(write.ref), int(write.state), rows.plain(write.error), write.attempt)


def _advance_row(write: w.Advance) -> tuple[Any, ...]:
    return write.key, int(write.to), None if write.answer is None else pack_answer(write.answer), write.at
