"""Restored streams: how far the cursors of clients count after a restore.

The law. A ledger restored from a backup gives the numbers of lost entries out again. So each restore begins a
generation of the ledger, and notes how far every stream went in the backup. A cursor from an earlier
generation counts only that far; otherwise its client would skip the new entries with the numbers of those
that it has seen.

A welcome names the generation as the cursor of no stream (`GENERATION`), and clients send it back with their
cursors. A ledger that was never restored has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from duly.storage.ledger import Ledger

BUCKET: Final = "generations"
"""The bucket with the generations of a restored ledger: the times of its restores in milliseconds."""
GENERATION: Final = ""
"""The name under which cursors contain the generation of the ledger."""


def reader_of(generation: int) -> str:
    """Return the reader whose cursor in a stream is how far that went when a generation began."""
    return f"restored:{generation}"


class RestoredStreams:
    """The generations of a ledger, which are read once: nothing restores a ledger that is open."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._generations: Sequence[int] | None = None

    async def valid(
        self, cursors: Mapping[str, int], streams: Mapping[str, str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return what still counts of a client's cursors in these streams, and the cursors that tell it the
        generation."""
        if not streams:  # who reads no stream can log in while the ledger cannot be used
            return {}, {}
        if self._generations is None:
            self._generations = sorted(int(name) for name in await self._ledger.bucket(BUCKET))
        own = {name: cursors[name] for name in streams if name in cursors}
        if not self._generations:
            return own, {}
        later = [one for one in self._generations if one > cursors.get(GENERATION, 0)]
        readers = [reader_of(one) for one in later]
        found = await self._ledger.standing([(streams[name], reader) for name in own for reader in readers])
        ends = iter(found)
        valid = {name: min([n, *(next(ends).cursor or 0 for _ in readers)]) for name, n in own.items()}
        return valid, {GENERATION: self._generations[-1]}
