"""A ledger in memory: the naive, readable statement of what every ledger means.

It is the reference of the contract suite and the disk of the simulation. `Disk` is what survives:
drop the ledger, open another on the same disk, and only what was committed is there. Nothing is durable
beyond the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from duly.core import operations as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import CONFLICT, FORGOTTEN, FRESH, Answer, Message, Verdict, Word
from duly.core.trusted_time import Floor
from duly.errors import ProgramError
from duly.runtime.clock import Clock
from duly.storage.ledger import (
    HOT_IDS,
    NEWEST,
    REFUSALS_KEPT,
    AgedMessage,
    Description,
    Ledger,
    Record,
    Refusal,
    Size,
    StreamEntry,
    StreamPosition,
    StreamRange,
    Transaction,
)


class Disk:
    """What survives a crash."""

    def __init__(self) -> None:
        self.messages: dict[bytes, Record] = {}
        self.deliveries: dict[w.DeliveryRef, w.Delivery] = {}
        self.streams: dict[str, list[StreamEntry]] = {}
        self.lasts: dict[str, int] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.marks: dict[str, tuple[int, int]] = {}
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.refusals: list[Refusal] = []
        self.floor = Floor()


class MemoryLedger(Ledger):
    """Opened by `duly.open_ledger("memory:")`."""

    def __init__(self, clock: Clock | None = None, *, disk: Disk | None = None, hot: int = HOT_IDS) -> None:
        super().__init__(clock, hot=hot)
        self.disk = disk or Disk()
        self._witness.begin(self.disk.floor)

    async def commit(self, groups: Sequence[w.Group]) -> list[w.Results]:
        applied: list[tuple[w.Write, w.Result]] = []
        committed = [w.execute(group, self._apply, applied) for group in groups]
        self._learn(applied)
        return committed

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        raise ProgramError("a memory ledger has no SQL; open sqlite:///… or postgresql://… for transactions")

    # ── the verbs ────────────────────────────────────────────────────────────────────────────────

    def _apply(self, write: w.Write) -> w.Result:
        disk = self.disk
        match write:
            case w.Admit(message=message):
                return self._admit(write, message)
            case w.Recall(message=message, otherwise=otherwise, at=at):
                verdict = self._known(message)
                if verdict is None or verdict.word is Word.CONFLICT:
                    verdict = verdict or otherwise
                    self._refuse(message.scope, message.id, verdict, at)
                return verdict
            case w.Withdraw(key=key):
                record = disk.messages.get(key)
                if record is None or record.state.terminal:
                    return False
                self._forget(key)
                return True
            case w.Advance(key=key, to=to, at=at, answer=answer):
                return self._advance(key, to, at, answer)
            case w.Deliver(ref=ref):
                if ref in disk.deliveries:
                    return False
                state = State.SENT if write.attempt else State.ACCEPTED
                disk.deliveries[ref] = w.Delivery(
                    ref, state, write.attempt, write.due, write.expires, write.worker
                )
                return True
            case w.Take(ref=ref, attempt=attempt, worker=worker, due=due):
                return self._touch(
                    ref, attempt, state=State.SENT, attempt_=attempt + 1, worker=worker, due=due
                )
            case w.Renew(ref=ref, attempt=attempt, due=due):
                return self._touch(ref, attempt, due=due)
            case w.Postpone(ref=ref, attempt=attempt, due=due, error=error, in_doubt=doubt):
                return self._touch(
                    ref, attempt, state=State.ACCEPTED, due=due, error=error, worker="", in_doubt=doubt
                )
            case w.Finish(ref=ref, attempt=attempt, state=state, error=error):
                return self._touch(ref, attempt, state=state, error=error, worker="")
            case w.Claim():
                return self._claim(write)
            case w.AppendEntry(stream=stream, body=body, at=at, key=key, ends=ends):
                n = disk.lasts.get(stream, 0) + 1
                disk.lasts[stream] = n
                disk.streams.setdefault(stream, []).append(StreamEntry(n, body, at, key))
                if ends:
                    self._advance(key, State.DONE, at, w.numbered(n))
                return n
            case w.RewriteEntry(stream=stream, n=n, body=body):
                return self._rewrite(stream, n, body)
            case w.CheckItem(bucket=bucket, name=name, body=wanted):
                found = disk.buckets.get(bucket, {}).get(name)
                return found is not None and wanted in (None, found)
            case w.MoveCursor(stream=stream, reader=reader, n=n):
                where = (stream, reader)
                reached = max(disk.cursors.get(where, 0), min(n, disk.lasts.get(stream, 0)))
                disk.cursors[where] = reached
                return reached
            case w.RaiseMark(mark=mark, n=n, ms=ms):
                old = disk.marks.get(mark)
                if not w.is_later(n, ms, old):
                    return False
                disk.marks[mark] = (n, max(ms, old[1] if old else 0))
                return True
            case w.RecordRefusal(scope=scope, id=id_, word=word, reason=reason, at=at):
                disk.refusals.append(Refusal(scope, id_, word, reason, at))
                del disk.refusals[:-REFUSALS_KEPT]
                return None
            case w.PutItem(bucket=bucket, name=name, body=body):
                items = disk.buckets.setdefault(bucket, {})
                new = name not in items
                items[name] = body
                return new
            case w.PutNewItem(bucket=bucket, name=name, body=body):
                items = disk.buckets.setdefault(bucket, {})
                if name in items:
                    return False
                items[name] = body
                return True
            case w.DropItem(bucket=bucket, name=name, only=only):
                items = disk.buckets.get(bucket, {})
                return only in (None, items.get(name)) and items.pop(name, None) is not None

    def _admit(self, write: w.Admit, message: Message) -> Verdict:
        verdict = self._known(message)
        if verdict is None:
            if not self.disk.floor.covers(write.until, message.made):
                self.disk.messages[message.key] = Record(
                    message, write.state, None, write.until, write.at, write.at
                )
                return FRESH
            verdict = FORGOTTEN
        if verdict.word is not Word.DUPLICATE:
            self._refuse(message.scope, message.id, verdict, write.at)
        return verdict

    def _known(self, message: Message) -> Verdict | None:
        record = self.disk.messages.get(message.key)
        if record is None:
            return None
        if record.message.fingerprint != message.fingerprint:
            return CONFLICT
        return Verdict(Word.DUPLICATE, record.state, record.answer)

    def _refuse(self, scope: str, id_: str, verdict: Verdict, at: int) -> None:
        self._apply(w.RecordRefusal(scope, id_, verdict.named, verdict.reason, at))

    def _advance(self, key: bytes, to: State, at: int, answer: Answer | None) -> w.Advanced:
        record = self.disk.messages.get(key)
        if record is None:
            return w.Advanced(False, None)
        if record.state not in SOURCES[to]:
            return w.Advanced(False, record.state, record.answer)
        self.disk.messages[key] = msgspec.structs.replace(record, state=to, answer=answer, moved_at=at)
        return w.Advanced(True, to, answer)

    def _rewrite(self, stream: str, n: int, body: bytes) -> bool:
        kept = self.disk.streams.get(stream, [])
        for i, entry in enumerate(kept):
            if entry.n == n and entry.body:
                kept[i] = msgspec.structs.replace(entry, body=body)
                return True
        return False

    def _touch(
        self, ref: w.DeliveryRef, fence: int | None, *, attempt_: int | None = None, **change: Any
    ) -> bool:
        delivery = self.disk.deliveries.get(ref)
        if delivery is None or delivery.state.terminal or fence not in (None, delivery.attempt):
            return False
        if attempt_ is not None:
            change["attempt"] = attempt_
        self.disk.deliveries[ref] = msgspec.structs.replace(delivery, **change)
        return True

    def _claim(self, claim: w.Claim) -> list[w.Delivery]:
        due = [
            d
            for d in self.disk.deliveries.values()
            if d.ref.channel == claim.channel and not d.state.terminal and d.due <= claim.now
        ]
        due.sort(key=lambda d: (d.due, d.ref.key, d.ref.recipient, d.ref.round))
        taken: list[w.Delivery] = []
        for d in due[: claim.limit]:
            taken.append(
                msgspec.structs.replace(
                    d, state=State.SENT, attempt=d.attempt + 1, due=claim.due, worker=claim.worker
                )
            )
            self.disk.deliveries[d.ref] = taken[-1]
        return taken

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def find(self, key: bytes) -> Record | None:
        return self.disk.messages.get(key)

    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        below = sorted((key for key in self.disk.messages if key < top), reverse=True)
        return below[count - 1] if len(below) >= count else None

    async def _between(
        self, end: bytes, top: bytes, lead: bytes | None, open_only: bool, limit: int
    ) -> list[Record]:
        found = [
            (key, record)
            for key, record in self.disk.messages.items()
            if end <= key < top
            and (lead is None or key.startswith(lead, 6))
            and not (open_only and record.state.terminal)
        ]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [record for _, record in found[:limit]]

    async def alerts(self, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        found = [
            ((record.accepted_at, key), record)
            for key, record in self.disk.messages.items()
            if record.message.kind == "alert_event" and (record.accepted_at, key) < before
        ]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [record for _, record in found[:limit]]

    async def open_deliveries(self, channel: str) -> list[w.OpenDelivery]:
        found = [
            (record, delivery)
            for delivery in self.disk.deliveries.values()
            if delivery.ref.channel == channel and not delivery.state.terminal
            if (record := self.disk.messages.get(delivery.ref.key)) is not None
        ]
        found.sort(
            key=lambda pair: (pair[0].accepted_at, pair[1].ref.key, pair[1].ref.recipient, pair[1].ref.round)
        )
        return [w.OpenDelivery(record.message, record.state, delivery) for record, delivery in found]

    async def deliveries(self, key: bytes) -> list[w.Delivery]:
        found = [d for d in self.disk.deliveries.values() if d.ref.key == key]
        return sorted(found, key=lambda d: (d.ref.channel, d.ref.recipient, d.ref.round))

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        return [entry for entry in self.disk.streams.get(stream, ()) if entry.n > after][:limit]

    async def extent(self, stream: str) -> StreamRange:
        last = self.disk.lasts.get(stream, 0)
        kept = self.disk.streams.get(stream)
        return StreamRange(kept[0].n if kept else last + 1, last)

    async def cursor(self, stream: str, reader: str) -> int:
        return self.disk.cursors.get((stream, reader), 0)

    async def cursors(self, stream: str) -> dict[str, int]:
        return {reader: n for (of, reader), n in self.disk.cursors.items() if of == stream}

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        lasts, cursors = self.disk.lasts, self.disk.cursors
        return [StreamPosition(lasts.get(place[0], 0), cursors.get(place)) for place in places]

    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        return {mark: at for mark, at in self.disk.marks.items() if mark.startswith(lead)}

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        return dict(sorted(self.disk.buckets.get(bucket, {}).items()))

    async def item(self, bucket: str, name: str) -> bytes | None:
        return self.disk.buckets.get(bucket, {}).get(name)

    async def refusals(self, limit: int = 100) -> list[Refusal]:
        return self.disk.refusals[: -limit - 1 : -1]

    async def size(self) -> Size:
        return Size(len(self.disk.messages), len(self.disk.deliveries), 0)

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    async def prunable(self, limit: int = 1_000) -> list[Record]:
        by = (await self._would_raise()).until
        old = [r for r in self.disk.messages.values() if r.until <= by and r.state.terminal]
        old.sort(key=lambda record: (record.until, record.message.key))
        return old[:limit]

    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        self.disk.floor = self._raised(self.disk.floor)
        old = [record.message.key for record in await self.prunable(len(self.disk.messages))]
        old = [key for key in old if keys is None or key in keys][:limit]
        for key in old:
            self._forget(key)
        return len(old)

    async def floor(self) -> Floor:
        return self.disk.floor

    async def _set_floor(self, floor: Floor) -> None:
        self.disk.floor = floor

    def _forget(self, key: bytes) -> None:
        del self.disk.messages[key]
        for ref in [ref for ref in self.disk.deliveries if ref.key == key]:
            del self.disk.deliveries[ref]

    async def aged(self, after: tuple[int, bytes], until: int, limit: int = 100) -> list[AgedMessage]:
        found = sorted(
            (record.accepted_at, key)
            for key, record in self.disk.messages.items()
            if record.message.kind == "alert_event"
            and (record.accepted_at, key) > after
            and record.accepted_at < until
        )
        return [AgedMessage(at, key, await self._ended(key)) for at, key in found[:limit]]

    async def _ended(self, key: bytes) -> list[w.Delivery]:
        over = self.disk.messages[key].state.terminal
        return [one for one in await self.deliveries(key) if over and one.state.terminal]

    async def forget_deliveries(self, refs: Sequence[w.DeliveryRef]) -> int:
        held = self.disk.deliveries
        over = [ref for ref in {*refs} if ref in held and held[ref].state.terminal]
        for ref in over:
            del held[ref]
        return len(over)

    async def trim(self, stream: str, through: int) -> None:
        kept = self.disk.streams.get(stream)
        if kept:
            self.disk.streams[stream] = [entry for entry in kept if entry.n > through]

    async def describe(self) -> Description:
        return Description("memory", 0)

    async def close(self) -> None:
        pass
