"""Threads for the blocking calls of channels, apart from those of the rest of the hub.

A mail server that does not answer, or a name that is not resolved, holds a thread for many seconds, also
after its attempt was given up. So each server gets a few threads of its own: it delays neither other
channels nor other work, and the hub does not wait for such threads when it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from duly.errors import NotSent

T = TypeVar("T")

AT_ONCE: Final = 16
"""The most calls to one server at once."""
TURN_SECONDS: Final = 8.0
"""How long a call waits for its turn; with the longest call it is shorter than the longest attempt."""


class ChannelThreads:
    """The threads of the channels of one hub. A server is named by its channels."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def run(self, server: str, within: float, call: Callable[[], T]) -> T:
        """Return what a blocking call returns. Raises `NotSent` if it does not get its turn, since earlier
        calls hang, and `TimeoutError` if it does not end within these seconds."""
        turns = self._turns.setdefault(server, asyncio.Semaphore(AT_ONCE))
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await turns.acquire()
        except TimeoutError:
            raise NotSent(f"{AT_ONCE} earlier attempts at this server still wait for it") from None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def end(tell: Callable[[], None]) -> None:
            turns.release()
            if not result.done():  # otherwise given up
                tell()

        def work() -> None:
            tell: Callable[[], None]
            try:
                tell = partial(result.set_result, call())
            except BaseException as problem:
                tell = partial(result.set_exception, problem)
            with contextlib.suppress(RuntimeError):  # the hub has stopped
                loop.call_soon_threadsafe(end, tell)

        try:
            threading.Thread(target=work, name=f"duly-channel {server}", daemon=True).start()
        except RuntimeError:
            turns.release()
            raise NotSent("the hub's machine starts no more threads; it runs too much") from None
        async with asyncio.timeout(within):
            return await result
