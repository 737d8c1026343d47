"""The verbs of the ledger in SQLite: one operation, one or two statements.

A verb means what it means in `duly.storage.interpreter`; the writer thread calls it within a transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apsw
from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import FORGOTTEN, FRESH, Message, Verdict, Word, pack_answer
from duly.core.trusted_time import Floor
from duly.storage import sql
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.sql import rows


class SqliteVerbs:
    """Carries operations out on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._sql = sql.queries("sqlite")
        self._run = db.cursor().execute  # one for all: making one costs a tenth of an insert
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
            w.RaiseMark: self._raise,
            w.RecordRefusal: self._refuse,
            w.PutItem: self._put,
            w.PutNewItem: self._put_new,
            w.DropItem: self._drop,
            w.CheckItem: self._given,
        }
        self.floor = self.read_floor()

    def read_floor(self) -> Floor:
        """Return the floor as this transaction sees it."""
        return Floor(*self._fetch("floor")[0])

    def apply(self, write: w.Write) -> w.Result:
        """Carry one operation out, without its consequences."""
        return self._verbs[type(write)](write)

    def _fetch(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        return self._run(self._sql[name], args).fetchall()

    def _changed(self, name: str, *args: Any) -> bool:
        self._run(self._sql[name], args)
        return self._db.changes() > 0

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _admit(self, write: w.Admit) -> Verdict:
        if not self.floor.covers(write.until, write.message.made):
            self._run(self._sql["admit"], rows.admission_row(write))
            if self._db.changes():
                return FRESH
        verdict = self._known(write.message) or FORGOTTEN
        if verdict.word is not Word.DUPLICATE:
            self._refuse(w.refusal_of(write.message, verdict, write.at))
        return verdict

    def _recall(self, write: w.Recall) -> Verdict:
        verdict = self._known(write.message) or write.otherwise
        if verdict.word is not Word.DUPLICATE:
            self._refuse(w.refusal_of(write.message, verdict, write.at))
        return verdict

    def _known(self, message: Message) -> Verdict | None:
        found = self._fetch("known", message.key)
        return rows.verdict_of(message, found[0]) if found else None

    def _withdraw(self, write: w.Withdraw) -> bool:
        gone = self._changed("withdraw", write.key)
        if gone:
            self._changed("drop_deliveries", write.key)
        return gone

    def _advance(self, write: w.Advance) -> w.Advanced:
        found = self._fetch("state", write.key)
        if not found:
            return w.Advanced(False, None)
        state = State(found[0][0])
        if state not in SOURCES[write.to]:
            return w.Advanced(False, state, rows.answer_of(found[0][1]))
        packed = None if write.answer is None else pack_answer(write.answer)
        self._changed("advance", int(write.to), packed, write.at, write.key, int(state))
        return w.Advanced(True, write.to, write.answer)

    # ── deliveries ───────────────────────────────────────────────────────────────────────────────

    def _deliver(self, write: w.Deliver) -> bool:
        return self._changed("deliver", *rows.delivery_row(write))

    def _take(self, write: w.Take) -> bool:
        return self._changed("take", write.worker, write.due, *rows.names(write.ref), write.attempt)

    def _renew(self, write: w.Renew) -> bool:
        return self._changed("renew", write.due, *rows.names(write.ref), write.attempt)

    def _postpone(self, write: w.Postpone) -> bool:
        error = rows.plain(write.error)
        where = (*rows.names(write.ref), write.attempt)
        return self._changed("postpone", write.due, error, write.in_doubt, *where)

    def _finish(self, write: w.Finish) -> bool:
        error = rows.plain(write.error)
        return self._changed("finish", int(write.state), error, *rows.names(write.ref), write.attempt)

    def _claim(self, write: w.Claim) -> list[w.Delivery]:
        taken: list[w.Delivery] = []
        for row in self._fetch("due", write.channel, write.now, write.limit):
            d = rows.delivery_of(row)
            self._take(w.Take(d.ref, d.attempt, write.worker, write.due))
            taken.append(
                replace(d, state=State.SENT, attempt=d.attempt + 1, due=write.due, worker=write.worker)
            )
        return taken

    # ── streams, cursors, marks, refusals, buckets ───────────────────────────────────────────────

    def _append(self, write: w.AppendEntry) -> int:
        n = int(self._fetch("next_number", write.stream)[0][0])
        self._run(self._sql["append"], (write.stream, n, write.body, write.at, write.key))
        if write.ends:
            self._run(self._sql["number"], (pack_answer(w.numbered(n)), write.at, write.key))
        return n

    def _rewrite(self, write: w.RewriteEntry) -> bool:
        return self._changed("rewrite", write.body, write.stream, write.n)

    def _move_cursor(self, write: w.MoveCursor) -> int:
        return int(self._fetch("move_cursor", write.stream, write.reader, write.n)[0][0])

    def _raise(self, write: w.RaiseMark) -> bool:
        return self._changed("raise", write.mark, write.n, write.ms)

    def _refuse(self, write: w.RecordRefusal) -> None:
        self._changed("refuse", *rows.refusal_row(write))
        self._changed("forget_refusals", REFUSALS_KEPT)

    def _put(self, write: w.PutItem) -> bool:
        new = self._changed("put_new", write.bucket, write.name, write.body)
        if not new:
            self._changed("replace", write.body, write.bucket, write.name)
        return new

    def _put_new(self, write: w.PutNewItem) -> bool:
        return self._changed("put_new", write.bucket, write.name, write.body)

    def _given(self, write: w.CheckItem) -> bool:
        found = self._fetch("item", write.bucket, write.name)
        return bool(found) and write.body in (None, found[0][0])

    def _drop(self, write: w.DropItem) -> bool:
        if write.only is None:
            return self._changed("drop", write.bucket, write.name)
        return self._changed("drop_only", write.bucket, write.name, write.only)
