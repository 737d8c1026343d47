"""The audit chain: who has done what, append-only, each entry bound to the one before it by its hash.

The entries are a stream of the ledger. An entry holds the SHA-256 of the entry before it, and an item of the
ledger holds that of the last one. Both are written in one transaction that checks the item first, so that
hubs on one ledger never write two entries behind the same one. An entry that was changed, removed or inserted
breaks the chain, and `verify` names it. To detect a chain that was truncated or rewritten as a whole, keep
the hash that `verify` returns in another place and pass it in the next time.

The actor of an entry is the account that was authenticated, never a name out of a request.
"""

from __future__ import annotations

import asyncio
import re
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.operations import AppendEntry, CheckItem, PutItem, PutNewItem
from duly.core.units import MS
from duly.errors import Malformed
from duly.storage.ledger import Ledger

STREAM: Final = "audit"
BUCKET: Final = "audit"
HEAD: Final = "head"
"""The item that holds the hash of the last entry."""
NOTHING_BEFORE: Final = "0" * 64
"""The hash that the first entry names."""
PAGE: Final = 500
NOT_A_HASH: Final = (
    "that is not the hash of an entry: 64 digits 0-9 and a-f, as 'duly audit verify' prints it at its end"
)
TEXT_LIMIT: Final = 500
"""Characters of a target or a detail that are stored."""


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One entry, in the order in which its fields are hashed. `at` is in milliseconds."""

    before: str
    at: int
    actor: str
    role: str
    action: str
    target: str = ""
    detail: str = ""
    result: str = "done"
    """`done`, or why it was refused"""


class AuditCheck(Struct, frozen=True):
    """The result of a verification: the number of entries, the hash of the last one, and the problem."""

    entries: int
    head: str
    problem: str | None = None


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(AuditEntry).decode


class AuditChain:
    """The audit chain of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turn = asyncio.Lock()

    async def add(
        self, actor: str, role: str, action: str, target: str = "", detail: str = "", result: str = "done"
    ) -> None:
        """Append an entry; it is stored when this returns."""
        async with self._turn:
            while True:
                head = await self._ledger.item(BUCKET, HEAD)
                now = self._ledger.clock.now()
                entry = AuditEntry(
                    before=NOTHING_BEFORE if head is None else head.decode(),
                    at=now // MS,
                    actor=actor[:TEXT_LIMIT],
                    role=role,
                    action=action,
                    target=_text(target),
                    detail=_text(detail),
                    result=_text(result),
                )
                body = _encode(entry)
                digest = _digest(body)
                append = AppendEntry(STREAM, body, now)
                if head is None:
                    step: PutNewItem | CheckItem = PutNewItem(BUCKET, HEAD, digest, then=(append,))
                else:
                    step = CheckItem(BUCKET, HEAD, head, then=(append, PutItem(BUCKET, HEAD, digest)))
                if await self._ledger.apply(step):
                    return

    async def newest(self, limit: int, before: int = 0) -> tuple[list[dict[str, object]], int | None]:
        """Return the newest entries below number `before` (0: of all), newest first, and where the next page
        begins; None after the last page."""
        extent = await self._ledger.extent(STREAM)
        end = min(before - 1, extent.last) if before else extent.last
        start = max(end - limit, extent.first - 1)
        found = await self._ledger.entries(STREAM, start, end - start) if end > start else []
        shown = [{"n": one.n, "hash": _digest(one.body).decode()} | _shown(one.body) for one in found]
        return shown[::-1], start + 1 if start >= extent.first else None

    async def verify(self, expected: str = "") -> AuditCheck:
        """Read the whole chain and check it. `expected` is a hash that an earlier verification returned: an
        entry of the chain must have it."""
        if expected and not is_hash(expected):
            raise Malformed(NOT_A_HASH)
        last, count, seen = NOTHING_BEFORE, 0, not expected
        while found := await self._ledger.entries(STREAM, count, PAGE):
            for one in found:
                if one.n != count + 1:
                    return AuditCheck(count, last, f"entry {count + 1} is missing")
                try:
                    before = _decode(one.body).before
                except msgspec.DecodeError:
                    return AuditCheck(count, last, f"entry {one.n} cannot be read: it was changed")
                if before != last:
                    return AuditCheck(
                        count,
                        last,
                        f"entry {one.n} does not follow entry {count}: one of the two was changed",
                    )
                last, count = _digest(one.body).decode(), one.n
                seen = seen or last == expected
        head = (await self._ledger.item(BUCKET, HEAD) or NOTHING_BEFORE.encode()).decode()
        if head != last:
            return AuditCheck(
                count, last, f"the last entry is {count}, but it is not the one that was written last"
            )
        if not seen:
            return AuditCheck(
                count, last, "no entry has the hash that was expected: the chain was written anew"
            )
        return AuditCheck(count, last)


def is_hash(text: str) -> bool:
    """Return whether a text has the form of an entry's hash."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def _digest(body: bytes) -> bytes:
    return sha256(body).hexdigest().encode()


def _text(text: str) -> str:
    """Return a text that fits into an entry; characters that UTF-8 cannot encode are replaced."""
    return text[:TEXT_LIMIT].encode(errors="replace").decode()


def _shown(body: bytes) -> dict[str, object]:
    try:
        shown: dict[str, object] = msgspec.to_builtins(_decode(body))
    except msgspec.DecodeError:
        return {"action": "unreadable", "detail": "this entry was changed"}
    return shown
