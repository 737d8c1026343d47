"""History: the lines of a conversation as their readers see them, page by page.

The law: a page fits into a frame. An edit is shown with the present text of its line, so that an older edit
does not reveal a line that was deleted since.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from duly.apps.chat import conversations as c
from duly.storage.ledger import Ledger, StreamEntry
from duly.wire.fields import NOTHING
from duly.wire.outgoing import LineFrame, encode

PAGE_BYTES: Final = 192 * 1024
"""The most bytes of a page, so that it fits into a frame."""


async def show_page(
    ledger: Ledger, conv: str, page: list[StreamEntry], now: int, attempt: int = 1
) -> list[LineFrame]:
    """Return the lines of a page as they are sent to readers."""
    shown: list[LineFrame] = []
    for entry in page:
        line = c.shown_line(entry, now)
        edited = c.edit_of(line)
        if edited is not None:
            (original,) = await ledger.entries(c.stream(conv), edited - 1, 1)
            data = NOTHING
            if original.body and not c.is_over(said := c.read_line(original), now):
                data = said.data
            line = c.edit_line(line, line.from_ or "", edited, data)
        shown.append(c.show(conv, entry.n, line, entry.at, attempt))
    return shown


def encode_page(lines: list[LineFrame], first: int, last: int) -> bytes:
    """Return a page as it is answered: the newest of these lines that fit, oldest first."""
    shown = [encode(line) for line in lines]
    size = 0
    for i, line in enumerate(reversed(shown)):
        size += len(line) + 1
        if size > PAGE_BYTES and i:
            del shown[: len(shown) - i]
            break
    return msgspec.json.encode({"first": first, "last": last, "lines": [Raw(line) for line in shown]})
