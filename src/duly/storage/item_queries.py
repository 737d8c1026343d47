"""The queries of a ledger about its named values: items in buckets, and high-water marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class ItemQueries(ABC):
    """The queries about items, which are named values in buckets, and about high-water marks."""

    @abstractmethod
    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        """Return the high-water marks whose names begin with `lead`; if there are very many, those raised
        last."""

    @abstractmethod
    async def bucket(self, bucket: str) -> dict[str, bytes]:
        """Return everything in a bucket, by name, in the order of the names."""

    @abstractmethod
    async def item(self, bucket: str, name: str) -> bytes | None:
        """Return the body of an item, or None."""

    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Return the items of many (bucket, name), with one query."""
        return [await self.item(bucket, name) for bucket, name in places]

    async def counts(self, buckets: Collection[str]) -> dict[str, int]:
        """Return how many items are in each of these buckets; empty ones are left out."""
        return {bucket: count for bucket in buckets if (count := len(await self.bucket(bucket)))}
