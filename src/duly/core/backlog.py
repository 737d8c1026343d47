"""The backlog: counts the waiting messages of each sender and recipient, and refuses more when there are too
many.

The law: the waiting messages of one sender, and those for one recipient, are bounded in number and in bytes,
so that no account fills the shared memory and disk. A message that was handed over no longer counts here; the
flow-control window bounds those. One sender cannot use up a recipient's backlog for everyone: when it is
full, each sender may still fill up to a tenth of it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.errors import Malformed

SHARE: Final = 10
"""When a recipient's backlog is full, each sender may still use one part in this many."""


class BacklogPolicy(Struct, frozen=True):
    """The most messages and bytes that may wait for one recipient, or from one sender."""

    messages: int = 10_000
    bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.messages < 1 or self.bytes < 1:
            raise Malformed("a backlog holds at least one message and one byte")


class Backlog:
    """Counts the waiting messages by sender and by recipient.

    >>> backlog = Backlog(BacklogPolicy(messages=1))
    >>> backlog.add(b"key", "phone", "lock", 10)
    >>> backlog.excess("phone", "lamp"), backlog.remove(b"key"), backlog.excess("phone", "lamp")
    ('1 commands of phone are waiting, 1 may', None, None)
    """

    def __init__(self, policy: BacklogPolicy | None = None) -> None:
        self.policy = policy or BacklogPolicy()
        self.waiting: dict[bytes, tuple[str, str, int]] = {}
        """(sender, recipient, bytes) by key; other classes may read it, only this one changes it"""
        self._counts: dict[tuple[str, ...], tuple[int, int]] = {}
        """messages and bytes: by sender, by recipient, and by sender and recipient together"""

    def add(self, key: bytes, sender: str, recipient: str, size: int) -> None:
        """Count a message that waits; harmless if it is counted already."""
        if key not in self.waiting:
            self.waiting[key] = (sender, recipient, size)
            self._count(("of", sender), 1, size)
            self._count(("for", recipient), 1, size)
            self._count(("of", sender, recipient), 1, size)

    def remove(self, key: bytes) -> None:
        """Stop counting a message; harmless if it is not counted."""
        known = self.waiting.pop(key, None)
        if known is not None:
            sender, recipient, size = known
            self._count(("of", sender), -1, -size)
            self._count(("for", recipient), -1, -size)
            self._count(("of", sender, recipient), -1, -size)

    def excess(self, sender: str, recipient: str, *, of_sender: bool = True) -> str | None:
        """Return why no more messages from this sender to this recipient may wait, or None if they may. With
        `of_sender` false only the recipient's backlog counts."""
        if not self.waiting:
            return None
        return (self._full("of", sender) if of_sender else None) or (
            None if self._has_share(sender, recipient) else self._full("for", recipient)
        )

    def _full(self, which: str, name: str) -> str | None:
        """Return that the backlog of a sender or a recipient is full; None if it is not."""
        count, size = self._counts.get((which, name), (0, 0))
        if count >= self.policy.messages:
            return f"{count} commands {which} {name} are waiting, {self.policy.messages} may"
        if size >= self.policy.bytes:
            return f"{size} bytes of commands {which} {name} are waiting, {self.policy.bytes} may"
        return None

    def _has_share(self, sender: str, recipient: str) -> bool:
        """Return whether a sender has used less than its reserved share of this recipient's backlog."""
        count, size = self._counts.get(("of", sender, recipient), (0, 0))
        return count * SHARE < self.policy.messages and size * SHARE < self.policy.bytes

    def _count(self, name: tuple[str, ...], by: int, size: int) -> None:
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
