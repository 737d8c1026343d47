"""The requests of `duly.Chat`: lines, groups, friends and history.

The law: a request that changes something goes through the outbox, one at a time per recipient, under one id;
a question is asked directly, and asked again on the next connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeVar

from duly.clients.chat_types import (
    ConversationList,
    ConversationPage,
    JsonObject,
    Line,
    Receipts,
    SentLine,
    line_of,
)

T = TypeVar("T")


class ChatRequests(ABC):
    """The requests that a person can make in chat. `Chat` carries them out."""

    @abstractmethod
    async def _submit_line(
        self, kind: str, to: str | None, data: object, expires: float | None = None, id: str | None = None
    ) -> SentLine:
        """Send through the outbox; returns when the hub has stored it."""

    @abstractmethod
    async def _ask(self, kind: str, data: object, as_: type[T]) -> T:
        """Ask the hub; returns its answer."""

    # ── lines, groups, friends ───────────────────────────────────────────────────────────────────

    async def send(
        self, to: str, what: object, *, expires: float | None = None, id: str | None = None
    ) -> SentLine:
        """Send a line to a person or a group ("#…"); returns its conversation and number when the hub has
        stored it. Text is sent as `{"text": …}`, any other value as it is. After `expires` seconds the line
        is no longer shown. The same `id` is the same line."""
        kind = "group_chat" if to.startswith("#") else "one_chat"
        return await self._submit_line(
            kind, to, {"text": what} if isinstance(what, str) else what, expires, id
        )

    async def edit(self, conv: str, n: int, what: object) -> SentLine:
        """Replace the text of a line of your own."""
        data = {"text": what} if isinstance(what, str) else what
        return await self._submit_line("edit", None, {"conv": conv, "n": n, "data": data})

    async def delete(self, conv: str, n: int) -> SentLine:
        """Delete a line of your own."""
        return await self._submit_line("delete", None, {"conv": conv, "n": n})

    async def create_group(
        self, name: str, *members: str, history: Literal["all", "joined"] = "all", open: bool = False
    ) -> str:
        """Create a group; returns its id. With `history="joined"` members see only lines from after they
        joined. Any person may join an `open` group."""
        wanted = {"name": name, "members": members, "history": history, "open": open}
        return str((await self._submit_line("group_create", None, wanted)).data["group"])

    async def invite(self, group: str, user: str) -> None:
        """Invite a person into a group."""
        await self._submit_line("group_invite", None, {"group": group, "user": user})

    async def join(self, group: str) -> None:
        """Join a group."""
        await self._submit_line("group_join", None, {"group": group})

    async def leave(self, group: str) -> None:
        """Leave a group."""
        await self._submit_line("group_leave", None, {"group": group})

    async def remove(self, group: str, user: str) -> None:
        """Remove a person from a group."""
        await self._submit_line("group_remove", None, {"group": group, "user": user})

    async def set_role(self, group: str, user: str, role: Literal["owner", "admin", "member"]) -> None:
        """Give a member of a group another role."""
        await self._submit_line("group_role", None, {"group": group, "user": user, "role": role})

    async def ask_friend(self, user: str) -> None:
        """Ask a person to be friends."""
        await self._submit_line("friend_ask", None, {"user": user})

    async def accept_friend(self, user: str) -> None:
        """Accept a person who asks to be friends."""
        await self._submit_line("friend_accept", None, {"user": user})

    async def remove_friend(self, user: str) -> None:
        """End a friendship."""
        await self._submit_line("friend_remove", None, {"user": user})

    async def block(self, user: str) -> None:
        """Block a person: neither can write to the other."""
        await self._submit_line("block", None, {"user": user})

    async def unblock(self, user: str) -> None:
        """Unblock a person."""
        await self._submit_line("unblock", None, {"user": user})

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    async def history(self, conv: str, *, before: int | None = None, limit: int = 50) -> list[Line]:
        """Return the lines before number `before` (or the newest), oldest first."""
        wanted = {"conv": conv, "limit": limit} | ({} if before is None else {"before": before})
        return [line_of(frame) for frame in (await self._ask("history", wanted, ConversationPage)).lines]

    async def receipts(self, conv: str, n: int) -> Receipts:
        """Return how many members have received a line, and how many have read it."""
        return await self._ask("receipts", {"conv": conv, "n": n}, Receipts)

    async def conversations(self) -> list[JsonObject]:
        """Return your conversations: `conv`, `last`, `delivered`, `read`, and `with` (a person) or a group's
        `name`."""
        found: list[JsonObject] = []
        wanted: dict[str, str] | None = {}
        while wanted is not None:
            page = await self._ask("conversations", wanted, ConversationList)
            found += page.conversations
            wanted = {"after": page.next} if page.next else None
        return found

    async def group(self, group: str) -> JsonObject:
        """Return a group's `name` and `members`, with their roles."""
        return await self._ask("group_info", {"group": group}, JsonObject)

    async def friends(self) -> dict[str, list[str]]:
        """Return your `friends`, the people who are `asking` to be, and those you have `blocked`."""
        return await self._ask("friends", {}, dict[str, list[str]])
