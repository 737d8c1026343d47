"""The part of a ledger that one flush touches, in memory: as it was read, and as the writes leave it.

The law: a database across a network is asked a fixed number of times for a flush, however many writes are
in it. So it says beforehand which rows they may touch (`Footprint`); those are locked and read; the writes
are carried out on them in order, exactly as they stand; and what has changed is written back.

Nothing here knows a database. A verb means what it means in `duly.storage.memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import SOURCES, State
from duly.core.messages import CONFLICT, FORGOTTEN, FRESH, Answer, Message, Verdict, Word
from duly.core.trusted_time import Floor
from duly.storage.sql import rows


class Footprint:
    """Everything the writes of a flush may touch, their consequences included."""

    def __init__(self, groups: Iterable[w.Group]) -> None:
        self.admits: dict[bytes, w.Admit] = {}
        """the first admission of each key"""
        self.recalls: set[bytes] = set()
        self.moves: set[bytes] = set()
        self.refs: set[w.DeliveryRef] = set()
        self.claims: dict[str, DueDeliveries] = {}
        self.streams: set[str] = set()
        self.cursors: set[tuple[str, str]] = set()
        self.marks: set[str] = set()
        self.items: set[tuple[str, str]] = set()
        self.entries: set[tuple[str, int]] = set()
        """those that may be rewritten"""
        for group in groups:
            self._add(group)

    def _add(self, group: w.Group) -> None:
        for write in group:
            match write:
                case w.Admit(message=message, then=then):
                    self.admits.setdefault(message.key, write)
                    self._add(then)
                case w.Recall(message=message):
                    self.recalls.add(message.key)
                case w.Withdraw(key=key) | w.Advance(key=key):
                    self.moves.add(key)
                case w.Finish(ref=ref, then=then):
                    self.refs.add(ref)
                    self._add(then)
                case w.Deliver(ref=ref) | w.Take(ref=ref) | w.Renew(ref=ref) | w.Postpone(ref=ref):
                    self.refs.add(ref)
                case w.Claim(channel=channel, now=now, limit=limit):
                    other = self.claims.get(channel, DueDeliveries(0, 0))
                    self.claims[channel] = DueDeliveries(max(now, other.now), limit + other.limit)
                case w.AppendEntry(stream=stream, key=key, ends=ends):
                    self.streams.add(stream)
                    if ends and key not in self.admits:
                        self.moves.add(key)
                case w.RewriteEntry(stream=stream, n=n):
                    self.entries.add((stream, n))
                case w.MoveCursor(stream=stream, reader=reader):
                    self.cursors.add((stream, reader))
                case w.RaiseMark(mark=mark, then=then, otherwise=otherwise):
                    self.marks.add(mark)
                    self._add(then)
                    self._add(otherwise)
                case (
                    w.PutNewItem(bucket=bucket, name=name, then=then, otherwise=otherwise)
                    | w.CheckItem(bucket=bucket, name=name, then=then, otherwise=otherwise)
                ):
                    self.items.add((bucket, name))
                    self._add(then)
                    self._add(otherwise)
                case w.PutItem(bucket=bucket, name=name) | w.DropItem(bucket=bucket, name=name):
                    self.items.add((bucket, name))
                case w.RecordRefusal():
                    pass


class DueDeliveries(NamedTuple):
    """What the claims of one channel may take: up to `limit`, due by `now`."""

    now: int
    limit: int


class MessageRow(Struct, frozen=True, gc=False):
    """A message as far as the verbs care. `admit` is set if it was admitted in this flush."""

    fingerprint: bytes
    state: State
    answer: Answer | None = None
    moved_at: int | None = None
    """when it was moved in this flush"""
    admit: w.Admit | None = None


class ImageEntry(NamedTuple):
    stream: str
    n: int
    body: bytes
    at: int
    key: bytes


class Interpreter:
    """Rows as they stand while the writes of a flush are carried out one after the other."""

    def __init__(self) -> None:
        self.floor = Floor()
        self.messages: dict[bytes, MessageRow] = {}
        self.withdrawn: set[bytes] = set()
        self.lasts: dict[str, int] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.marks: dict[str, tuple[int, int]] = {}
        self.items: dict[tuple[str, str], bytes] = {}
        self.entries: list[ImageEntry] = []
        self.bodies: dict[tuple[str, int], bytes] = {}
        """of the entries that may be rewritten"""
        self.refusals: list[w.RecordRefusal] = []
        self._deliveries: dict[bytes, dict[w.DeliveryRef, w.Delivery]] = {}

    def put(self, delivery: w.Delivery) -> None:
        self._deliveries.setdefault(delivery.ref.key, {})[delivery.ref] = delivery

    def deliveries(self) -> Iterator[w.Delivery]:
        for of_one in self._deliveries.values():
            yield from of_one.values()

    def apply(self, write: w.Write) -> w.Result:
        match write:
            case w.Admit(message=message, at=at):
                return self._admit(write, message, at)
            case w.Recall(message=message, otherwise=otherwise, at=at):
                return self._told(message, self._known(message) or otherwise, at)
            case w.Withdraw(key=key):
                held = self.messages.get(key)
                if held is None or held.state.terminal:
                    return False
                del self.messages[key]
                self._deliveries.pop(key, None)
                self.withdrawn.add(key)
                return True
            case w.Advance(key=key, to=to, at=at, answer=answer):
                held = self.messages.get(key)
                if held is None:
                    return w.Advanced(False, None)
                if held.state not in SOURCES[to]:
                    return w.Advanced(False, held.state, held.answer)
                self.messages[key] = replace(held, state=to, answer=answer, moved_at=at)
                return w.Advanced(True, to, answer)
            case w.Deliver(ref=ref, attempt=attempt, due=due, expires=expires, worker=worker):
                if ref in self._deliveries.get(ref.key, ()):
                    return False
                state = State.SENT if attempt else State.ACCEPTED
                self.put(w.Delivery(ref, state, attempt, due, expires, worker))
                return True
            case w.Take(ref=ref, attempt=attempt, worker=worker, due=due):
                return self._touch(
                    ref, attempt, {"state": State.SENT, "attempt": attempt + 1, "worker": worker, "due": due}
                )
            case w.Renew(ref=ref, attempt=attempt, due=due):
                return self._touch(ref, attempt, {"due": due})
            case w.Postpone(ref=ref, attempt=attempt, due=due, error=error, in_doubt=doubt):
                change = {
                    "state": State.ACCEPTED,
                    "due": due,
                    "error": error,
                    "worker": "",
                    "in_doubt": doubt,
                }
                return self._touch(ref, attempt, change)
            case w.Finish(ref=ref, attempt=fence, state=state, error=error):
                return self._touch(ref, fence, {"state": state, "error": error, "worker": ""})
            case w.Claim():
                return self._claim(write)
            case w.AppendEntry(stream=stream, body=body, at=at, key=key, ends=ends):
                n = self.lasts.get(stream, 0) + 1
                self.lasts[stream] = n
                self.entries.append(ImageEntry(stream, n, body, at, key))
                if ends:
                    self.apply(w.Advance(key, State.DONE, at, w.numbered(n)))
                return n
            case w.RewriteEntry(stream=stream, n=n, body=body):
                if not self.bodies.get((stream, n)):
                    return False
                self.bodies[stream, n] = body
                return True
            case w.CheckItem(bucket=bucket, name=name, body=wanted):
                found = self.items.get((bucket, name))
                return found is not None and wanted in (None, found)
            case w.MoveCursor(stream=stream, reader=reader, n=n):
                where = (stream, reader)
                self.cursors[where] = max(self.cursors.get(where, 0), min(n, self.lasts.get(stream, 0)))
                return self.cursors[where]
            case w.RaiseMark(mark=mark, n=n, ms=ms):
                old = self.marks.get(mark)
                if not w.is_later(n, ms, old):
                    return False
                self.marks[mark] = (n, max(ms, old[1] if old else ms))
                return True
            case w.RecordRefusal():
                self.refusals.append(write)
                return None
            case w.PutItem(bucket=bucket, name=name, body=body):
                new = (bucket, name) not in self.items
                self.items[bucket, name] = body
                return new
            case w.PutNewItem(bucket=bucket, name=name, body=body):
                if (bucket, name) in self.items:
                    return False
                self.items[bucket, name] = body
                return True
            case w.DropItem(bucket=bucket, name=name, only=only):
                there = self.items.get((bucket, name))
                return only in (None, there) and self.items.pop((bucket, name), None) is not None

    def _admit(self, write: w.Admit, message: Message, at: int) -> Verdict:
        verdict = self._known(message)
        if verdict is None:
            if not self.floor.covers(write.until, message.made):
                self.messages[message.key] = MessageRow(message.fingerprint, write.state, admit=write)
                return FRESH
            verdict = FORGOTTEN
        return self._told(message, verdict, at)

    def _known(self, message: Message) -> Verdict | None:
        held = self.messages.get(message.key)
        if held is None:
            return None
        if held.fingerprint != message.fingerprint:
            return CONFLICT
        return Verdict(Word.DUPLICATE, held.state, held.answer)

    def _told(self, message: Message, verdict: Verdict, at: int) -> Verdict:
        if verdict.word is not Word.DUPLICATE:
            self.refusals.append(rows.refusal_of(message, verdict, at))
        return verdict

    def _touch(self, ref: w.DeliveryRef, fence: int | None, change: dict[str, Any]) -> bool:
        delivery = self._deliveries.get(ref.key, {}).get(ref)
        if delivery is None or delivery.state.terminal or fence not in (None, delivery.attempt):
            return False
        self.put(replace(delivery, **change))
        return True

    def _claim(self, claim: w.Claim) -> list[w.Delivery]:
        due = [
            d
            for d in self.deliveries()
            if d.ref.channel == claim.channel and not d.state.terminal and d.due <= claim.now
        ]
        due.sort(key=lambda d: (d.due, d.ref.key, d.ref.recipient, d.ref.round))
        taken = [
            replace(d, state=State.SENT, attempt=d.attempt + 1, due=claim.due, worker=claim.worker)
            for d in due[: claim.limit]
        ]
        for delivery in taken:
            self.put(delivery)
        return taken
