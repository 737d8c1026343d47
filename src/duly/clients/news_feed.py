"""The news of a client, from the part that hears them to the program that reads them.

The laws. A reader gets each piece of news once, in order. When the client stops, the reader gets what is
left, and its loop ends: no reader waits for news that cannot come. A feed may be bounded; then the oldest
unread news are dropped. A reader may begin before the client starts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

N = TypeVar("N")


class NewsFeed(Generic[N]):
    """News that wait for their reader: at most `limit`, or any number."""

    def __init__(self, limit: int | None = None) -> None:
        self._news: deque[N] = deque(maxlen=limit)
        self._fresh = asyncio.Event()
        self._closed = False

    def add(self, news: N) -> None:
        """Append a piece of news."""
        self._news.append(news)
        self._fresh.set()

    def open(self) -> None:
        """Let readers wait for news, after the client has started again."""
        self._closed = False

    def close(self) -> None:
        """End the feed, once everything in it is read."""
        self._closed = True
        self._fresh.set()

    async def read(self) -> AsyncIterator[N]:
        """Yield the news as they come, until the feed is closed."""
        while True:
            while self._news:
                yield self._news.popleft()
            if self._closed:
                return
            self._fresh.clear()
            await self._fresh.wait()
