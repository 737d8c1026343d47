"""Channel: how a person or a program outside is told something.

The laws. A channel says truly how an attempt went: it returns if the other side has taken the notice, raises
`NotSent` or `Declined` if it surely has not, and `InDoubt` if nobody can tell. It declares what doubt means
(`DoubtPolicy`). It never shows or logs its address, which may hold a password: only its `label` is for
people.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from duly.core.fanout.plan import DoubtPolicy


class Notification(Struct, frozen=True):
    """What somebody is told."""

    id: str
    """the delivery's: the same in every attempt, so that whoever keeps ids can tell a repeat"""
    title: str
    text: str
    body: dict[str, Any]
    """the same for programs"""
    urgent: bool = False


class Channel(Protocol):
    """A way to somebody."""

    doubt: DoubtPolicy

    async def send(self, notice: Notification) -> None:
        """Tell them. Raises a `ChannelError` that says whether they may have been told all the same."""
        ...

    async def close(self) -> None: ...
