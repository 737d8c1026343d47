"""Checks a ledger: every invariant, over the rows of a snapshot.

Each table is read once, in the order of its key. Tables that refer to each other are read side by side, so
memory does not grow with the ledger; only the high-water marks are all held in memory. An application's own
inspectors check what it keeps in items and streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from duly.core.high_water import mark_name, names_in
from duly.core.lifecycle import State
from duly.core.messages import Message, Mode, key_of
from duly.core.messages import names_in as names_of
from duly.core.operations import DeliveryKind
from duly.core.units import MS
from duly.errors import DulyError
from duly.storage import snapshot as tables
from duly.storage.invariants import KERNEL, BrokenInvariant, Invariant
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.snapshot import LedgerTable, Snapshot, StoredRow, Summaries, TableDigest
from duly.storage.sql import rows

EXAMPLES: Final = 20
"""How many violations of one invariant are listed; the others are only counted."""
REFUSALS_SLACK: Final = 2
"""Refusals are trimmed now and then, so a ledger may hold this many times `REFUSALS_KEPT`."""

_STATES: Final = frozenset(int(state) for state in State)
_KINDS: Final = frozenset(int(kind) for kind in DeliveryKind)
_STARTED: Final = frozenset({State.SENT, State.DELIVERED, State.DONE, State.UNKNOWN})


class Inspector(Protocol):
    """Checks what an application keeps in a ledger."""

    invariants: Sequence[Invariant]
    skipped: dict[str, str]
    """invariants that could not be checked, and why"""

    def item(self, bucket: str, name: str, body: bytes) -> Iterable[BrokenInvariant]:
        """Check an item; items are passed in the order of their names."""
        ...

    def entry(self, stream: str, n: int, body: bytes) -> Iterable[BrokenInvariant]:
        """Check an entry of a stream; entries are passed in order, after all items."""
        ...

    def finish(self) -> Iterable[BrokenInvariant]:
        """Check what needs all items and entries."""
        ...


class InvariantFinding(Struct, frozen=True):
    """The finding on one invariant; `holds` is None if it could not be checked."""

    name: str
    sentence: str
    holds: bool | None
    count: int = 0
    examples: list[str] = []
    advice: str = ""


class CheckReport(Struct, frozen=True):
    """The findings of a check."""

    ok: bool
    engine: str
    schema: int
    tables: Summaries
    invariants: list[InvariantFinding]


class LedgerCheck:
    """One check of one snapshot."""

    def __init__(self, snapshot: Snapshot, inspectors: Sequence[Inspector] = ()) -> None:
        self._snapshot = snapshot
        self._inspectors = inspectors
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._digests: dict[str, TableDigest] = {}
        self._marks: dict[str, tuple[int, int]] = {}

    async def run(self, progress: Callable[[str, int], None] = lambda table, rows: None) -> CheckReport:
        """Read the whole snapshot and return the findings. `progress` is called with the name of a table and
        the number of further rows that were read from it."""
        self._progress = progress
        for name, detail in await self._snapshot.problems():
            self._violated(name, detail)
        await self._check_floor()
        await self._check_items()
        await self._check_marks()
        await self._check_messages()
        await self._check_streams()
        await self._check_refusals()
        for inspector in self._inspectors:
            self._take(inspector.finish())
        return self._report()

    def _violated(self, name: str, detail: str) -> None:
        self._counts[name] += 1
        listed = self._examples.setdefault(name, [])
        if len(listed) < EXAMPLES:
            listed.append(detail)

    def _take(self, found: Iterable[BrokenInvariant]) -> None:
        for one in found:
            self._violated(one.invariant, one.detail)

    def _report(self) -> CheckReport:
        skipped: dict[str, str] = {}
        all_of_them = list(KERNEL)
        for inspector in self._inspectors:
            all_of_them += inspector.invariants
            skipped |= inspector.skipped
        findings = []
        for one in all_of_them:
            count = self._counts[one.name]
            if count:
                examples = self._examples[one.name]
                findings.append(InvariantFinding(one.name, one.sentence, False, count, examples, one.advice))
            elif one.name in skipped:
                findings.append(InvariantFinding(one.name, one.sentence, None, advice=skipped[one.name]))
            else:
                findings.append(InvariantFinding(one.name, one.sentence, True))
        shown = {table.name: self._digests[table.name].summary() for table in tables.TABLES}
        return CheckReport(not self._counts, self._snapshot.engine, self._snapshot.schema, shown, findings)

    async def _rows(self, table: LedgerTable) -> AsyncIterator[StoredRow]:
        digest = self._digests[table.name] = TableDigest()
        fitting: set[tuple[type, ...]] = set()
        async for batch in self._snapshot.rows(table):
            digest.add(batch)
            self._progress(table.name, len(batch))
            for row in batch:
                kinds = tuple(map(type, row))
                if kinds in fitting:
                    yield row
                elif table.fits(row):
                    fitting.add(kinds)
                    yield row
                else:
                    self._violated("column-types", f"a row of {table.name}: {str(row)[:200]}")

    # ── small tables ─────────────────────────────────────────────────────────────────────────────

    async def _check_floor(self) -> None:
        found = [row async for row in self._rows(tables.FLOOR)]
        if len(found) != 1:
            self._violated("floor-one", f"there are {len(found)} floors")
        for row in found:
            _until, _trusted, _claim, mended, barrier, _restored = row
            if min(row) < 0:
                self._violated("floor-one", "a number of the floor is below zero")
            if barrier and not mended:
                self._violated("floor-one", "it has a barrier, and was never mended")

    async def _check_items(self) -> None:
        async for bucket, name, body in self._rows(tables.ITEMS):
            for inspector in self._inspectors:
                self._take(inspector.item(bucket, name, body))

    async def _check_marks(self) -> None:
        async for mark, n, ms in self._rows(tables.MARKS):
            self._marks[mark] = (n, ms)
            if mark.startswith("["):  # other marks are a client's own counters, which have plain names
                try:
                    names_in(mark)
                except msgspec.DecodeError:
                    self._violated("mark-readable", f"{mark!r}")

    async def _check_refusals(self) -> None:
        count = 0
        async for _, id_, word, _, at in self._rows(tables.REFUSALS):
            count += 1
            if not word or at < 0:
                self._violated("refusals-kept", f"the refusal of {id_!r} has no word, or no time")
        if count > REFUSALS_SLACK * REFUSALS_KEPT:
            self._violated("refusals-kept", f"there are {count}, and {REFUSALS_KEPT} are kept")

    # ── messages and deliveries, side by side ────────────────────────────────────────────────────

    async def _check_messages(self) -> None:
        deliveries = _Ahead(self._rows(tables.DELIVERIES))
        await deliveries.step()
        before = b""
        async for row in self._rows(tables.MESSAGES):
            key, state = row[0], row[4]
            shown = _shown(key)
            if key <= before:
                self._violated("one-outcome", f"{shown} is there twice")
            before = key
            message = self._check_message(row, shown)
            while deliveries.row is not None and deliveries.row[0] < key:
                self._orphan(deliveries.row)
                await deliveries.step()
            while deliveries.row is not None and deliveries.row[0] == key:
                self._check_delivery(deliveries.row, state, shown)
                await deliveries.step()
            if message is not None:
                self._check_lane(message, state, shown)
        while deliveries.row is not None:
            self._orphan(deliveries.row)
            await deliveries.step()

    def _orphan(self, row: StoredRow) -> None:
        self._check_delivery(row, State.ACCEPTED, _shown(row[0]))
        self._violated("delivery-message", f"{_shown(row[0])} to {row[2]!r} by {row[1]!r} has no message")

    def _check_message(self, row: StoredRow, shown: str) -> Message | None:
        """Check the row of a message; return the message if it can be read."""
        (key, fingerprint, kind, recipient, state, _until, _accepted, _moved, time, expires, position, body,
         answer, _listed) = row  # fmt: skip
        if state not in _STATES:
            self._violated("message-readable", f"{shown} is in state {state}, which does not exist")
        if answer is not None:
            self._check_answer(answer, state, shown)
        try:
            if key_of(*names_of(key)) != key:
                raise ValueError("the time in front is not that of the id")
        except (DulyError, ValueError) as problem:
            self._violated("message-key", f"{shown}: {problem}")
            return None
        try:
            message = rows.message_of((key, kind, recipient, body, time, expires, position))
        except (DulyError, msgspec.DecodeError, ValueError) as problem:
            self._violated("message-readable", f"{shown}: {problem}")
            return None
        if message.fingerprint != fingerprint:
            self._violated("message-fingerprint", f"{shown} is not what was accepted under this id")
        return message

    def _check_answer(self, answer: bytes, state: int, shown: str) -> None:
        with suppress(msgspec.DecodeError, ValueError):
            rows.answer_of(answer)
            if state < State.DONE:
                self._violated("answer-readable", f"{shown} has an answer, and has not ended")
            return
        self._violated("answer-readable", f"the answer to {shown} cannot be read")

    def _check_delivery(self, row: StoredRow, state: int, shown: str) -> None:
        _, channel, recipient, round_, own, attempt, _due, _expires, worker, _error, kind, _doubt = row
        what = f"{shown} to {recipient!r} by {channel!r}, round {round_},"
        if own not in _STATES or kind not in _KINDS or attempt < 0:
            self._violated("delivery-readable", f"{what} has state {own}, kind {kind}, attempt {attempt}")
        elif own in (State.SENT, State.DELIVERED) and not attempt:
            self._violated("delivery-readable", f"{what} is under way, and was never tried")
        elif own >= State.DONE and worker:
            self._violated("delivery-readable", f"{what} has ended, and {worker!r} still holds it")
        first = (
            kind == DeliveryKind.STEP and not round_
        )  # an escalation may still wait after its message has ended
        if first and own < State.DONE <= state and state != State.UNKNOWN:
            word = State(state).word if state in _STATES else str(state)
            self._violated("delivery-ended", f"{what} is open, and its message is {word}")

    def _check_lane(self, message: Message, state: int, shown: str) -> None:
        order = message.order
        if order is None or order.n is None or order.mode is Mode.ANY or state not in _STARTED:
            return  # only a message with a position in the order moves the mark
        mark = self._marks.get(mark_name(message))
        if mark is not None and order.n > mark[0] and message.made // MS > mark[1]:
            self._violated(
                "mark-reached", f"{shown} is number {order.n} and has started, the mark is at {mark[0]}"
            )

    # ── streams, entries and cursors, side by side ───────────────────────────────────────────────

    async def _check_streams(self) -> None:
        streams, cursors = _Ahead(self._rows(tables.STREAMS)), _Ahead(self._rows(tables.CURSORS))
        entries = _Ahead(self._rows(tables.ENTRIES))
        for one in (streams, cursors, entries):
            await one.step()
        while (name := _first(streams, cursors, entries)) is not None:
            last = 0
            if streams.row is not None and streams.row[0] == name:
                last = streams.row[1]
                await streams.step()
            await self._check_entries(entries, name, last)
            while cursors.row is not None and cursors.row[0] == name:
                _, reader, n = cursors.row
                if not 0 <= n <= last:
                    self._violated(
                        "cursor-reached", f"{reader!r} is at {n} of {name!r}, which ends at {last}"
                    )
                await cursors.step()

    async def _check_entries(self, entries: _Ahead, name: str, last: int) -> None:
        before: int | None = None
        while entries.row is not None and entries.row[0] == name:
            n, body = entries.row[1], entries.row[2]
            if not 1 <= n <= last:
                self._violated("stream-last", f"entry {n} of {name!r}, which ends at {last}")
            if before is not None and n != before + 1:
                self._violated("stream-order", f"entry {n} of {name!r} follows entry {before}")
            before = n
            for inspector in self._inspectors:
                self._take(inspector.entry(name, n, body))
            await entries.step()
        if before is not None and before < last:
            self._violated("stream-order", f"{name!r} ends at {last}, and its last entry is {before}")


class _Ahead:
    """The rows of a table, with a look at the next one."""

    def __init__(self, source: AsyncIterator[StoredRow]) -> None:
        self._source = source
        self.row: StoredRow | None = None

    async def step(self) -> None:
        """Go to the next row, or to None after the last."""
        self.row = await anext(self._source, None)


def _first(*sources: _Ahead) -> str | None:
    """Return the first stream, in order, among the next rows of these tables."""
    return min((source.row[0] for source in sources if source.row is not None), default=None)


def _shown(key: bytes) -> str:
    """Return a key as the report shows it."""
    try:
        scope, id_ = names_of(key)
    except (DulyError, ValueError, IndexError):
        return f"the key {key.hex()}"
    return f"{id_!r} of {scope!r}"
