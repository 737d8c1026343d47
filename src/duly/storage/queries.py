"""What can be asked of a ledger, without changing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Final

from msgspec.structs import replace

from duly.core.ids import time_of
from duly.core.lifecycle import State
from duly.core.messages import key_of
from duly.core.operations import Delivery, OpenDelivery
from duly.core.trusted_time import Floor
from duly.core.units import MS
from duly.errors import Malformed
from duly.storage.message_filter import ANY_MESSAGE, OPEN_STATES, MessageFilter
from duly.storage.records import (
    NEWEST,
    AgedMessage,
    Description,
    Page,
    Record,
    Refusal,
    Size,
    StreamEntry,
    StreamPosition,
    StreamRange,
)

WITH_ID_LOOKED_AT: Final = 200_000
"""Most messages that a search for an id without a time looks at."""

WITH_ID_MOST: Final = 1_000
"""Most messages of one id, each of another sender, that are found."""

LOOKED_AT: Final = 10_000
"""Most messages that one filtered page looks at, however many there are: a list must not stop the hub."""

_BEYOND: Final = b"\xff" * 7
"""Above every key: six bytes of time and then text, where UTF-8 has no such byte."""


class LedgerQueries(ABC):
    """The questions that every ledger answers: about messages, deliveries, streams, marks and items."""

    async def outcome(self, scope: str, id: str) -> Record | None:
        """Return what became of a message; None if it is not known (any more)."""
        return await self.find(key_of(scope, id))

    @abstractmethod
    async def find(self, key: bytes) -> Record | None:
        """Return what is remembered of a message; None if it is not known (any more)."""

    async def find_all(self, keys: Collection[bytes]) -> list[Record]:
        """Return what is known of these messages, in any order."""
        return [record for key in keys if (record := await self.find(key)) is not None]

    async def with_id(self, id_: str) -> list[Record]:
        """Return the messages of all senders who used this id. A key begins with the time in its id, so
        they lie together; so do all messages whose ids have no time, and of these `WITH_ID_LOOKED_AT` are
        looked at."""
        ms = (time_of(id_) or 0) // MS
        top, end = (ms + 1).to_bytes(6, "big"), ms.to_bytes(6, "big")
        if not ms:
            end = await self._key_below(top, WITH_ID_LOOKED_AT) or end
        return await self._between(end, top, MessageFilter(id=id_), WITH_ID_MOST)

    async def messages(
        self,
        *,
        scope: str | None = None,
        open_only: bool = False,
        wanted: MessageFilter = ANY_MESSAGE,
        before: bytes | None = None,
        limit: int = 100,
        look_at: int | None = None,
    ) -> Page:
        """Return a page of at most `limit` messages, newest first by key: by the time their ids carry;
        those whose ids carry none come last. `before` is the `next` of the page before. `scope` and
        `open_only` are the two parts of `wanted` that are asked for most.

        To find what fits a filter is a search without an index, since an index would be paid for by every
        message. So a page looks at no more than `look_at` of them (`LOOKED_AT`) and says where to
        go on.
        """
        if limit < 1:
            raise Malformed(f"a page holds at least one message, not {limit}")
        if scope is not None:
            wanted = replace(wanted, scope=scope)
        if open_only:
            wanted = replace(wanted, states=OPEN_STATES & (wanted.states or OPEN_STATES))
        top = _BEYOND if before is None else before
        end = await self._key_below(top, look_at or LOOKED_AT) if wanted != ANY_MESSAGE else None
        found = await self._between(end or b"", top, wanted, limit)
        return Page(found, found[-1].message.key if len(found) == limit else end)

    @abstractmethod
    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        """Return the `count`-th key below `top`, if there are so many."""

    @abstractmethod
    async def _between(self, end: bytes, top: bytes, wanted: MessageFilter, limit: int) -> list[Record]:
        """Return messages that fit, with end <= key < top, highest first."""

    @abstractmethod
    async def of_kind(self, kind: str, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        """Return messages of a kind that were admitted as `listed`, below `before`, newest first by (when
        they were accepted, key)."""

    @abstractmethod
    async def open_deliveries(self, channel: str) -> list[OpenDelivery]:
        """Return all deliveries of a channel that have not ended, in the order of their messages'
        acceptance."""

    async def booked(self, channel: str, recipients: Collection[str]) -> list[OpenDelivery]:
        """Return deliveries for these recipients that wait, and that no worker holds, in the same order."""
        return [
            item
            for item in await self.open_deliveries(channel)
            if item.delivery.ref.recipient in recipients and item.delivery.state is State.ACCEPTED
        ]

    async def strays(
        self, channel: str, *, here: Collection[str], worker: str, living: Collection[str], now: int
    ) -> list[OpenDelivery]:
        """Return what this worker should see to, of a channel that several work on, in the same order: open
        deliveries for recipients who are `here` that another worker holds, or none; those of workers that no
        longer live; and those that expired while no worker held them."""
        return [
            item
            for item in await self.open_deliveries(channel)
            if (held := item.delivery).worker not in ("", *living)
            or (held.ref.recipient in here and held.worker != worker)
            or (not held.worker and 1 <= held.expires <= now)
        ]

    @abstractmethod
    async def deliveries(self, key: bytes) -> list[Delivery]:
        """Return the deliveries of a message, by channel, recipient and round."""

    @abstractmethod
    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        """Return up to `limit` entries of a stream with numbers above `after`."""

    @abstractmethod
    async def extent(self, stream: str) -> StreamRange:
        """Return which entries a stream holds."""

    async def lasts(self, streams: Collection[str]) -> dict[str, int]:
        """Return the last number of each of these streams; those that have none are left out."""
        return {stream: last for stream in streams if (last := (await self.extent(stream)).last)}

    @abstractmethod
    async def cursor(self, stream: str, reader: str) -> int:
        """Return how far a reader has come in a stream; 0 if it never said."""

    @abstractmethod
    async def cursors(self, stream: str) -> dict[str, int]:
        """Return how far every reader of a stream has come."""

    @abstractmethod
    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return how readers stand in streams, for many (stream, reader) with one question."""

    @abstractmethod
    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        """Return the high-water marks whose names begin so; if there are very many, those raised last."""

    @abstractmethod
    async def bucket(self, bucket: str) -> dict[str, bytes]:
        """Return everything in a bucket, by name, in the order of the names."""

    @abstractmethod
    async def item(self, bucket: str, name: str) -> bytes | None:
        """Return the body of an item, or None."""

    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Return items, for many (bucket, name) with one question."""
        return [await self.item(bucket, name) for bucket, name in places]

    async def counts(self, buckets: Collection[str]) -> dict[str, int]:
        """Return how many items are in each of these buckets; empty ones are left out."""
        return {bucket: count for bucket in buckets if (count := len(await self.bucket(bucket)))}

    @abstractmethod
    async def refusals(self, limit: int = 100, *, of: tuple[str, str] | None = None) -> list[Refusal]:
        """Return the latest refusals, newest first; with `of`, those under one (scope, id)."""

    @abstractmethod
    async def size(self) -> Size:
        """Return how much the ledger remembers."""

    @abstractmethod
    async def describe(self) -> Description:
        """Return what the ledger is made of."""

    @abstractmethod
    async def prunable(self, limit: int = 1_000) -> list[Record]:
        """Return what `prune` would forget now, the oldest first."""

    @abstractmethod
    async def floor(self) -> Floor:
        """Return what may have been forgotten, and the time that is trusted."""

    @abstractmethod
    async def aged(
        self, kind: str, after: tuple[int, bytes], until: int, limit: int = 100
    ) -> list[AgedMessage]:
        """Return messages of a kind that were admitted as `listed`, above `after` and accepted before
        `until`, oldest first by (when they were accepted, key)."""
