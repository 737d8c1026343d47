"""The queries of a ledger about its streams, and about the positions of their readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from duly.storage.records import StreamEntry, StreamPosition, StreamRange


class StreamQueries(ABC):
    """The queries about numbered streams and their cursors."""

    @abstractmethod
    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        """Return up to `limit` entries of a stream with numbers above `after`."""

    async def entries_after(
        self, places: Sequence[tuple[str, int]], limit: int = 100
    ) -> list[list[StreamEntry]]:
        """Return up to `limit` entries of each of many streams, those above a number, as a list for each; in
        a shared database with one query."""
        return [await self.entries(stream, after, limit) for stream, after in places]

    @abstractmethod
    async def extent(self, stream: str) -> StreamRange:
        """Return which entries a stream holds."""

    async def lasts(self, streams: Collection[str]) -> dict[str, int]:
        """Return the last number of each of these streams; streams without entries are left out."""
        names = list(streams)
        found = await self.standing([(stream, "") for stream in names])
        return {stream: position.last for stream, position in zip(names, found, strict=True) if position.last}

    async def newest_entries(self, streams: Collection[str], limit: int = 1) -> dict[str, list[StreamEntry]]:
        """Return the newest `limit` entries of each of these streams in order; streams without entries are
        left out."""
        lasts = await self.lasts(streams)
        found = {stream: await self.entries(stream, last - limit, limit) for stream, last in lasts.items()}
        return {stream: entries for stream, entries in found.items() if entries}

    @abstractmethod
    async def cursor(self, stream: str, reader: str) -> int:
        """Return the position of a reader in a stream; 0 if it never reported one."""

    @abstractmethod
    async def cursors(self, stream: str) -> dict[str, int]:
        """Return the positions of all readers of a stream."""

    @abstractmethod
    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return the stream's last number and the reader's position for many (stream, reader), with one
        query."""
