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

from duly.core.operations import DropItem, PutItem, RecordRefusal, Write
from duly.errors import LedgerError, Stopped
from duly.storage.ledger import Ledger
from duly.wire import fd
from duly.wire.fd import Content, Form

KNOWN: Final = 10_000
BUCKET: Final = "forms"
"""Where the ledger keeps how each peer writes."""
NOTES: Final = 1_000
"""Refusals that are recorded with one commit; of a flood the rest is only counted."""


class Peers:
    """How each peer writes bytes, by what it wrote before. Who once wrote JSON writes JSON.

    What is learned is kept in the ledger: what is stored is read after a restart as it was before. It decides
    how a string is read and in which form a peer is answered, and nothing else: whether a task is a repeat is
    decided by its bytes alone. `do` runs a chore in the background."""

    def __init__(self, ledger: Ledger, do: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._ledger, self._do = ledger, do
        self._forms: OrderedDict[str, Form] = OrderedDict()

    async def load(self) -> None:
        """Read what was learned before a restart."""
        for peer, form in (await self._ledger.bucket(BUCKET)).items():
            with suppress(ValueError):
                self._forms[peer] = Form(form.decode())

    def form(self, peer: str) -> Form | None:
        return self._forms.get(peer)

    def read(self, peer: str, content: Content) -> Content:
        """What a peer means by this, as far as that depends on the peer; and learn from it."""
        content = self.meant(peer, content)
        known = self._forms.get(peer)
        if content.form is None or content.sure:
            return content
        if known is None or (content.form is Form.JSON and known is not Form.JSON):
            self._learn(peer, content.form)
        return content

    def meant(self, peer: str, content: Content) -> Content:
        """What a peer means by this, by what is known of it by now."""
        known = self._forms.get(peer)
        if content.form is None or content.sure or known is None or content.form is known:
            return content
        return fd.read_content(content.raw, known)

    def _learn(self, peer: str, form: Form) -> None:
        self._forms[peer] = form
        forgotten = self._forms.popitem(last=False)[0] if len(self._forms) > KNOWN else None
        self._do(self._keep(peer, form, forgotten))

    async def _keep(self, peer: str, form: Form, forgotten: str | None) -> None:
        writes: list[Write] = [PutItem(BUCKET, peer, form.value.encode())]
        if forgotten is not None:
            writes.append(DropItem(BUCKET, forgotten))
        with suppress(LedgerError, Stopped):  # it is learned again
            await self._ledger.write(*writes)


class Refusals:
    """Counts and records why nothing happened. `do` runs a chore in the background."""

    def __init__(self, counts: Counter[str], ledger: Ledger, do: Callable[[Coroutine[Any, Any, None]], None]):
        self._counts, self._ledger, self._do = counts, ledger, do
        self._notes: list[RecordRefusal] = []

    def count(self, word: str) -> None:
        """One that the ledger has recorded already."""
        self._counts[word] += 1

    def note(self, scope: str, id: str, word: str, reason: str) -> None:
        self._counts[word] += 1
        if len(self._notes) < NOTES:
            self._notes.append(
                RecordRefusal(scope or "mqtt", id[:200], word, reason, self._ledger.clock.now())
            )
            if len(self._notes) == 1:
                self._do(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(0)  # what comes in the same breath is written with it
        notes, self._notes = self._notes, []
        with suppress(LedgerError, Stopped):
            await self._ledger.write(*notes)
