"""The backlog: how much waits, by sender and by recipient, and when that is too much.

The law: what one sender or one recipient has waiting is bounded, in messages and in bytes, so that no account
fills the memory and the disk that all share. What is handed over no longer counts: the window bounds that.
"""

from __future__ import annotations

from msgspec import Struct

from duly.errors import Malformed


class BacklogPolicy(Struct, frozen=True):
    """The most that may wait for one recipient, or of one sender."""

    messages: int = 10_000
    bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.messages < 1 or self.bytes < 1:
            raise Malformed("a backlog holds at least one message and one byte")


class Backlog:
    """Counts the messages that wait, by sender and by recipient.

    >>> backlog = Backlog(BacklogPolicy(messages=1))
    >>> backlog.add(b"key", "phone", "lock", 10)
    >>> backlog.excess("phone", "lamp"), backlog.remove(b"key"), backlog.excess("phone", "lamp")
    ('1 commands of phone are waiting, 1 may', None, None)
    """

    def __init__(self, policy: BacklogPolicy | None = None) -> None:
        self.policy = policy or BacklogPolicy()
        self.waiting: dict[bytes, tuple[str, str, int]] = {}
        """(sender, recipient, bytes) by key; read by others, changed only here"""
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, key: bytes, sender: str, recipient: str, size: int) -> None:
        """Count a message that waits; harmless if it is counted already."""
        if key not in self.waiting:
            self.waiting[key] = (sender, recipient, size)
            self._count(("of", sender), 1, size)
            self._count(("for", recipient), 1, size)

    def remove(self, key: bytes) -> None:
        """Stop counting a message; harmless if it is not counted."""
        known = self.waiting.pop(key, None)
        if known is not None:
            sender, recipient, size = known
            self._count(("of", sender), -1, -size)
            self._count(("for", recipient), -1, -size)

    def excess(self, sender: str, recipient: str) -> str | None:
        """Return why no more messages of this sender for this recipient may wait; None: they may."""
        if not self.waiting:
            return None
        policy = self.policy
        for name in (("of", sender), ("for", recipient)):
            count, size = self._counts.get(name, (0, 0))
            if count >= policy.messages:
                return f"{count} commands {name[0]} {name[1]} are waiting, {policy.messages} may"
            if size >= policy.bytes:
                return f"{size} bytes of commands {name[0]} {name[1]} are waiting, {policy.bytes} may"
        return None

    def _count(self, name: tuple[str, str], by: int, size: int) -> None:
        count, total = self._counts.get(name, (0, 0))
        if count + by:
            self._counts[name] = (count + by, total + size)
        else:
            del self._counts[name]

    def clear(self) -> None:
        """Forget every message."""
        self.waiting.clear()
        self._counts.clear()

    def __len__(self) -> int:
        return len(self.waiting)
