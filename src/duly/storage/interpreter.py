"""The verbs of the ledger, once: what each operation does to the rows that a store provides.

A store hands over its `Rows`: all of them (memory), or those that a transaction has locked (PostgreSQL). The
interpreter carries operations out on them in order, as they stand after the operation before. It knows no
database and no time; whether a group takes hold as a whole is the store's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import CONFLICT, FORGOTTEN, FRESH, Answer, Message, Verdict, Word
from duly.core.trusted_time import Floor


class MessageRow(Protocol):
    """A message as far as the verbs care."""

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of its meaning."""
        ...

    @property
    def state(self) -> State:
        """Where it is in the lifecycle."""
        ...

    @property
    def answer(self) -> Answer | None:
        """How it ended, if it has."""
        ...


class Rows(Protocol):
    """The rows of a ledger, as a store provides them: they are asked one by one, and changed one by one."""

    @property
    def floor(self) -> Floor:
        """What may have been forgotten."""
        ...

    def message(self, key: bytes) -> MessageRow | None:
        """Return a message."""
        ...

    def admit(self, admit: w.Admit) -> None:
        """Store a new message."""
        ...

    def move(self, key: bytes, to: State, answer: Answer | None, at: int) -> None:
        """Put a message into another state."""
        ...

    def withdraw(self, key: bytes) -> None:
        """Remove a message and its deliveries."""
        ...

    def delivery(self, ref: w.DeliveryRef) -> w.Delivery | None:
        """Return a delivery."""
        ...

    def put_delivery(self, delivery: w.Delivery) -> None:
        """Store a delivery, new or changed."""
        ...

    def due(self, channel: str, now: int, limit: int) -> list[w.Delivery]:
        """Return up to `limit` open deliveries of a channel that are due; see `earliest`."""
        ...

    def last(self, stream: str) -> int:
        """Return the number of a stream's last entry, 0 if there never was one."""
        ...

    def append(self, n: int, entry: w.AppendEntry) -> None:
        """Store a new entry under its number."""
        ...

    def entry_body(self, stream: str, n: int) -> bytes | None:
        """Return the body of an entry, if there is one."""
        ...

    def rewrite(self, stream: str, n: int, body: bytes) -> None:
        """Replace the body of an entry."""
        ...

    def cursor(self, stream: str, reader: str) -> int:
        """Return how far a reader has come, 0 if it never said."""
        ...

    def put_cursor(self, stream: str, reader: str, n: int) -> None:
        """Store how far a reader has come."""
        ...

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return a high-water mark."""
        ...

    def put_mark(self, name: str, n: int, ms: int) -> None:
        """Store a high-water mark."""
        ...

    def item(self, bucket: str, name: str) -> bytes | None:
        """Return the body of an item."""
        ...

    def put_item(self, bucket: str, name: str, body: bytes) -> None:
        """Store an item, new or replaced."""
        ...

    def drop_item(self, bucket: str, name: str) -> None:
        """Remove an item."""
        ...

    def refuse(self, refusal: w.RecordRefusal) -> None:
        """Record a refusal."""
        ...


class Interpreter:
    """Carries operations out on rows, one after the other."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def execute(self, group: w.Group) -> w.Results:
        """Carry a group out, with the consequences of its operations."""
        return w.execute(group, self.apply)

    def apply(self, operation: w.Write) -> w.Result:
        """Carry one operation out, without its consequences."""
        match operation:
            case w.Admit():
                return self._admit(operation)
            case w.Recall(message=message, otherwise=otherwise, at=at):
                return self._told(message, self._known(message) or otherwise, at)
            case w.Withdraw(key=key):
                return self._withdraw(key)
            case w.Advance(key=key, to=to, answer=answer, at=at):
                return self._advance(key, to, answer, at)
            case w.Deliver():
                return self._deliver(operation)
            case w.Take() | w.Renew() | w.Postpone() | w.Finish():
                return self._change(operation)
            case w.Claim(channel=channel, now=now, limit=limit):
                due = self._rows.due(channel, now, limit)
                return [self._start_attempt(each, operation.worker, operation.due) for each in due]
            case w.AppendEntry() | w.RewriteEntry() | w.MoveCursor():
                return self._apply_to_stream(operation)
            case w.RaiseMark(mark=mark, n=n, ms=ms):
                return self._raise_mark(mark, n, ms)
            case w.RecordRefusal():
                self._rows.refuse(operation)
                return None
            case w.PutItem() | w.PutNewItem() | w.DropItem() | w.CheckItem():
                return self._apply_to_item(operation)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _admit(self, admit: w.Admit) -> Verdict:
        verdict = self._known(admit.message)
        if verdict is None:
            if not self._rows.floor.covers(admit.until, admit.message.made):
                self._rows.admit(admit)
                return FRESH
            verdict = FORGOTTEN
        return self._told(admit.message, verdict, admit.at)

    def _known(self, message: Message) -> Verdict | None:
        row = self._rows.message(message.key)
        if row is None:
            return None
        if row.fingerprint != message.fingerprint:
            return CONFLICT
        return Verdict(Word.DUPLICATE, row.state, row.answer)

    def _told(self, message: Message, verdict: Verdict, at: int) -> Verdict:
        """Return the verdict, and record it if it is a refusal."""
        if verdict.word is not Word.DUPLICATE:
            self._rows.refuse(w.refusal_of(message, verdict, at))
        return verdict

    def _withdraw(self, key: bytes) -> bool:
        row = self._rows.message(key)
        if row is None or row.state.terminal:
            return False
        self._rows.withdraw(key)
        return True

    def _advance(self, key: bytes, to: State, answer: Answer | None, at: int) -> w.Advanced:
        row = self._rows.message(key)
        if row is None:
            return w.Advanced(False, None)
        if row.state not in SOURCES[to]:
            return w.Advanced(False, row.state, row.answer)
        self._rows.move(key, to, answer, at)
        return w.Advanced(True, to, answer)

    # ── deliveries ───────────────────────────────────────────────────────────────────────────────

    def _deliver(self, new: w.Deliver) -> bool:
        if self._rows.delivery(new.ref) is not None:
            return False
        state = State.SENT if new.attempt else State.ACCEPTED
        self._rows.put_delivery(w.Delivery(new.ref, state, new.attempt, new.due, new.expires, new.worker))
        return True

    def _change(self, change: w.Take | w.Renew | w.Postpone | w.Finish) -> bool:
        old = self._fenced(change.ref, change.attempt)
        if old is None:
            return False
        match change:
            case w.Take(worker=worker, due=due):
                self._start_attempt(old, worker, due)
            case w.Renew(due=due):
                self._rows.put_delivery(replace(old, due=due))
            case w.Postpone(due=due, error=error, in_doubt=doubt):
                waits = replace(old, state=State.ACCEPTED, due=due, error=error, worker="", in_doubt=doubt)
                self._rows.put_delivery(waits)
            case w.Finish(state=state, error=error):
                self._rows.put_delivery(replace(old, state=state, error=error, worker=""))
        return True

    def _fenced(self, ref: w.DeliveryRef, attempt: int | None) -> w.Delivery | None:
        """Return a delivery that has not ended, if `attempt` is its last one; None stands for any attempt."""
        found = self._rows.delivery(ref)
        if found is None or found.state.terminal or attempt not in (None, found.attempt):
            return None
        return found

    def _start_attempt(self, old: w.Delivery, worker: str, due: int) -> w.Delivery:
        new = replace(old, state=State.SENT, attempt=old.attempt + 1, due=due, worker=worker)
        self._rows.put_delivery(new)
        return new

    # ── streams, marks, items ────────────────────────────────────────────────────────────────────

    def _apply_to_stream(self, operation: w.AppendEntry | w.RewriteEntry | w.MoveCursor) -> int | bool:
        rows = self._rows
        match operation:
            case w.AppendEntry(stream=stream, key=key, at=at, ends=ends):
                n = rows.last(stream) + 1
                rows.append(n, operation)
                if ends:
                    self._advance(key, State.DONE, w.numbered(n), at)
                return n
            case w.RewriteEntry(stream=stream, n=n, body=body):
                if not rows.entry_body(stream, n):
                    return False
                rows.rewrite(stream, n, body)
                return True
            case w.MoveCursor(stream=stream, reader=reader, n=n):
                reached = max(rows.cursor(stream, reader), min(n, rows.last(stream)))
                rows.put_cursor(stream, reader, reached)
                return reached

    def _raise_mark(self, mark: str, n: int, ms: int) -> bool:
        old = self._rows.mark(mark)
        if not w.is_later(n, ms, old):
            return False
        self._rows.put_mark(mark, n, ms if old is None else max(ms, old[1]))
        return True

    def _apply_to_item(self, operation: w.PutItem | w.PutNewItem | w.DropItem | w.CheckItem) -> bool:
        rows, bucket, name = self._rows, operation.bucket, operation.name
        found = rows.item(bucket, name)
        match operation:
            case w.PutItem(body=body):
                rows.put_item(bucket, name, body)
                return found is None
            case w.PutNewItem(body=body):
                if found is None:
                    rows.put_item(bucket, name, body)
                return found is None
            case w.DropItem(only=only):
                there = found is not None and only in (None, found)
                if there:
                    rows.drop_item(bucket, name)
                return there
            case w.CheckItem(body=wanted):
                return found is not None and wanted in (None, found)


def earliest(deliveries: Iterable[w.Delivery], channel: str, now: int, limit: int) -> list[w.Delivery]:
    """Return those deliveries that a claim takes: open, of the channel, due; the oldest first."""
    due = [d for d in deliveries if d.ref.channel == channel and not d.state.terminal and d.due <= now]
    due.sort(key=lambda d: (d.due, d.ref.key, d.ref.recipient, d.ref.round))
    return due[:limit]
