"""Two towers as real processes on one PostgreSQL: what a dead one was sending, the other one finishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.core.lifecycle import State
from duly.core.operations import Delivery
from duly.storage import open_ledger
from tests.end_to_end.processes import HubProcess
from tests.guard import GUARD
from tests.receivers import Mailbox, Receiver, mail_server, receiver
from tests.servers import Postgres


class Towers:
    """Both, with a sentinel at the first, and whom they tell: a webhook, and two mailboxes, of which the
    second wants nothing twice."""

    def __init__(self, folder: Path, ledger: str, hook: Receiver, mailbox: Mailbox, careful: Mailbox) -> None:
        self.hook, self.mailbox, self.careful = hook, mailbox, careful
        self._began = time.time_ns() // 1_000_000
        more = {"ledger": ledger, "allow_private_webhooks": "true", "secret_key": folder / "secret.key"}
        self.first, self.second = (HubProcess(folder / name, **more) for name in ("first", "second"))

    async def start(self) -> None:
        addresses = [f"mailto://127.0.0.1:{box.port}?from=tower@example.com&to=ann@example.com" for box in
                     (self.mailbox, self.careful)]  # fmt: skip
        tell = (self.hook.url, addresses[0], addresses[1] + "&doubt=stop")
        tokens = await self.first.prepare([], [], ["gate"], *tell)
        self._token = tokens["gate"]
        self.second.folder.mkdir()
        for hub in (self.first, self.second):
            await hub.start()

    async def report(self, hub: HubProcess, id_: str) -> int:
        data = {"profile_id": "home", "trigger_reason": "smoke", "timestamp": self._began}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"}) as http,
            http.post(
                f"{hub.url}/v1/messages", json={"type": "alert_event", "seq_id": id_, "data": data}
            ) as answer,
        ):
            said: dict[str, Any] = await answer.json()
            return int(said["code"])

    async def report_and_hang(self) -> None:
        """All three have got it, and none of them answers."""
        for told in (self.hook, self.mailbox, self.careful):
            told.words = ["hang after"]
        assert await self.report(self.first, "fire") == 0
        await self.until(lambda: self.hook.taken and self.mailbox.mails and self.careful.mails)

    async def until(self, true: Any, seconds: float = GUARD) -> None:
        async with asyncio.timeout(seconds):
            while not true():
                await asyncio.sleep(0.02)

    async def ended(self, id_: str = "fire") -> dict[str, Delivery]:
        """Its deliveries by kind of channel, once the alert has ended."""
        async with asyncio.timeout(GUARD), await open_ledger(self.first.ledger_url) as ledger:
            while True:
                record = await ledger.outcome("gate", id_)
                if record is not None and record.state.terminal:
                    assert record.state is State.DONE, "somebody was reached"
                    found = await ledger.deliveries(record.message.key)
                    return {self._named(one.ref.recipient): one for one in found}
                await asyncio.sleep(0.05)

    def _named(self, label: str) -> str:
        kinds = {"http": "hook", f"mailto:127.0.0.1:{self.mailbox.port}": "mailbox"}
        return next((kind for begin, kind in kinds.items() if label.startswith(begin)), "careful")


@pytest.fixture
async def towers(tmp_path: Path, postgres_server: Postgres) -> AsyncIterator[Towers]:
    ledger = postgres_server.create_database()
    async with receiver() as hook, mail_server() as mailbox, mail_server() as careful:
        it = Towers(tmp_path, ledger, hook, mailbox, careful)
        try:
            await it.start()
            yield it
        finally:
            await it.first.kill()
            await it.second.kill()


def check(towers: Towers, deliveries: dict[str, Delivery]) -> None:
    first, again = (headers["webhook-id"] for headers, _ in towers.hook.requests)
    assert first == again, "a receiver that keeps ids can tell"
    bodies = towers.hook.taken[first]
    links = [body["data"].pop("acknowledge").partition("/ack?")[2] for body in bodies]
    assert links[0] == links[1], "the same link, at the hub that sends it"
    assert bodies[0]["data"] == bodies[1]["data"]
    subjects = [str(mail["Subject"]) for mail in towers.mailbox.mails]
    assert subjects == ["warning: smoke (gate)", "Repeat? warning: smoke (gate)"], "once more, marked"
    assert len(towers.careful.mails) == 1, "not a second time"
    assert {name: one.state.word for name, one in deliveries.items()} == {
        "hook": "done", "mailbox": "done", "careful": "unknown",
    }  # fmt: skip
    assert deliveries["hook"].attempt == deliveries["mailbox"].attempt == 2
    assert "in doubt" in deliveries["careful"].error


async def test_what_a_killed_tower_was_sending_the_other_one_finishes_as_each_channel_declares(
    towers: Towers,
) -> None:
    await towers.report_and_hang()
    assert await towers.report(towers.second, "fire") == 5, "the other one knows it"
    await towers.first.kill()
    check(towers, await towers.ended())
    assert await towers.report(towers.second, "fire") == 5
    await towers.report(towers.second, "flood")
    await towers.ended("flood")
    assert [len(towers.hook.taken), len(towers.mailbox.mails), len(towers.careful.mails)] == [2, 3, 2]


async def test_a_tower_that_only_slept_changes_nothing_when_it_wakes_up(towers: Towers) -> None:
    await towers.report_and_hang()
    towers.first.suspend()
    deliveries = await towers.ended()
    check(towers, deliveries)
    towers.first.resume()
    for told in (towers.hook, towers.mailbox, towers.careful):
        told.released.set()  # and it hears that all is well
    assert await towers.report(towers.first, "flood") == 0
    await towers.ended("flood")
    assert await towers.ended() == deliveries, "its own attempt was fenced off"
