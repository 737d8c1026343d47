"""Flow control: how much may be under way to each recipient before it acknowledges.

The law: unacknowledged messages are bounded in number and in bytes; the rest waits in the ledger. A window
with any room left takes one more message of any size, so that a message larger than the window can be sent,
and small messages do not overtake a large one for ever.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.errors import Malformed


class FlowWindow(Struct, frozen=True):
    """The most messages and bytes that one recipient may have unacknowledged."""

    frames: int = 256
    bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        if self.frames < 1 or self.bytes < 1:
            raise Malformed("a window holds at least one frame and one byte")


class _Unacknowledged:
    """The unacknowledged messages of one recipient: size by key, and the sum of the sizes."""

    __slots__ = ("size", "sizes")

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}
        self.size = 0


class Outstanding:
    """The unacknowledged messages by recipient.

    >>> outstanding = Outstanding(FlowWindow(frames=2))
    >>> for key in (b"1", b"2"):
    ...     outstanding.take("lock", key, 10)
    >>> outstanding.has_room("lock"), outstanding.release("lock", b"1"), outstanding.has_room("lock")
    (False, True, True)
    """

    def __init__(self, window: FlowWindow) -> None:
        self._frames = window.frames
        self._bytes = window.bytes
        self._held: dict[str, _Unacknowledged] = {}

    def has_room(self, recipient: str) -> bool:
        """Return whether one more message may be sent to this recipient."""
        held = self._held.get(recipient)
        return held is None or (len(held.sizes) < self._frames and held.size < self._bytes)

    def take(self, recipient: str, key: bytes, size: int) -> None:
        """Count a message as unacknowledged; harmless if it is counted already."""
        held = self._held.get(recipient)
        if held is None:
            held = self._held[recipient] = _Unacknowledged()
        if key not in held.sizes:
            held.sizes[key] = size
            held.size += size

    def release(self, recipient: str, key: bytes) -> bool:
        """Stop counting a message that was acknowledged or has ended; return whether it was counted."""
        held = self._held.get(recipient)
        if held is None or key not in held.sizes:
            return False
        held.size -= held.sizes.pop(key)
        if not held.sizes:
            del self._held[recipient]
        return True

    def __len__(self) -> int:
        return sum(len(held.sizes) for held in self._held.values())


PAGE_BYTES: Final = 256 * 1024


def next_page(read: int, size: int, most: int) -> int:
    """Return how many entries to read next, after `read` entries with `size` bytes together. Large entries
    make small pages, so that a page stays near `PAGE_BYTES`.

    >>> next_page(0, 0, 100), next_page(10, 500, 100), next_page(10, 2_000_000, 100)
    (10, 40, 1)
    """
    if not read:
        return min(10, most)
    return max(1, min(4 * read, most, read * PAGE_BYTES // max(size, 1)))
