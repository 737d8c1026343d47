"""Friends: ask, accept, remove, block.

The law: what one of them decides holds in the same transaction for both. Who is blocked cannot tell it from a
name that nobody has, and learns nothing when it happens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from duly.apps import conversations as c
from duly.apps.conversations import NOT_YOURS, Guard, Request
from duly.core.messages import Verdict, Word
from duly.core.writes import Drop, Given, Put
from duly.dialects.frames import Frame
from duly.errors import NotAllowed
from duly.ledger import Ledger

ALREADY: Final = Verdict(Word.REFUSED, reason="you have asked already, or are friends", cause="already")

FRIENDS: Final = frozenset({"friend_ask", "friend_accept", "friend_remove", "block", "unblock"})


class Whom(Struct, frozen=True):
    """The `data` of these frames."""

    user: str


class Friends:
    """`knows(name)` says whether this is somebody one can talk to."""

    def __init__(self, ledger: Ledger, knows: Callable[[str], Awaitable[bool]]) -> None:
        self._ledger = ledger
        self._knows = knows

    async def request(self, frame: Frame, me: str) -> Request:
        other = c.read_data(frame, Whom).user
        if other == me or not await self._knows(other):
            raise NotAllowed(NOT_YOURS.reason)
        message = c.message_of(frame, me, other)
        conv = c.direct(me, other)
        apart = (
            Drop(c.friends(me), other), Drop(c.friends(other), me),
            Drop(c.asked(me), other), Drop(c.asked(other), me),
        )  # fmt: skip
        barred = Guard(c.BARRED, conv, wanted=False)
        line = c.line_of(frame, me)
        mine, theirs = c.notes(me), c.notes(other)
        match frame.type:
            case "friend_ask":
                fresh = (
                    barred,
                    Guard(c.friends(me), other, wanted=False, refusal=ALREADY),
                    Guard(c.asked(other), me, wanted=False, refusal=ALREADY),
                )
                return Request(message, theirs, line, fresh, (Put(c.asked(other), me, b""),), shown=False)
            case "friend_accept":
                together = (
                    Put(c.friends(me), other, b""), Put(c.friends(other), me, b""),
                    Drop(c.asked(me), other), Drop(c.asked(other), me),
                )  # fmt: skip
                guards = (barred, Guard(c.asked(me), other))
                return Request(message, theirs, line, guards, together, shown=False)
            case "friend_remove":
                return Request(message, mine, line, (Guard(c.friends(me), other),), apart)
            case "block":
                also = (Put(c.blocks(me), other, b""), Put(c.BARRED, conv, b""), *apart)
                return Request(message, mine, line, (), also)
            case _:
                # The other may have blocked us as well; then the two stay apart.
                free = Given(c.blocks(other), me, otherwise=(Drop(c.BARRED, conv),))
                return Request(message, mine, line, (), (Drop(c.blocks(me), other), free))

    async def of(self, me: str) -> dict[str, list[str]]:
        """Friends, those who ask to be (and are still there), and those who are blocked."""
        asking = await self._ledger.shelf(c.asked(me))
        return {
            "friends": list(await self._ledger.shelf(c.friends(me))),
            "asking": [name for name in asking if await self._knows(name)],
            "blocked": list(await self._ledger.shelf(c.blocks(me))),
        }
