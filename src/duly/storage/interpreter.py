"""The interpreter: what each operation does to the rows that a store provides, for all stores.

A store provides its `Rows`: all of them (memory), or those that a transaction has locked (PostgreSQL). The
interpreter carries operations out on these rows in order, each on the result of the one before. The
interpreter knows no database and no time; the store makes a group take effect as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import CONFLICT, FRESH, Answer, Message, Verdict, VerdictKind
from duly.core.trusted_time import Floor

_ACCEPTED: Final = State.ACCEPTED  # reading a member from its class takes nine times as long
_SENT: Final = State.SENT
_DONE: Final = State.DONE
_DUPLICATE: Final = VerdictKind.DUPLICATE
_BRANCHING: Final = w.BRANCHING
_NO_MESSAGE: Final = w.Advanced(False, None)


class MessageRow(Protocol):
    """The parts of a stored message that the interpreter reads."""

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the message's meaning."""
        ...

    @property
    def state(self) -> State:
        """The state of the message in its lifecycle."""
        ...

    @property
    def answer(self) -> Answer | None:
        """The answer of the message, if it has ended."""
        ...


class Rows(Protocol):
    """The rows of a ledger, as a store provides them: they are read and changed one by one."""

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

    def discard_delivery(self, ended: w.Delivery) -> None:
        """Store that a delivery has ended, or remove it; the store need not keep it."""
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
        """Return the position of a reader in a stream; 0 if it never reported one."""
        ...

    def put_cursor(self, stream: str, reader: str, n: int) -> None:
        """Store the position of a reader in a stream."""
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
        self._verbs: dict[type[w.Write], Callable[[Any], w.Result]] = {
            w.Admit: self._admit,
            w.Recall: self._recall,
            w.Withdraw: self._withdraw,
            w.Advance: self._advance,
            w.Deliver: self._deliver,
            w.Take: self._take,
            w.Claim: self._claim,
            w.Renew: self._renew,
            w.Postpone: self._postpone,
            w.Finish: self._finish,
            w.AppendEntry: self._append,
            w.RewriteEntry: self._rewrite,
            w.MoveCursor: self._move_cursor,
            w.RaiseMark: self._raise_mark,
            w.LowerMark: self._lower_mark,
            w.RecordRefusal: rows.refuse,
            w.PutItem: self._put_item,
            w.PutNewItem: self._put_new_item,
            w.DropItem: self._drop_item,
            w.CheckItem: self._check_item,
        }

    def execute(self, group: w.Group) -> w.Results:
        """Carry out the operations of a group and their consequences."""
        results = w.Results([], [])
        self._carry_out(group, results.operations, results.values)
        return results

    def _carry_out(self, group: w.Group, operations: list[w.Write], values: list[w.Result]) -> None:
        """Carry out operations in order, each followed by its consequences."""
        verbs = self._verbs
        for operation in group:
            kind = type(operation)
            result = verbs[kind](operation)
            operations.append(operation)
            values.append(result)
            if kind in _BRANCHING:
                branch: Any = operation
                more = branch.then if result is True or result is FRESH else branch.otherwise
                if more:
                    self._carry_out(more, operations, values)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _admit(self, admit: w.Admit) -> Verdict:
        rows, message = self._rows, admit.message
        verdict = self._known(message)
        if verdict is not None:
            return self._told(message, verdict, admit.at)
        refusal = rows.floor.refusal(admit.until, message.made, admit.at, repeatable=admit.repeatable)
        if refusal is not None:
            return self._told(message, refusal, admit.at)
        rows.admit(admit)
        return FRESH

    def _known(self, message: Message) -> Verdict | None:
        """Return the verdict on a message whose id is known (a repeat or a conflict); None if it is not."""
        row = self._rows.message(message.key)
        if row is None:
            return None
        if row.fingerprint != message.fingerprint:
            return CONFLICT
        return Verdict(_DUPLICATE, row.state, row.answer)

    def _told(self, message: Message, verdict: Verdict, at: int) -> Verdict:
        """Return the verdict; a refusal is recorded first."""
        if verdict.kind is not _DUPLICATE:
            self._rows.refuse(w.refusal_of(message, verdict, at))
        return verdict

    def _recall(self, recall: w.Recall) -> Verdict:
        return self._told(recall.message, self._known(recall.message) or recall.otherwise, recall.at)

    def _withdraw(self, withdraw: w.Withdraw) -> bool:
        row = self._rows.message(withdraw.key)
        if row is None or row.state.terminal:
            return False
        self._rows.withdraw(withdraw.key)
        return True

    def _advance(self, advance: w.Advance) -> w.Advanced:
        key, to, answer = advance.key, advance.to, advance.answer
        row = self._rows.message(key)
        if row is None:
            return _NO_MESSAGE
        if row.state not in SOURCES[to]:
            return w.Advanced(False, row.state, row.answer)
        self._rows.move(key, to, answer, advance.at)
        return w.Advanced(True, to, answer)

    # ── deliveries ───────────────────────────────────────────────────────────────────────────────

    def _deliver(self, new: w.Deliver) -> bool:
        if self._rows.delivery(new.ref) is not None:
            return False
        state = _SENT if new.attempt else _ACCEPTED
        self._rows.put_delivery(w.Delivery(new.ref, state, new.attempt, new.due, new.expires, new.worker))
        return True

    def _take(self, take: w.Take) -> bool:
        old = self._fenced(take.ref, take.attempt)
        if old is not None:
            self._start_attempt(old, take.worker, take.due)
        return old is not None

    def _claim(self, claim: w.Claim) -> list[w.Delivery]:
        due = self._rows.due(claim.channel, claim.now, claim.limit)
        return [self._start_attempt(each, claim.worker, claim.due) for each in due]

    def _renew(self, renew: w.Renew) -> bool:
        old = self._fenced(renew.ref, renew.attempt)
        if old is not None:
            self._rows.put_delivery(replace(old, due=renew.due))
        return old is not None

    def _postpone(self, postpone: w.Postpone) -> bool:
        old = self._fenced(postpone.ref, postpone.attempt)
        if old is not None:
            error, in_doubt = postpone.error, postpone.in_doubt
            self._rows.put_delivery(
                replace(old, state=_ACCEPTED, due=postpone.due, error=error, worker="", in_doubt=in_doubt)
            )
        return old is not None

    def _finish(self, finish: w.Finish) -> bool:
        old = self._fenced(finish.ref, finish.attempt)
        if old is None:
            return False
        ended = w.Delivery(
            old.ref, finish.state, old.attempt, old.due, old.expires, "", finish.error, old.in_doubt
        )
        if finish.kept:
            self._rows.put_delivery(ended)
        else:
            self._rows.discard_delivery(ended)
        return True

    def _fenced(self, ref: w.DeliveryRef, attempt: int | None) -> w.Delivery | None:
        """Return a delivery that has not ended if `attempt` is its last attempt; None means any attempt."""
        found = self._rows.delivery(ref)
        if found is None or found.state.terminal or not (attempt is None or attempt == found.attempt):
            return None
        return found

    def _start_attempt(self, old: w.Delivery, worker: str, due: int) -> w.Delivery:
        new = replace(old, state=_SENT, attempt=old.attempt + 1, due=due, worker=worker)
        self._rows.put_delivery(new)
        return new

    # ── streams and marks ────────────────────────────────────────────────────────────────────────

    def _append(self, append: w.AppendEntry) -> int:
        n = self._rows.last(append.stream) + 1
        self._rows.append(n, append)
        if append.ends:
            self._advance(w.Advance(append.key, _DONE, append.at, w.numbered(n)))
        return n

    def _rewrite(self, rewrite: w.RewriteEntry) -> bool:
        if not self._rows.entry_body(rewrite.stream, rewrite.n):
            return False
        self._rows.rewrite(rewrite.stream, rewrite.n, rewrite.body)
        return True

    def _move_cursor(self, move: w.MoveCursor) -> int:
        rows, stream, reader = self._rows, move.stream, move.reader
        reached = max(rows.cursor(stream, reader), min(move.n, rows.last(stream)))
        rows.put_cursor(stream, reader, reached)
        return reached

    def _raise_mark(self, rise: w.RaiseMark) -> bool:
        mark, n, ms = rise.mark, rise.n, rise.ms
        old = self._rows.mark(mark)
        if not w.is_later(n, ms, old):
            return False
        self._rows.put_mark(mark, n, ms if old is None or ms > old[1] else old[1])
        return True

    def _lower_mark(self, lower: w.LowerMark) -> bool:
        old = self._rows.mark(lower.mark)
        if old is None or old[1] <= lower.ms:
            return False
        self._rows.put_mark(lower.mark, *w.lowered(*old, lower.ms))
        return True

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def _put_item(self, put: w.PutItem) -> bool:
        new = self._rows.item(put.bucket, put.name) is None
        self._rows.put_item(put.bucket, put.name, put.body)
        return new

    def _put_new_item(self, put: w.PutNewItem) -> bool:
        new = self._rows.item(put.bucket, put.name) is None
        if new:
            self._rows.put_item(put.bucket, put.name, put.body)
        return new

    def _drop_item(self, drop: w.DropItem) -> bool:
        found = self._rows.item(drop.bucket, drop.name)
        there = found is not None and drop.only in (None, found)
        if there:
            self._rows.drop_item(drop.bucket, drop.name)
        return there

    def _check_item(self, check: w.CheckItem) -> bool:
        found = self._rows.item(check.bucket, check.name)
        return found is not None and check.body in (None, found)


def earliest(deliveries: Iterable[w.Delivery], channel: str, now: int, limit: int) -> list[w.Delivery]:
    """Return the deliveries that a claim takes: open, of this channel and due; the oldest first."""
    due = [d for d in deliveries if d.ref.channel == channel and not d.state.terminal and d.due <= now]
    due.sort(key=lambda d: (d.due, d.ref.key, d.ref.recipient, d.ref.round))
    return due[:limit]
