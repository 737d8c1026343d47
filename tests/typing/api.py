"""What type checkers say of the public names: mypy reads this file, nothing runs it.

`assert_type` fails the check if a name's type becomes wider, narrower or `Any`. A line with `type: ignore`
is one that must be an error: mypy complains when it no longer is (`warn_unused_ignores`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, assert_type

import duly
from duly.clients.app import Ack, Gap, Push, SentCommand
from duly.clients.chat import Line, SentLine
from duly.clients.device import Command
from duly.clients.push_outbox import PushUnderWay
from duly.clients.sentinel_alerts import Alert, SentEvent, SentinelNews
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
    assert_type(verdict.kind, duly.VerdictKind)
    assert_type(verdict.answer, duly.Answer | None)
    assert_type(await ledger.prune(), int)


async def functions_that_run_once(ledger: duly.Ledger) -> None:
    @duly.once(ledger, scope="payments", key=lambda order, amount=1: order)
    async def charge(order: str, amount: int = 1) -> float:
        return 1.0

    assert_type(await charge("order-7", amount=2), float)
    await charge(7)  # type: ignore[arg-type]  # an order is text
    await charge("order-7", amont=2)  # type: ignore[call-arg]  # a parameter is misspelt

    @duly.once(ledger, scope="orders", key=lambda order: order, effect="exactly_once")
    async def book(transaction: duly.Transaction, order: str) -> int:
        ((count,),) = await transaction.fetch("SELECT 1")
        return int(count)

    assert_type(await book("order-7"), int)
    await book(ledger, "order-7")  # type: ignore[call-arg, arg-type]  # the transaction is given by `once`

    @duly.once(ledger, scope="orders", key=str, effect="exactly_once")  # type: ignore[type-var]  # no transaction
    async def without(order: str) -> int:
        return 1

    @duly.once("sqlite:///app.db", scope="orders", key=str)
    def blocking(order: str) -> int:
        return 1

    assert_type(blocking("order-7"), int)

    duly.once(ledger, scope="orders", key=str, effect="twice")  # type: ignore[call-overload]  # no such effect


async def functions_whose_effect_is_set_elsewhere(
    ledger: duly.Ledger, effect: Literal["at_most_once", "at_least_once"]
) -> None:
    @duly.once(ledger, scope="payments", key=str, effect=effect, errors="store", keep=60, lease=5)
    async def charge(order: str) -> float:
        return 1.0

    assert_type(await charge("order-7"), float)


async def apps(app: duly.App) -> None:
    async with app as same:
        assert_type(same, duly.App)
    assert_type(await app.send("lock-1", "lock_control", {"open": True}, queue=True), Ack)
    command = await app.post("lock-1", "lock_control", order="power", latest=True)
    assert_type(command, SentCommand)
    assert_type(await command.ended(), Ack)
    async for push in app.pushes():
        assert_type(push, Push | Gap)
    assert_type(await command.settled(), Ack)
    assert_type(await app.download("lock-1", "visit.mp4", "visit.mp4"), Path)
    await app.send("lock-1", "lock_control", later=True)  # type: ignore[call-arg]  # there is no such option
    duly.App("http://hub")  # type: ignore[call-arg]  # a token is needed


async def devices(device: duly.Device) -> None:
    @device.on("lock_control", effect="at_most_once")
    async def handle(command: Command) -> dict[str, bool]:
        command.working(50)
        assert_type(command.sender, str)
        return {"open": True}

    assert_type(device.push("event_report", {"battery": 7}), PushUnderWay)
    device.serve("visit.mp4", Path("visit.mp4"))

    device.on("lock_control", effect="exactly_once")  # type: ignore[arg-type]  # a motor cannot promise that
    assert_type(await device.run(), None)


async def nodes(node: duly.Node) -> None:
    @node.task("turn_on", effect="at_least_once")
    async def turn_on(task: duly.Task) -> bool:
        task.progress(50)
        assert_type(task.attempt, int)
        return True

    node.task("turn_on", effect="exactly_once")  # type: ignore[arg-type]  # a lamp cannot promise that
    task = await node.send("B", "turn_on", {"lamp": 1}, expires=60)
    assert_type(task, duly.SentTask)
    assert_type(await node.find(task.id), duly.SentTask)
    assert_type(await node.cancel(task.id), duly.SentTask)
    assert_type(task.state, str)
    assert_type(await node.status("B"), duly.NodeStatus | None)
    async for status in node.watch_status():
        assert_type(status, duly.NodeStatus)


async def chats(chat: duly.Chat) -> None:
    assert_type(await chat.send("bob", "hello"), SentLine)
    assert_type(await duly.Chat.log_in("http://hub", "ann", "password"), str)
    assert_type(await chat.create_group("team", "bob"), str)
    async for line in chat.lines():
        assert_type(line, Line)
        assert_type(line.text, str)


async def sentinels(sentinel: duly.Sentinel) -> None:
    alert = sentinel.trigger("fall", "watch-1", severity="critical")
    assert_type(alert, Alert)
    assert_type(alert.sent, asyncio.Future[SentEvent])
    assert_type(await alert.stored(), str)
    assert_type(alert.cancel(), None)
    async for news in sentinel.news():
        assert_type(news, SentinelNews)
    assert_type(duly.SentinelPolicy().countdown, float)


def errors(problem: duly.DulyError) -> None:
    assert_type(problem.word, str)
    if isinstance(problem, duly.Refused):
        assert_type(problem.code, int)
    if isinstance(problem, duly.Failed):
        assert_type(problem, duly.Failed)
    refused: tuple[type[duly.SenderError], ...] = (duly.Conflict, duly.Stale)
    outcomes: tuple[type[duly.DulyError], ...] = (duly.Failed, duly.Unknown, duly.Unstorable, duly.TaskFailed)
    outages: tuple[type[duly.DulyError], ...] = (duly.LedgerError, duly.LedgerUnavailable)
    del refused, outcomes, outages
    raise duly.DeviceError(3, "the sensor is broken")


def values() -> None:
    order = duly.Order(n=1, mode=duly.Mode.LATEST)
    assert_type(order.mode, duly.Mode)
    assert_type(duly.RetryPolicy.fixed(3_000_000, tries=3), duly.RetryPolicy)
    assert_type(duly.State.DONE.terminal, bool)
    assert_type(duly.Answer(0, b"{}").code, int)
    missing = duly.Sent  # type: ignore[attr-defined]  # there is no such name
    del missing


def virtual_time(program: Callable[[], Coroutine[Any, Any, int]]) -> None:
    assert_type(VirtualLoop().play(program()), int)
