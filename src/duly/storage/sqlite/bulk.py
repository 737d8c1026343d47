"""Many groups at once in SQLite: what usually happens is written with a few statements of many rows.

A flush is optimistic: it expects that every message is fresh, every mark rises, every attempt still stands
and every check lets pass. The statements count what they changed; if that is less than expected, all of it is
rolled back and the operations are carried out one by one. The results are the same either way.

Why: a statement per operation lets go of the interpreter's lock and takes it again, and the event loop does
the same between them: each waits for the other at every row. Here SQLite works through dozens of rows while
the loop goes on. For the same reason operations become rows as they are added, and none is looked at twice.
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
from duly.storage.sql.rows import STATE_NUMBERS

ROWS: Final = (128, 64, 32, 16, 8, 4, 2, 1)
"""How many rows a statement has: a few sizes, so that each is prepared once."""


LASTS_KEPT: Final = 50_000

_USUAL: Final = frozenset({Admit, CheckItem})
"""A guard usually lets pass: the way it goes is the one that leads to an admission."""

_NOT_YET: Final = {state: min(number, int(State.DONE)) for state, number in STATE_NUMBERS.items()}
"""A message that moves to this state must be below this number."""

_STATE: Final = 4
"""Where the state stands in the row of an admission."""
_ADMIT_WIDTH: Final = 13


class OptimisticFlush:
    """The operations of a flush as rows, sorted by verb, and what they do if all goes as usual."""

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
        self._admitted: set[bytes] = set()
        self._states: dict[bytes, int] = {}
        self._finished: set[w.DeliveryRef] = set()
        self._ending: set[bytes] = set()
        """the keys of those: a message is found faster than its delivery"""

    def add(self, group: w.Group) -> w.Results | None:
        """Add a group; return what it does in the usual case, or None if that cannot be told beforehand."""
        operations: list[w.Write] = []
        values: list[w.Result] = []
        left = list(group[::-1])
        while left:
            operation = left.pop()
            result: w.Result = True
            then: w.Group = ()
            if type(operation) is Admit:
                if not self._add_admit(operation):
                    return None
                result, then = FRESH, operation.then
            elif type(operation) is RaiseMark:
                if not self._add_raise(operation):
                    return None
                then = operation.then
            elif type(operation) is Deliver:
                ref = operation.ref
                if ref.key in self._ending and ref in self._finished:
                    return None
                self.delivers += rows.delivery_row(operation)
            elif type(operation) is Finish:
                if not self._add_finish(operation):
                    return None
                then = operation.then
            elif type(operation) is Advance:
                result = self._add_advance(operation)
                if result is None:
                    return None
            elif type(operation) is AppendEntry:
                result = self._add_append(operation)
                if not result:
                    return None
            elif type(operation) is MoveCursor:
                where = (operation.stream, operation.reader)
                if where in self.cursors or operation.n > self._last(operation.stream):
                    return None
                result = self.cursors[where] = operation.n
            elif type(operation) is CheckItem:
                there = any(type(each) in _USUAL for each in operation.then)
                checked = self.given if there else self.absent
                checked.add((operation.bucket, operation.name, operation.body))
                result, then = there, operation.then if there else operation.otherwise
            else:
                return None
            operations.append(operation)
            values.append(result)
            if then:
                left += then[::-1]
        return w.Results(operations, values)

    def _add_finish(self, finish: Finish) -> bool:
        ref = finish.ref
        if ref.key in self._ending and ref in self._finished:
            return False
        self._ending.add(ref.key)
        self._finished.add(ref)
        self.finishes += (
            ref.key, ref.channel, ref.recipient, ref.round,
            STATE_NUMBERS[finish.state], finish.error and rows.plain(finish.error), finish.attempt,
        )  # fmt: skip
        return True

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
        if self._states.get(key, 0) >= _NOT_YET[to]:
            return None
        self._states[key] = STATE_NUMBERS[to]
        advances = self.advances.get(to)
        if advances is None:
            advances = self.advances[to] = []
        advances += (key, STATE_NUMBERS[to], None if answer is None else pack_answer(answer), write.at)
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
    """Writes optimistic flushes on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._run = db.cursor().execute
        self._lasts: OrderedDict[str, int] = OrderedDict()
        """the last numbers of streams, as committed; no other connection writes"""

    def begin(self) -> OptimisticFlush:
        """Return an empty flush."""
        return OptimisticFlush(self._last_of)

    def forget(self) -> None:
        """Forget what is remembered of streams: something was written by other means."""
        self._lasts.clear()

    def _last_of(self, stream: str) -> int:
        last = self._lasts.get(stream)
        if last is None:
            found = self._run(sql.queries("sqlite")["last"], (stream,)).fetchall()
            last = self._lasts[stream] = cast("int", found[0][0]) if found else 0
            if len(self._lasts) > LASTS_KEPT:
                self._lasts.popitem(last=False)
        return last

    def write(self, flush: OptimisticFlush, floor: int) -> bool:
        """Write a flush; return whether all went as usual. If not, the transaction has begun anew, empty."""
        if flush.until <= floor:
            return False
        usual = self._run_all(flush)
        if usual:
            self._lasts.update(flush.lasts)
        else:
            self._db.execute("ROLLBACK")
            self._db.execute("BEGIN IMMEDIATE")
        return usual

    def _run_all(self, flush: OptimisticFlush) -> bool:
        """Run statement by statement; of most there is nothing in a flush."""
        return (
            (not flush.given or self._count("there", flush.given) == len(flush.given))
            and not (flush.absent and self._count("there", flush.absent))
            and (not flush.admits or self._all("admit", flush.admits, _ADMIT_WIDTH))
            and (not flush.ended or self._all("admit_ended", flush.ended, _ADMIT_WIDTH + 1))
            and (not flush.appends or self._all("append", flush.appends, 5))
            and (not flush.lasts or self._all("extend", _flat(flush.lasts.items()), 2))
            and (
                not flush.cursors
                or self._all("advance_cursors", _flat((*c, n) for c, n in flush.cursors.items()), 3)
            )
            and (not flush.delivers or self._all("deliver", flush.delivers, 10))
            and (
                not flush.raises
                or self._all("raise_from", _flat((m, *rise) for m, rise in flush.raises.items()), 5)
            )
            and (not flush.finishes or self._all("finish_all", flush.finishes, 7))
            and all(
                self._all("advance_all", flush.advances[to], 4, SOURCES[to]) for to in sorted(flush.advances)
            )
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
