"""Stores the traces of commands under way in the ledger, so that a restart does not interrupt them.

A command that ends quickly is never written: only commands that are still under way when traces are stored, a
few times a second. A hub that is killed loses the traces of its last moment, never a command. A hub that
hands over a command accepted by another hub finds its trace in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from duly.core.messages import Message
from duly.core.operations import DropItem, PutItem, PutNewItem
from duly.runtime.tracing import CommandTraces, is_traceparent
from duly.storage.ledger import Ledger

BUCKETS: Final = "traces/"
"""The prefix of the bucket names; the name of the hub follows."""
HUBS: Final = "traces"
"""The bucket with the names of the hubs that have kept a trace."""
AT_ONCE: Final = 500
"""How many items are written together."""


class KeptTraces:
    """The traces of one hub in its ledger; `hub` is its name."""

    def __init__(self, ledger: Ledger, traces: CommandTraces, hub: str) -> None:
        self._ledger = ledger
        self._traces = traces
        self._hub = hub
        self._bucket = BUCKETS + hub
        self._listed = False
        """whether this hub is in the list of those that have kept a trace"""
        self._stored: dict[bytes, str] = {}
        """the names of items, by the keys of their commands"""

    async def load(self, messages: Iterable[Message]) -> None:
        """Resume the traces of messages that were under way before a restart, and drop the others."""
        items = await self._ledger.bucket(self._bucket)
        if not items:
            return
        for message in messages:
            found = items.pop(_name(message.key), b"").decode(errors="replace")
            if is_traceparent(found):
                self._traces.resume(
                    message.key, found, message.scope, message.id, message.kind, message.recipient
                )
                self._stored[message.key] = _name(message.key)
        await self._write([DropItem(self._bucket, name) for name in items])

    async def store(self) -> None:
        """Write the new traces, and drop those of commands that have ended."""
        now = self._traces.open
        if not now and not self._stored:
            return
        new = {key: one.traceparent for key, one in now.items() if key not in self._stored}
        gone = [key for key in self._stored if key not in now]
        if not self._listed:
            await self._ledger.write(PutNewItem(HUBS, self._hub, b""))
            self._listed = True
        puts = [PutItem(self._bucket, _name(key), trace.encode()) for key, trace in new.items()]
        drops = [DropItem(self._bucket, self._stored[key]) for key in gone]
        await self._write([*puts, *drops])
        self._stored |= {key: _name(key) for key in new}
        for key in gone:
            del self._stored[key]

    async def resume(self, messages: Sequence[Message]) -> None:
        """Resume the traces that other hubs have stored for messages that are handed over here."""
        others = [hub for hub in await self._ledger.bucket(HUBS) if hub != self._hub]
        untraced = [message for message in messages if message.key not in self._traces.open]
        places = [(message, BUCKETS + hub) for message in untraced for hub in others]
        kept = await self._ledger.items([(bucket, _name(message.key)) for message, bucket in places])
        for (message, _), item in zip(places, kept, strict=True):
            traceparent = (item or b"").decode(errors="replace")
            if is_traceparent(traceparent):
                self._traces.resume_remote(message, traceparent)

    async def _write(self, operations: list[PutItem | DropItem]) -> None:
        for start in range(0, len(operations), AT_ONCE):
            await self._ledger.write(*operations[start : start + AT_ONCE])


def _name(key: bytes) -> str:
    """Return the name of an item, which is short however long the key is."""
    return blake2b(key, digest_size=16).hexdigest()
