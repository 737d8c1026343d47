"""The pushes of a device: it must keep each of them until the hub has acknowledged it.

The law: a slow device may take as long as it needs. That a device has read an acknowledgement is shown by
what it does next, never by a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from duly.testing.conform import receiver
from duly.testing.conform.frame_server import now_ms
from duly.testing.conform.receiver import COUNT, ConformTask, HeardAnswer
from duly.testing.conform.rules import BrokenRule, NotChecked

PUSHED_WITHIN: Final = 3.0
"""Seconds within which a push arrives after the command that asks for it was answered."""
NOT_AGAIN: Final = 1.0


class HeardPushes:
    """The pushes of one device. `deliver` sends it a command, `answer` returns its next answer, `acknowledge`
    says that a push is stored, and `cut` breaks the connection and waits for the next one."""

    def __init__(
        self,
        deliver: Callable[[ConformTask], None],
        answer: Callable[[float], Awaitable[HeardAnswer | None]],
        acknowledge: Callable[[str], None],
        cut: Callable[[], Awaitable[None]],
    ) -> None:
        self._deliver = deliver
        self._answer = answer
        self._acknowledge = acknowledge
        self._cut = cut
        self._heard: asyncio.Queue[str] = asyncio.Queue()
        self._asked = 0

    def note(self, seq_id: str) -> None:
        """Note the id of a push that has arrived."""
        self._heard.put_nowait(seq_id)

    async def check(self, rule: str) -> None:
        """Prove that a push comes again after a cut, but not after its acknowledgement."""
        first = await self._ask()
        if first is None:
            raise NotChecked(
                f"the device pushes nothing with a `seq_id` when `{COUNT}` says {{'push': true}}"
            )
        await self._cut()
        if not await self._comes(first, receiver.ANSWER_WITHIN):
            raise BrokenRule(
                rule, f"the push {first} was not acknowledged, and did not come again after a cut"
            )
        self._acknowledge(first)
        second = await self._ask()
        if second is not None:
            self._acknowledge(second)
        await self._cut()
        if await self._comes(first, NOT_AGAIN):
            raise BrokenRule(rule, f"the push {first} was acknowledged, and came again")

    async def _ask(self) -> str | None:
        """Ask for a push, and return its id; None if none arrives."""
        while not self._heard.empty():
            self._heard.get_nowait()
        task = ConformTask(
            "pusher", f"{now_ms()}_{self._asked}", data={"push": True}, exp=now_ms() + 3_600_000
        )
        self._asked += 1
        self._deliver(task)
        loop = asyncio.get_running_loop()
        until = loop.time() + receiver.ANSWER_WITHIN
        while self._heard.empty() and loop.time() < until:
            answer = await self._answer(0.05)
            if answer is not None and (answer.sender, answer.id) == task.key and answer.code is not None:
                until = min(until, loop.time() + PUSHED_WITHIN)
        return None if self._heard.empty() else self._heard.get_nowait()

    async def _comes(self, wanted: str, seconds: float) -> bool:
        """Return whether this push arrives within this time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            while not self._heard.empty():
                if self._heard.get_nowait() == wanted:
                    return True
            await self._answer(min(0.05, max(0.0, until - loop.time())))
        return False
