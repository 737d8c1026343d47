"""What type checkers say of the public names: mypy reads this file, nothing runs it.

`assert_type` fails the check if a name's type becomes wider, narrower or `Any`. A line with `type: ignore`
is one that must be an error: mypy complains when it no longer is (`warn_unused_ignores`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, assert_type

import duly
from duly.clients.app import Ack, Gap, Push, SentCommand
from duly.clients.chat import Line, SentLine
from duly.clients.sentinel import Alert, SentEvent
from duly.testing import ManualClock
from duly.testing.loops import VirtualLoop


async def ledgers() -> None:
    ledger = await duly.open_ledger("memory:", clock=ManualClock())
    assert_type(ledger, duly.Ledger)
    async with ledger as same:
        assert_type(same, duly.Ledger)
    message = duly.Message("app-1", "1_1", "unlock", "lock-1", b"{}", time=0)
    verdict = await ledger.admit(message, horizon=duly.Horizon(keep=1))
    assert_type(verdict, duly.Verdict)
    assert_type(verdict.word, duly.Word)
    assert_type(verdict.answer, duly.Answer | None)
    assert_type(await ledger.prune(), int)


async def functions_that_run_once(ledger: duly.Ledger) -> None:
    @duly.once(ledger, scope="payments", key=lambda order: order)
    async def charge(order: str, amount: int = 1) -> float:
        return 1.0

    assert_type(await charge("order-7", amount=2), float)

    @duly.once(ledger, scope="orders", key=lambda order: order, effect="exactly_once")
    async def book(transaction: duly.Transaction, order: str) -> int:
        ((count,),) = await transaction.fetch("SELECT 1")
        return int(count)

    assert_type(await book("order-7"), int)


async def apps(app: duly.App) -> None:
    async with app as same:
        assert_type(same, duly.App)
    assert_type(await app.send("lock-1", "lock_control", {"open": True}, queue=True), Ack)
    command = await app.post("lock-1", "lock_control", order="power", latest=True)
    assert_type(command, SentCommand)
    assert_type(await command.ended(), Ack)
    async for push in app.pushes():
        assert_type(push, Push | Gap)
    duly.App("http://hub")  # type: ignore[call-arg]  # a token is needed


async def devices(device: duly.Device) -> None:
    @device.on("lock_control", effect="at_most_once")
    async def handle(command: Any) -> dict[str, bool]:
        return {"open": True}

    device.on("lock_control", effect="exactly_once")  # type: ignore[arg-type]  # a motor cannot promise that
    assert_type(await device.run(), None)


async def nodes(node: duly.Node) -> None:
    task = await node.send("B", "turn_on", {"lamp": 1}, expires=60)
    assert_type(task, duly.SentTask)
    assert_type(task.state, str)
    assert_type(await node.status("B"), duly.NodeStatus | None)
    async for status in node.watch_status():
        assert_type(status, duly.NodeStatus)


async def chats(chat: duly.Chat) -> None:
    assert_type(await chat.send("bob", "hello"), SentLine)
    assert_type(await duly.Chat.log_in("http://hub", "ann", "password"), str)
    async for line in chat.lines():
        assert_type(line, Line)
        assert_type(line.text, str)


async def sentinels(sentinel: duly.Sentinel) -> None:
    alert = sentinel.trigger("fall", "watch-1", severity="critical")
    assert_type(alert, Alert)
    assert_type(alert.sent, asyncio.Future[SentEvent])
    assert_type(await alert.stored(), str)
    assert_type(duly.SentinelPolicy().countdown, float)


def errors(problem: duly.DulyError) -> None:
    assert_type(problem.word, str)
    if isinstance(problem, duly.Refused):
        assert_type(problem.code, int)
    refused: type[duly.SenderError] = duly.Conflict
    del refused


def virtual_time(program: Callable[[], Coroutine[Any, Any, int]]) -> None:
    assert_type(VirtualLoop().play(program()), int)
