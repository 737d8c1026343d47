"""The queries of a ledger, which change nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from duly.core.ids import time_of
from duly.core.lifecycle import State
from duly.core.messages import key_of
from duly.core.operations import Delivery, OpenDelivery
from duly.core.trusted_time import Floor
from duly.core.units import MS
from duly.errors import Malformed
from duly.storage.item_queries import ItemQueries
from duly.storage.message_filter import ANY_MESSAGE, OPEN_STATES, MessageFilter
from duly.storage.records import NEWEST, TIMED, AgedMessage, Description, Page, Record, Refusal, Size
from duly.storage.stream_queries import StreamQueries

WITH_ID_LOOKED_AT: Final = 200_000
"""The most messages that a search for an id without a time examines."""

WITH_ID_MOST: Final = 1_000
"""The most messages with the same id, each of another sender, that a search returns."""

LOOKED_AT: Final = 10_000
"""The most messages that one filtered page examines: listing messages must not block the hub."""

_BEYOND: Final = b"\xff" * 7
"""Above every key: a key is six bytes of time and then UTF-8 text, which has no byte 0xff."""


class LedgerQueries(StreamQueries, ItemQueries):
    """The queries that every ledger answers: those about messages, deliveries and the ledger as a whole are
    declared here, those about streams and items in its bases."""

    async def outcome(self, scope: str, id: str) -> Record | None:
        """Return the record of a message; None if the ledger does not know it, or no longer does."""
        return await self.find(key_of(scope, id))

    @abstractmethod
    async def find(self, key: bytes) -> Record | None:
        """Return the record of a message; None if the ledger does not know it, or no longer does."""

    async def find_all(self, keys: Collection[bytes]) -> list[Record]:
        """Return the records of the known ones among these messages, in any order."""
        return [record for key in keys if (record := await self.find(key)) is not None]

    async def with_id(self, id_: str) -> list[Record]:
        """Return the messages of all senders that used this id. A key begins with the time in its id, so
        these messages are adjacent. So are all messages whose ids have no time; of those the search examines
        at most `WITH_ID_LOOKED_AT`."""
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
        """Return a page of at most `limit` messages, newest first by key: by the time in their ids; messages
        whose ids have no time come last. `before` is the `next` of the previous page. `scope` and `open_only`
        are shorthands for the two most common parts of `wanted`.

        A filter is a search without an index, since an index would slow down every message. So a page
        examines no more than `look_at` messages (`LOOKED_AT`) and says where to continue.
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

    async def newest(
        self,
        *,
        wanted: MessageFilter = ANY_MESSAGE,
        before: bytes | None = None,
        limit: int = 100,
        look_at: int | None = None,
    ) -> Page:
        """Return a page of `messages` for a person to read: those whose ids have no time are listed by when
        they were accepted, among the others. `before` is a `Record.place`, or the `next` of a page.

        There is no index for that: they are sorted for each page. A ledger with more than twice `look_at` of
        them lists them last, as `messages` does.
        """
        top, look_at = _BEYOND if before is None else before, look_at or LOOKED_AT
        if top < TIMED or await self._key_below(TIMED, 2 * look_at + 1) is not None:
            return await self.messages(wanted=wanted, before=before, limit=limit, look_at=look_at)
        end = await self._key_below(top, look_at) if wanted != ANY_MESSAGE else None
        if end is not None and end < TIMED:
            end = None  # all others were examined
        found = await self._between(end or TIMED, top, wanted, limit)
        found += await self._untimed_between(end or bytes(6), top, wanted, limit)
        found = sorted(found, key=lambda record: record.place, reverse=True)[:limit]
        return Page(found, found[-1].place if len(found) == limit else end)

    @abstractmethod
    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        """Return the `count`-th key below `top`, or None if there are fewer."""

    @abstractmethod
    async def _between(self, end: bytes, top: bytes, wanted: MessageFilter, limit: int) -> list[Record]:
        """Return messages that match the filter, with end <= key < top, highest key first."""

    @abstractmethod
    async def _untimed_between(
        self, end: bytes, top: bytes, wanted: MessageFilter, limit: int
    ) -> list[Record]:
        """Return messages whose ids have no time that match the filter, with end <= `Record.place` < top,
        highest place first."""

    @abstractmethod
    async def of_kind(self, kind: str, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        """Return messages of a kind that were admitted as `listed`, below `before`, newest first by (time of
        acceptance, key)."""

    @abstractmethod
    async def open_deliveries(self, channel: str) -> list[OpenDelivery]:
        """Return all deliveries of a channel that have not ended, in the order of their messages'
        acceptance."""

    async def booked(self, channel: str, recipients: Collection[str]) -> list[OpenDelivery]:
        """Return the waiting deliveries for these recipients that no worker holds, in the order of
        `open_deliveries`."""
        return [
            item
            for item in await self.open_deliveries(channel)
            if item.delivery.ref.recipient in recipients and item.delivery.state is State.ACCEPTED
        ]

    async def unheld(self, channel: str) -> dict[str, tuple[int, int]]:
        """Return how many deliveries wait that no worker holds, and when the oldest of their messages was
        accepted, by recipient."""
        found: dict[str, tuple[int, int]] = {}
        for item in await self.open_deliveries(channel):
            if item.delivery.state is State.ACCEPTED and not item.delivery.worker:
                count, oldest = found.get(item.delivery.ref.recipient, (0, item.accepted_at))
                found[item.delivery.ref.recipient] = (count + 1, min(oldest, item.accepted_at))
        return found

    async def strays(
        self, channel: str, *, here: Collection[str], worker: str, living: Collection[str], now: int
    ) -> list[OpenDelivery]:
        """Return the open deliveries of a shared channel that this worker should take over, in the order of
        `open_deliveries`: those for recipients in `here` that this worker does not hold; those held by
        workers that are not in `living`; and those that expired while no worker held them."""
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

    async def deliveries_of(self, keys: Collection[bytes]) -> dict[bytes, list[Delivery]]:
        """Return the deliveries of each of these messages, as `deliveries` does."""
        return {key: await self.deliveries(key) for key in keys}

    @abstractmethod
    async def refusals(self, limit: int = 100, *, of: tuple[str, str] | None = None) -> list[Refusal]:
        """Return the latest refusals, newest first; with `of`, those under one (scope, id)."""

    @abstractmethod
    async def size(self) -> Size:
        """Return how many messages, deliveries and bytes the ledger holds."""

    @abstractmethod
    async def describe(self) -> Description:
        """Return the ledger's engine and the number of its schema."""

    @abstractmethod
    async def prunable(self, limit: int = 1_000) -> list[Record]:
        """Return the messages that `prune` would forget now, the oldest first."""

    @abstractmethod
    async def floor(self) -> Floor:
        """Return the floor: below which times messages may have been forgotten, and the trusted time."""

    @abstractmethod
    async def aged(
        self, kind: str, after: tuple[int, bytes], until: int, limit: int = 100
    ) -> list[AgedMessage]:
        """Return messages of a kind that were admitted as `listed`, above `after` and accepted before
        `until`, oldest first by (time of acceptance, key)."""
