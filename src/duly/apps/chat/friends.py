"""Friends: people ask, accept, remove and block each other.

The law: a person's decision takes effect for both in one transaction. A blocked person is not told, and to
them the other person looks like a name that does not exist.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from duly.apps.chat import conversations as c
from duly.apps.chat.conversations import NOT_YOURS, Precondition, Request
from duly.core.messages import Verdict, VerdictKind
from duly.core.operations import CheckItem, DropItem, PutItem
from duly.errors import NotAllowed
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame

ALREADY: Final = Verdict(
    VerdictKind.REFUSED, reason="you have asked already, or are friends", cause="already"
)

FRIENDS: Final = frozenset({"friend_ask", "friend_accept", "friend_remove", "block", "unblock"})


class FriendRequest(Struct, frozen=True):
    """The `data` of friend frames."""

    user: str


class Friends:
    """Turns friend frames into requests. `knows(name)` returns whether there is a person of this name."""

    def __init__(self, ledger: Ledger, knows: Callable[[str], Awaitable[bool]]) -> None:
        self._ledger = ledger
        self._knows = knows

    async def request(self, frame: Frame, me: str) -> Request:
        """Return the request to the ledger for a friend frame."""
        other = c.read_data(frame, FriendRequest).user
        if other == me or not await self._knows(other):
            raise NotAllowed(NOT_YOURS.reason)
        message = c.message_of(frame, me, other)
        conv = c.direct(me, other)
        apart = (
            DropItem(c.friends(me), other), DropItem(c.friends(other), me),
            DropItem(c.asked(me), other), DropItem(c.asked(other), me),
        )  # fmt: skip
        barred = Precondition(c.BARRED, conv, wanted=False)
        line = c.line_of(frame, me)
        mine, theirs = c.notes(me), c.notes(other)
        match frame.type:
            case "friend_ask":
                fresh = (
                    barred,
                    Precondition(c.friends(me), other, wanted=False, refusal=ALREADY),
                    Precondition(c.asked(other), me, wanted=False, refusal=ALREADY),
                )
                return Request(message, theirs, line, fresh, (PutItem(c.asked(other), me, b""),), shown=False)
            case "friend_accept":
                together = (
                    PutItem(c.friends(me), other, b""), PutItem(c.friends(other), me, b""),
                    DropItem(c.asked(me), other), DropItem(c.asked(other), me),
                )  # fmt: skip
                guards = (barred, Precondition(c.asked(me), other))
                return Request(message, theirs, line, guards, together, shown=False)
            case "friend_remove":
                return Request(message, mine, line, (Precondition(c.friends(me), other),), apart)
            case "block":
                also = (PutItem(c.blocks(me), other, b""), PutItem(c.BARRED, conv, b""), *apart)
                return Request(message, mine, line, (), also)
            case _:
                # The other person may have blocked this one as well; then the two stay apart.
                free = CheckItem(c.blocks(other), me, otherwise=(DropItem(c.BARRED, conv),))
                return Request(message, mine, line, (), (DropItem(c.blocks(me), other), free))

    async def of(self, me: str) -> dict[str, list[str]]:
        """Return the friends of a person, those who have asked to be (and still exist), and those who are
        blocked."""
        asking = await self._ledger.bucket(c.asked(me))
        return {
            "friends": list(await self._ledger.bucket(c.friends(me))),
            "asking": [name for name in asking if await self._knows(name)],
            "blocked": list(await self._ledger.bucket(c.blocks(me))),
        }
