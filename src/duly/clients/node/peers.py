"""What a node knows of its peers: the form in which each encodes bytes, and what was refused.

The law: every refusal is counted, and recorded with its reason in the node's own ledger, where `duly why`
finds it. In a flood all are counted, and some are recorded.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Final

from duly.clients.base import BackgroundJobs
from duly.core.operations import DropItem, PutItem, RecordRefusal, Write
from duly.errors import LedgerError, Stopped
from duly.storage.ledger import Ledger
from duly.wire import fd
from duly.wire.fd import Content, Form

KNOWN: Final = 10_000
BUCKET: Final = "forms"
"""The bucket of the ledger with each peer's form."""
NOTES: Final = 1_000
"""The most refusals recorded in one commit; further ones are only counted."""


class Peers:
    """The form in which each peer encodes bytes, learned from its messages. A peer that once wrote JSON
    writes JSON.

    The forms are stored in the ledger, so that stored tasks are decoded the same way after a restart. A form
    decides only how a string is decoded and how the peer is answered: whether a task is a repeat depends on
    its bytes alone.
    """

    def __init__(self, ledger: Ledger, jobs: BackgroundJobs) -> None:
        self._ledger, self._jobs = ledger, jobs
        self._forms: OrderedDict[str, Form] = OrderedDict()

    async def load(self) -> None:
        """Read what was learned before a restart."""
        for peer, form in (await self._ledger.bucket(BUCKET)).items():
            with suppress(ValueError):
                self._forms[peer] = Form(form.decode())

    def form(self, peer: str) -> Form | None:
        """Return the form of a peer, if it is known."""
        return self._forms.get(peer)

    def read(self, peer: str, content: Content) -> Content:
        """Return a content as this peer means it, and learn the peer's form from it."""
        content = self.meant(peer, content)
        known = self._forms.get(peer)
        if content.form is None or content.sure:
            return content
        if known is None or (content.form is Form.JSON and known is not Form.JSON):
            self._learn(peer, content.form)
        return content

    def meant(self, peer: str, content: Content) -> Content:
        """Return a content as this peer means it, by what is known of the peer now."""
        known = self._forms.get(peer)
        if content.form is None or content.sure or known is None or content.form is known:
            return content
        return fd.read_content(content.raw, known)

    def _learn(self, peer: str, form: Form) -> None:
        self._forms[peer] = form
        forgotten = self._forms.popitem(last=False)[0] if len(self._forms) > KNOWN else None
        self._jobs.do(self._keep(peer, form, forgotten))

    async def _keep(self, peer: str, form: Form, forgotten: str | None) -> None:
        writes: list[Write] = [PutItem(BUCKET, peer, form.value.encode())]
        if forgotten is not None:
            writes.append(DropItem(BUCKET, forgotten))
        with suppress(LedgerError, Stopped):  # it is learned again
            await self._ledger.write(*writes)


class Refusals:
    """Counts and records what was refused, and why."""

    def __init__(self, counts: Counter[str], ledger: Ledger, jobs: BackgroundJobs) -> None:
        self._counts, self._ledger, self._jobs = counts, ledger, jobs
        self._notes: list[RecordRefusal] = []

    def count(self, word: str) -> None:
        """Count a refusal that the ledger has recorded already."""
        self._counts[word] += 1

    def note(self, scope: str, id: str, word: str, reason: str) -> None:
        """Count and record a refusal."""
        self._counts[word] += 1
        if len(self._notes) < NOTES:
            self._notes.append(
                RecordRefusal(scope or "mqtt", id[:200], word, reason, self._ledger.clock.now())
            )
            if len(self._notes) == 1:
                self._jobs.do(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(0)  # further refusals of this moment are written together with it
        notes, self._notes = self._notes, []
        with suppress(LedgerError, Stopped):
            await self._ledger.write(*notes)
