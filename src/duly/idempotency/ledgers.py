"""Ledgers by their URL: opened when they are first used, and shared by everything in one process and event
loop.

A function can so be decorated when its module is imported, before there is a loop and before a server forks
its workers. A SQLite file is opened as shared, so that all workers may use it. A ledger is closed when its
loop shuts down; that of a loop that has ended without doing so is dropped when the next one is opened. What
a forked process inherits is left alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Final
from urllib.parse import parse_qs, urlsplit

from duly.errors import Malformed, ProgramError, Stopped
from duly.runtime.tasks import Supervisor
from duly.storage import open_ledger
from duly.storage.ledger import Ledger

PRUNE_SECONDS: Final = 60.0
"""How often keys that are no longer kept are removed."""

LedgerSource = Ledger | str
"""A ledger, or its URL."""


class _Opened:
    """A ledger that is being opened, or is open, on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.loop = loop
        self.ledger: Ledger | None = None
        self.opening = loop.create_task(open_ledger(url))
        self.tasks = Supervisor()
        self.closing: AsyncGenerator[None, None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def prune_later(self) -> None:
        """Forget keys that are no longer kept, after a while and again and again. Between two times there is
        a timer and no task: a loop that ends without shutting down would complain of one."""
        self._timer = self.loop.call_later(PRUNE_SECONDS, self._begin_pruning)

    def _begin_pruning(self) -> None:
        self.tasks.do("forgetting old keys", self._prune(), expected=(Stopped,))

    async def _prune(self) -> None:
        try:
            if self.ledger is not None:
                await self.ledger.prune()
        finally:
            self.prune_later()

    async def stop(self) -> None:
        """End what is under way, and forget no more keys."""
        await self.tasks.stop()
        if self._timer is not None:
            self._timer.cancel()


_opened: Final[dict[tuple[asyncio.AbstractEventLoop, str], _Opened]] = {}
_inherited: Final[list[object]] = []


def check_source(source: object) -> LedgerSource:
    """Return the ledger or its URL, or raise an error that says what to pass."""
    if isinstance(source, Ledger):
        return source
    if asyncio.iscoroutine(source):
        source.close()
        raise ProgramError("duly.open_ledger(…) was not awaited; pass its URL, or await it first")
    if not isinstance(source, str):
        raise ProgramError(
            f"a ledger is named by its URL or opened by duly.open_ledger, not a {type(source).__name__}: "
            'duly.once("sqlite:///app.db", scope=…, key=…)'
        )
    return url_to_share(source)


def url_to_share(url: str) -> str:
    """Return a URL with which several processes can open the ledger.

    >>> url_to_share("sqlite:///app.db")
    'sqlite:///app.db?mode=shared'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("sqlite", "postgresql", "postgres", "memory"):
        raise Malformed(
            f"{url!r} is not a ledger; use sqlite:///app.db, sqlite:////absolute/app.db, postgresql://… or "
            "memory:"
        )
    if parts.scheme != "sqlite":
        return url
    if parts.netloc or len(parts.path) < 2:
        raise Malformed(f"{url!r} names no file; write sqlite:///app.db or sqlite:////absolute/app.db")
    options = parse_qs(parts.query, keep_blank_values=True)
    if options.get("mode", [""])[0] == "ro":
        raise Malformed(f"{url!r} cannot be written; leave mode=ro out")
    # Another option is refused when the ledger is opened; the error then shows the URL as it was given.
    return url if options else f"{url.partition('?')[0]}?mode=shared"


def open_ledger_at(source: LedgerSource) -> Ledger | None:
    """Return a ledger if it is open on this loop; most often it is."""
    if not isinstance(source, str):
        return source
    opened = _opened.get((asyncio.get_running_loop(), source))
    return None if opened is None else opened.ledger


async def ledger_at(source: LedgerSource) -> Ledger:
    """Return a ledger; one that is named by its URL is opened if it is not open on this loop."""
    if not isinstance(source, str):
        return source
    loop = asyncio.get_running_loop()
    opened = _opened.get((loop, source))
    if opened is not None and opened.ledger is not None:
        return opened.ledger
    if opened is None:
        _drop_of_ended_loops()
        opened = _opened[loop, source] = _Opened(loop, source)
    try:
        ledger = await asyncio.shield(opened.opening)
    except BaseException:
        if opened.opening.done():  # not if only this caller was cancelled
            _opened.pop((loop, source), None)
        raise
    if opened.ledger is None:
        opened.ledger = ledger
        opened.prune_later()
        # A loop that shuts down closes its asynchronous generators.
        opened.closing = _closing(opened, source, ledger)
        await anext(opened.closing)
    return ledger


async def _closing(opened: _Opened, url: str, ledger: Ledger) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        _opened.pop((opened.loop, url), None)
        await opened.stop()
        await ledger.close()


def _drop_of_ended_loops() -> None:
    for at, opened in list(_opened.items()):
        if opened.loop.is_closed():
            del _opened[at]
            drop = getattr(opened.ledger, "drop", None)
            if drop is not None:
                drop()


async def close_ledgers() -> None:
    """Close the ledgers that were opened by their URLs on this loop. A loop that is shut down by
    `asyncio.run` or by a web server does so by itself."""
    loop = asyncio.get_running_loop()
    for (owner, _), opened in list(_opened.items()):
        if owner is loop and opened.closing is not None:
            await opened.closing.aclose()


def _forget_in_child() -> None:
    _inherited.extend(_opened.values())
    _opened.clear()


os.register_at_fork(after_in_child=_forget_in_child)
