"""The footprint of a flush: all rows that its operations may touch, known before the flush begins.

A flush of a shared database takes a fixed number of statements, however many operations it has. So the
footprint is computed first, and its rows are locked and read together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from duly.core import operations as w
from duly.core.operations import Admit, Advance, Deliver, Finish
from duly.errors import ProgramError


class Footprint:
    """All rows that the operations of a flush and their consequences may touch."""

    def __init__(self, groups: Iterable[w.Group]) -> None:
        self.admits: dict[bytes, w.Admit] = {}
        """the first admission of each key"""
        self.recalls: set[bytes] = set()
        self.moves: set[bytes] = set()
        self.deliveries: set[w.DeliveryNames] = set()
        self.claims: dict[str, DueDeliveries] = {}
        self.streams: set[str] = set()
        self.cursors: set[tuple[str, str]] = set()
        self.marks: set[str] = set()
        self.items: set[tuple[str, str]] = set()
        self.entries: set[tuple[str, int]] = set()
        """the entries that may be rewritten"""
        for group in groups:
            self._add(group)

    def _add(self, group: w.Group) -> None:
        for operation in group:
            if type(operation) is Admit:  # tested first: most operations are of these four types
                self.admits.setdefault(operation.message.key, operation)
                if operation.then:
                    self._add(operation.then)
                if operation.otherwise:
                    self._add(operation.otherwise)
            elif type(operation) is Advance:
                self.moves.add(operation.key)
            elif type(operation) is Deliver:
                self._add_delivery(operation.ref)
            elif type(operation) is Finish:
                self._add_delivery(operation.ref)
                if operation.then:
                    self._add(operation.then)
                if operation.otherwise:
                    self._add(operation.otherwise)
            else:
                self._add_other(operation)

    def _add_delivery(self, ref: w.DeliveryRef) -> None:
        self.deliveries.add((ref.key, ref.channel, ref.recipient, ref.round))

    def _add_other(self, operation: w.Write) -> None:
        match operation:
            case w.Recall(message=message):
                self.recalls.add(message.key)
            case w.Withdraw(key=key):
                self.moves.add(key)
            case w.Take(ref=ref, then=then, otherwise=otherwise):
                self._add_delivery(ref)
                self._add(then)
                self._add(otherwise)
            case w.Renew(ref=ref) | w.Postpone(ref=ref):
                self._add_delivery(ref)
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
            case w.LowerMark(mark=mark):
                self.marks.add(mark)
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
            case _:
                raise ProgramError(f"no footprint is known for {type(operation).__name__}")


class DueDeliveries(NamedTuple):
    """The deliveries that the claims of one channel may take: up to `limit` that are due at `now`."""

    now: int
    limit: int
