"""What a node knows of its peers: how each writes, and what was wrong with what they sent.

The law: what is refused is counted, and recorded with its reason in the node's own ledger, where `duly why`
finds it. A flood of it is counted to the last and recorded in part.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from duly.core.writes import Refuse
from duly.dialects import fd
from duly.dialects.fd import Content, Form
from duly.errors import LedgerError, Stopped
from duly.ledger import Ledger

KNOWN: Final = 10_000
NOTES: Final = 1_000
"""Refusals that are recorded with one commit; of a flood the rest is only counted."""


class Peers:
    """How each peer writes bytes, by what it wrote before. Who once wrote JSON writes JSON."""

    def __init__(self) -> None:
        self._forms: OrderedDict[str, Form] = OrderedDict()

    def form(self, peer: str) -> Form | None:
        return self._forms.get(peer)

    def read(self, peer: str, content: Content) -> Content:
        """What a peer means by this, as far as that depends on the peer."""
        if content.form is None or content.sure:
            return content
        known = self._forms.get(peer)
        if known is not None and content.form is not known:
            content = fd.read_content(content.raw, known)
        if known is None or (content.form is Form.JSON and known is not Form.JSON):
            self._forms[peer] = content.form or Form.BASE64
            if len(self._forms) > KNOWN:
                self._forms.popitem(last=False)
        return content


class Refusals:
    """Counts and records why nothing happened. `do` runs a chore in the background."""

    def __init__(self, counts: Counter[str], ledger: Ledger, do: Callable[[Coroutine[Any, Any, None]], None]):
        self._counts, self._ledger, self._do = counts, ledger, do
        self._notes: list[Refuse] = []

    def count(self, word: str) -> None:
        """One that the ledger has recorded already."""
        self._counts[word] += 1

    def note(self, scope: str, id: str, word: str, reason: str) -> None:
        self._counts[word] += 1
        if len(self._notes) < NOTES:
            self._notes.append(Refuse(scope or "mqtt", id[:200], word, reason, self._ledger.clock.now()))
            if len(self._notes) == 1:
                self._do(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(0)  # what comes in the same breath is written with it
        notes, self._notes = self._notes, []
        with suppress(LedgerError, Stopped):
            await self._ledger.write(*notes)
