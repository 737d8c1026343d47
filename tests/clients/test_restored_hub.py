"""Clients whose hub comes back from an older backup: nothing is lost, repeated or awaited for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from duly.clients.app import App, Gap
from duly.clients.chat import Chat
from duly.clients.device import Command, Device
from duly.errors import Refused
from duly.identity.accounts import Role
from tests.guard import GUARD
from tests.restorable_hub import RestorableHub


@pytest_asyncio.fixture
async def local(tmp_path: Path) -> AsyncIterator[RestorableHub]:
    it = RestorableHub(tmp_path / "hub")
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.add(Role.USER, "ann", "bob")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


async def pushed(app: App, last: int) -> list[int | str]:
    """The pushes with a number up to this one, and where a gap was told."""
    seen: list[int | str] = []
    async with asyncio.timeout(GUARD):
        async for news in app.pushes():
            if isinstance(news, Gap):
                seen.append("gap")
            elif news.type == "count":
                seen.append(news.data)
                if news.data == last:
                    return seen
    raise AssertionError(seen)


async def texts(chat: Chat, last: str) -> list[str]:
    seen: list[str] = []
    async with asyncio.timeout(GUARD):
        async for line in chat.lines():
            seen.append(line.text)
            if line.text == last:
                chat._at.read(line.conv, line.n)
                return seen
    raise AssertionError(seen)


@pytest.mark.parametrize("store", [False, True])
async def test_an_app_gets_the_pushes_that_have_the_numbers_of_lost_ones(
    local: RestorableHub, tmp_path: Path, store: bool
) -> None:
    app = App(local.url, local.tokens["phone"], store=str(tmp_path / "phone.db") if store else None)
    async with app:
        async with Device(local.url, local.tokens["lock"]) as lock:
            await lock.push("count", 1)
            backup = await local.back_up()
            for n in (2, 3, 4):
                await lock.push("count", n)
            assert await pushed(app, 4) == [1, 2, 3, 4]

        async def push_many() -> None:
            async with Device(local.url, local.tokens["lock"]) as lock:
                for n in range(5, 12):
                    await lock.push("count", n)

        if store:
            await app.stop()
        await local.come_back(backup, push_many)
        if store:
            await app.start()
            await app.ready()
        assert await pushed(app, 11) == ["gap", 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("store", [False, True])
async def test_a_person_gets_the_lines_that_have_the_numbers_of_lost_ones(
    local: RestorableHub, tmp_path: Path, store: bool
) -> None:
    bob = Chat(local.url, local.tokens["bob"], store=str(tmp_path / "bob.db") if store else None)
    async with bob:
        async with Chat(local.url, local.tokens["ann"]) as ann:
            await ann.send("bob", "1")
            backup = await local.back_up()
            for n in (2, 3, 4):
                await ann.send("bob", str(n))
            assert await texts(bob, "4") == ["1", "2", "3", "4"]

        async def say() -> None:
            async with Chat(local.url, local.tokens["ann"]) as ann:
                for n in range(5, 10):
                    await ann.send("bob", str(n))

        if store:
            await bob.stop()
        await local.come_back(backup, say)
        if store:
            await bob.start()
            await bob.ready()
        assert await texts(bob, "9") == ["5", "6", "7", "8", "9"]
        again = await local.back_up("again.db")
        await local.come_back(again)
        async with Chat(local.url, local.tokens["ann"]) as ann:
            await ann.send("bob", "10")
            assert await texts(bob, "10") == ["10"], "what this backup holds is not repeated"


async def test_a_command_that_the_lost_ledger_may_have_accepted_is_not_reported_as_refused(
    local: RestorableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restored hub does not know it, and refuses the repeat, as the device is away; but it has run."""
    ran = asyncio.Event()
    async with App(local.url, local.tokens["phone"]) as app:
        async with Device(local.url, local.tokens["lock"]) as lock:

            @lock.on("open")
            async def open_(command: Command) -> None:
                ran.set()

            backup = await local.back_up()
            with monkeypatch.context() as deaf:
                deaf.setattr(app._link, "_heard", lambda frame: None)
                command = await app.post("lock", "open")
                await ran.wait()
        await local.come_back(backup)
        async with asyncio.timeout(GUARD):
            assert (await command.ended()).state == "unknown"
        with pytest.raises(Refused, match="offline"):
            await app.send("lock", "open")


async def test_pushes_that_the_lost_ledger_may_have_stored_are_stored(local: RestorableHub) -> None:
    """Refused ones would be lost, and so would every push in the first minutes after a restore."""
    async with Device(local.url, local.tokens["lock"]) as lock:
        backup = await local.back_up()
        await local.stop()
        waiting = lock.push("count", 1)
        await local.come_back(backup, skew=None)
        async with App(local.url, local.tokens["phone"]) as app, asyncio.timeout(GUARD):
            await waiting
            await lock.push("count", 2)
            assert (await pushed(app, 2))[-1] == 2
            with pytest.raises(Refused, match="restored from a backup"):
                await app.send("lock", "open")
