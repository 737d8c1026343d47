"""Permissions: who may talk to whom, edit or delete a line, and the first line that a person sees of a
conversation.

The law: a person cannot see a conversation they are not in, nor whether it exists. A condition that must hold
when a request is stored is a precondition of its transaction, not a check before it.
"""

from __future__ import annotations

from duly.apps.chat import conversations as c
from duly.apps.chat.conversations import NOT_YOURS, Precondition, Rank
from duly.errors import NotAllowed
from duly.identity.accounts import Accounts, Role
from duly.storage.ledger import Ledger


class ChatPermissions:
    """Decides what people may do. With `friends_only`, only friends may talk to each other or bring each
    other into groups."""

    def __init__(self, ledger: Ledger, accounts: Accounts, *, friends_only: bool) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._friends_only = friends_only

    def is_known(self, name: str) -> bool:
        """Return whether memory knows a person of this name; if not, the ledger may."""
        return self._accounts.stored_role(name) is Role.USER

    async def knows(self, name: str, asker: str = "") -> bool:
        """Return whether there is a person of this name."""
        return await self._accounts.find_role(name, asker) is Role.USER

    async def may_add(self, me: str, other: str) -> bool:
        """Return whether a person may bring another into a group."""
        if not await self.knows(other, me):
            return False
        if await self._ledger.item(c.BARRED, c.direct(me, other)) is not None:
            return False
        return not self._friends_only or await self._ledger.item(c.friends(me), other) is not None

    def to_talk(self, conv: str, me: str, other: str) -> tuple[Precondition, ...]:
        """Return the preconditions of a line from one person to another."""
        guards: tuple[Precondition, ...] = (Precondition(c.BARRED, conv, wanted=False),)
        if self._friends_only and me != other:
            guards = (*guards, Precondition(c.friends(me), other))
        return guards

    def to_write(self, conv: str, me: str) -> tuple[Precondition, ...]:
        """Return the preconditions for a person to change a line of a conversation."""
        if c.is_group(conv):
            return (Precondition(c.members(conv), me),)
        return self.to_talk(conv, me, c.other_in(conv, me))

    def to_edit(self, conv: str, sender: str | None, me: str) -> tuple[Precondition, ...]:
        """Return the preconditions for a person to edit this sender's line: only their own lines."""
        if sender != me:
            raise NotAllowed(NOT_YOURS.reason)
        return self.to_write(conv, me)

    async def to_delete(self, conv: str, sender: str | None, me: str) -> tuple[Precondition, ...]:
        """Return the preconditions for a person to delete this sender's line: their own lines and, as an
        admin of the group, those of other members."""
        guards = self.to_write(conv, me)
        if sender == me:
            return guards
        rank = await self._ledger.item(c.members(conv), me)
        if rank not in (Rank.OWNER.body, Rank.ADMIN.body):
            raise NotAllowed(NOT_YOURS.reason)
        return (Precondition(c.members(conv), me, rank),)

    async def first_visible(self, conv: str, me: str) -> int:
        """Return the first line that a person may see of a conversation; raises an error if they are not in
        it."""
        c.known_form(conv)
        if c.is_group(conv):
            if await self._ledger.item(c.members(conv), me) is not None:
                return await self._ledger.cursor(c.stream(conv), c.begins_for(me))
        elif me in c.pair_in(conv) or conv == c.notes(me):
            return 0
        raise NotAllowed(NOT_YOURS.reason)
