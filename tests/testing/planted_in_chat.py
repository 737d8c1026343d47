"""Bugs to plant in chat, most of them common in chat servers. The checkers must find every one of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from duly.apps.chat import conversations
from duly.apps.chat.service import ChatService as Application
from duly.apps.chat.subscriptions import Subscriptions
from duly.clients.chat_positions import ChatPositions
from duly.core import operations as w
from duly.runtime.engine import Engine
from duly.storage.interpreter import Interpreter
from duly.wire.outgoing import ServerAck, encode
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("once")
def admitted_and_stored_apart(patch: Patch) -> None:
    """The line is stored whether or not it is a repeat (SETNX, then SETEX)."""
    writes = conversations.Request.writes

    def apart(self: conversations.Request, until: int, now: int) -> tuple[w.Write, ...]:
        (guard,) = writes(self, until, now)
        line = encode(self.line)
        append = w.AppendEntry(conversations.stream(self.conv), line, now, self.message.key, ends=True)
        return (guard, append)

    patch.setattr(conversations.Request, "writes", apart)


@breaks("views_agree")
def told_only_if_here(patch: Patch) -> None:
    """Whoever is not connected just then never hears it."""
    patch.setattr(Subscriptions, "_read_on", lambda self, subscription: None)


@breaks("views_agree")
def marked_as_read_when_sent(patch: Patch) -> None:
    """What was pushed counts as delivered (offline rows are marked completed at once)."""
    push_page = Subscriptions._push_page

    async def hasty(self: Subscriptions, subscription: Any, page: Any, attempt: int) -> None:
        await push_page(self, subscription, page, attempt)
        self.acknowledge(subscription.subscriber, subscription.conv, subscription.told)

    patch.setattr(Subscriptions, "_push_page", hasty)


@breaks("views_agree")
def client_does_not_look_at_numbers(patch: Patch) -> None:
    """What is told again is shown again."""

    def arrived(self: ChatPositions, conv: str, n: int) -> bool:
        return True

    patch.setattr(ChatPositions, "arrived", arrived)


@breaks("views_agree")
def several_lines_at_once(patch: Patch) -> None:
    """The next line goes out before the hub has taken the last."""

    class NoTurn(asyncio.Lock):
        async def acquire(self) -> Any:
            return True

        def release(self) -> None:
            pass

    patch.setattr(asyncio, "Lock", NoTurn)


@breaks("views_agree")
def a_failed_commit_is_forgotten(patch: Patch) -> None:
    """What a commit that failed has stored all the same nobody is told."""
    patch.setattr(Subscriptions, "restored", lambda self: None)


@breaks("views_agree")
def numbers_start_anew(patch: Patch) -> None:
    """A restarted hub counts its conversations in memory."""
    append = Interpreter._append

    def forgetful(self: Interpreter, entry: w.AppendEntry) -> int:
        if not hasattr(self, "counted"):
            self.counted = True  # type: ignore[attr-defined]  # the bug's own mark
            self._rows.lasts.clear()  # type: ignore[attr-defined]  # a memory ledger's disk
        return append(self, entry)

    patch.setattr(Interpreter, "_append", forgetful)


@breaks("views_agree")
def acknowledged_before_stored(patch: Patch) -> None:
    """The sender is told a number before the line has it."""
    receive = Application.receive

    async def hasty(self: Application, session: Any, who: Any, frame: Any) -> bool:
        if frame.type in conversations.LINES and frame.seq_id:
            conv = frame.to if frame.to.startswith("#") else conversations.direct(who.name, frame.to)
            last = (await self._ledger.extent(conversations.stream(conv))).last
            session.push(ServerAck(frame.seq_id, 0, conv=conv, n=last + 1))
        said = receive(self, session, who, frame)
        return said if isinstance(said, bool) else await said

    patch.setattr(Application, "receive", hasty)


@breaks("awake")
def a_timer_is_set_without_waking(patch: Patch) -> None:
    """What is read from the ledger is told, and a timer set for it; the engine sleeps on."""
    patch.setattr(Engine, "nudge", lambda self: None)


@breaks("lines_sent_again")
def nothing_is_told_again(patch: Patch) -> None:
    """The timers run, and nothing follows from them."""

    async def idle(self: Subscriptions, local: Any) -> None:
        return

    patch.setattr(Subscriptions, "_tell_again", idle)


PLANTED = planted(
    admitted_and_stored_apart, told_only_if_here, marked_as_read_when_sent,
    client_does_not_look_at_numbers, several_lines_at_once, a_failed_commit_is_forgotten,
    numbers_start_anew, acknowledged_before_stored, a_timer_is_set_without_waking, nothing_is_told_again,
)  # fmt: skip
