"""New entries: reads the lines that other hubs have stored in the conversations of the people connected here.

The law: conversations that are asked for while a query runs share the next one, so many lines from other hubs
cost few queries. A conversation with more new lines than a few is read by its connections one by one.
"""

from __future__ import annotations

from typing import Final, Protocol

from duly.apps.chat import conversations as c
from duly.apps.chat.connections import Connections
from duly.apps.chat.history import show_page
from duly.cluster.remote import CoalescedTask
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger, StreamEntry
from duly.wire.outgoing import LineFrame
from duly.wire.session import Session

NEW_ENTRIES: Final = 16
"""How many new lines of a conversation are read together with those of others."""
CONVS: Final = 64
"""From how many conversations one query reads; with the largest lines that is 64 MiB."""


class EntryTeller(Protocol):
    """What sends lines to the connections of a hub."""

    def join(self, name: str, conv: str, told: int = 0) -> None:
        """Subscribe a person to a conversation."""
        ...

    def part(self, name: str, conv: str, after: int = 0) -> None:
        """End the subscriptions of a person who has been sent line `after`."""
        ...

    def tell(self, conv: str, n: int, frame: LineFrame, by: Session | None, now: int) -> bool:
        """Send a stored line."""
        ...

    def raise_head(self, conv: str, n: int) -> None:
        """Note that a conversation has lines up to `n`, and let the connections read that lack some."""
        ...


class NewEntries:
    """Reads new lines for one hub's chat, and has `teller` send them."""

    def __init__(
        self, ledger: Ledger, connections: Connections, tasks: Supervisor, teller: EntryTeller
    ) -> None:
        self._ledger = ledger
        self._connections = connections
        self._teller = teller
        self._wanted: CoalescedTask[str] = CoalescedTask(self._read_all, tasks)

    def read_soon(self, conv: str) -> None:
        """Read the new lines of this conversation with the next query."""
        self._wanted.want(conv)

    async def _read_all(self, convs: list[str]) -> None:
        for i in range(0, len(convs), CONVS):
            some = [(conv, self._told(conv)) for conv in convs[i : i + CONVS]]
            places = [(c.stream(conv), told) for conv, told in some]
            pages = await self._ledger.entries_after(places, NEW_ENTRIES)
            for (conv, told), page in zip(some, pages, strict=True):
                await self._tell(conv, told, page)

    def _told(self, conv: str) -> int:
        """Return up to which line the furthest connection here was sent a conversation. Its two people, if it
        has two, are subscribed first: it may be new."""
        for name in c.pair_in(conv):
            self._teller.join(name, conv)
        return max((each.told for each in self._connections.subscriptions(conv)), default=0)

    async def _tell(self, conv: str, told: int, page: list[StreamEntry]) -> None:
        """Send the lines of a page that begins after line `told`."""
        if len(page) == NEW_ENTRIES:
            (own,) = await self._ledger.standing([(c.stream(conv), "")])
            self._teller.raise_head(conv, own.last)
            return
        now = self._ledger.clock.now()
        for line in await show_page(self._ledger, conv, page, now):
            told = line.n or 0
            self._teller.tell(conv, told, line, None, now)
            leaver = c.leaver_in(line) if c.is_group(conv) else None
            if leaver is not None:
                self._teller.part(leaver, conv, told)
        self._teller.raise_head(conv, told)
