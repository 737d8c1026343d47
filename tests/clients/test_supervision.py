"""Every background task of a client is killed, one after the other: each comes back, and the client goes on.
After its end nothing of it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from duly.apps.alerts.profiles import ProfileDraft
from duly.clients.app import App
from duly.clients.chat import Chat
from duly.clients.device import Command, Device
from duly.clients.node.tasks import Task
from duly.clients.sentinel import Sentinel
from duly.clients.websocket_link import WebSocketLink
from duly.core.monitor.signals import SentinelPolicy
from duly.identity.accounts import Role
from duly.wire.frames import Frame
from tests.clients.node.nodes import Brokered
from tests.guard import GUARD
from tests.local_hub import LocalHub

STEP = GUARD


async def until(true: Callable[[], bool], what: str) -> None:
    over = time.monotonic() + STEP
    while not true():
        assert time.monotonic() < over, what
        await asyncio.sleep(0.02)


def named() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("duly")}


@asynccontextmanager
async def killing(client: Any, wanted: set[str]) -> AsyncIterator[None]:
    """Runs the client in the block after each of its background tasks was killed once."""
    others = named()

    def own() -> list[asyncio.Task[Any]]:
        return [task for task in named() - others if task.get_name() in wanted and not task.done()]

    def names() -> list[str]:
        return sorted(task.get_name() for task in own())

    async with client:
        await until(lambda: wanted <= set(names()), f"of {wanted} only {names()} run")
        before = names()
        for name in dict.fromkeys(before):
            for victim in [task for task in own() if task.get_name() == name]:
                victim.cancel()
                await until(victim.done, name)
                await until(lambda: names() == before, f"{name} is back")
        yield
    assert names() == []


async def test_each_task_of_an_app_and_a_device_comes_back(local: LocalHub) -> None:
    device = Device(local.url, local.tokens["lock"])

    @device.on("lock_control")
    async def obey(command: Command) -> str:
        return "open"

    app = App(local.url, local.tokens["phone"])
    common = {"duly engine", "duly-engine", "duly websocket link", "duly job: websocket writer"}
    async with killing(device, common | {"duly engine of pushes"}), killing(app, common):
        assert (await app.send("lock", "lock_control")).data == "open"
        assert device.push("event_report", 1) is not None
        async for push in app.pushes():
            if getattr(push, "type", "") == "event_report":
                break


async def test_each_task_of_a_chat_comes_back(local: LocalHub) -> None:
    for name in ("ann", "bob"):
        await local.add(Role.USER, name)
    ann, bob = (Chat(local.url, local.tokens[name]) for name in ("ann", "bob"))
    async with bob, killing(ann, {"duly engine", "duly websocket link", "duly job: websocket writer"}):
        await ann.send("bob", "hello")
        async for line in bob.lines():
            assert line.text == "hello"
            break


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_each_task_of_a_sentinel_comes_back(local: LocalHub, transport: Any) -> None:
    await local.add(Role.SENTINEL, "watch")
    await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    sentinel = Sentinel(
        local.url,
        local.tokens["watch"],
        profile="home",
        transport=transport,
        policy=SentinelPolicy(countdown=0),
    )
    async with killing(sentinel, {"duly engine", f"duly {transport} link"}):
        async with asyncio.timeout(STEP):
            await sentinel.trigger("hall", "smoke", severity="critical").sent


async def test_each_task_of_a_node_comes_back(at_mosquitto: Brokered) -> None:
    asking, asked = at_mosquitto.node(at_mosquitto.a), at_mosquitto.node(at_mosquitto.b)

    @asked.task("work")
    async def work(task: Task) -> str:
        return "done"

    wanted = {"duly heartbeat", "duly engine of incoming tasks", "duly forgetting what is over"}
    async with asking, killing(asked, wanted):
        await asked.ready()
        assert await asking.call(asked.name, "work") == "done"


async def test_a_link_that_dies_of_a_bug_begins_anew_and_says_so(local: LocalHub) -> None:
    class Buggy(App):
        bugs = 1

        def _heard(self, frame: Frame) -> None:
            if frame.type == "server_ack" and self.bugs:
                self.bugs -= 1
                raise KeyError("a bug")
            super()._heard(frame)

    async with (
        Device(local.url, local.tokens["lock"]) as device,
        Buggy(local.url, local.tokens["phone"]) as app,
    ):

        @device.on("lock_control")
        async def obey(command: Command) -> None:
            return None

        async with asyncio.timeout(STEP):
            assert (await app.send("lock", "lock_control")).code == 0
        assert isinstance(app._link, WebSocketLink)
        assert app._link.tasks.failures == {"websocket link": 1}


async def test_an_engine_that_a_bug_has_ended_is_started_again(local: LocalHub) -> None:
    class Buggy(App):
        bugs = 1

        def _perform(self, effect: Any) -> None:
            if self.bugs:
                self.bugs -= 1
                raise KeyError("a bug")
            super()._perform(effect)

    device = Device(local.url, local.tokens["lock"])
    device.on("lock_control")(_nothing)
    async with device, Buggy(local.url, local.tokens["phone"]) as app:
        broken = app._engine._task
        lost = asyncio.ensure_future(app.send("lock", "lock_control"))
        await until(lambda: app.tasks.failures == {"engine": 1}, "the engine fails")
        await until(lambda: app._engine.down is None and app._engine._task is not broken, "it is back")
        async with asyncio.timeout(STEP):
            assert (await app.send("lock", "lock_control")).code == 0
        lost.cancel()


async def _nothing(command: Command) -> None:
    return None
