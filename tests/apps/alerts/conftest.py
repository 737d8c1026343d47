"""A tower with sentinels, a webhook receiver and a mail server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from duly.apps.alerts.profiles import ProfileDraft
from duly.apps.alerts.verbs import administer
from duly.core.fanout.plan import FanoutPolicy
from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.identity.accounts import Role
from duly.wire import any_json
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.receivers import Mailbox, Receiver, mail_server, receiver
from tests.servers import Postgres

SOON = RetryPolicy.exponential(20 * MS, 200 * MS, jitter=0)


class Tower(LocalHub):
    """A hub whose deliveries are tried again soon."""

    async def start(self) -> None:
        await super().start()
        fanout = self.hub.alerts._fanout
        fanout.policy = FanoutPolicy("alert", SOON, keep=fanout.policy.keep)

    async def profile(self, name: str, *urls: str, **more: Any) -> dict[str, str]:
        more.setdefault("nobody", not urls and "escalate" not in more)
        _, secrets = await self.hub.alerts.profiles.set(name, ProfileDraft(send=urls, **more))
        return secrets

    async def post(self, frame: Any, who: str = "gate", query: str = "") -> tuple[int, Any]:
        body = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        headers = {"Authorization": f"Bearer {self.tokens[who]}"} if who else {}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/v1/messages{query}", data=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    async def do(self, verb: str, **wanted: str) -> Any:
        by = wanted.pop("by", "ann")  # who has authenticated
        said = await administer(self.hub.alerts.operations, self.hub.alerts.profiles, verb, wanted, by)
        return any_json.read(msgspec.json.encode(said))

    async def show(self, event: str) -> Any:
        return await self.do("alert.show", event=event)

    async def until(self, true: Callable[[], Any], patience: float = GUARD) -> None:
        async with asyncio.timeout(patience):
            while not true():
                await asyncio.sleep(0.005)

    async def until_state(self, event: str, state: str) -> Any:
        async with asyncio.timeout(GUARD):
            while (shown := await self.show(event))["state"] != state:
                await asyncio.sleep(0.01)
        return shown


def event(id_: str = "event-1", **data: Any) -> dict[str, Any]:
    fields = {
        "profile_id": "home",
        "trigger_reason": "disconnect",
        "device_address": "AA:BB",
        "timestamp": time.time_ns() // 1_000_000,
        "severity": "warning",
    }
    return {"type": "alert_event", "seq_id": id_, "data": fields | data}


def quiet_now() -> str:
    """Quiet hours that began an hour ago at least, and last for another one, whenever this runs (UTC)."""
    hour = time.gmtime().tm_hour
    return f"{(hour - 1) % 24:02d}:00-{(hour + 2) % 24:02d}:00"


@pytest.fixture
async def tower(tmp_path: Path) -> AsyncIterator[Tower]:
    it = Tower(tmp_path / "hub", allow_private_webhooks=True)
    await it.start()
    await it.add(Role.SENTINEL, "gate", "barn")
    await it.add(Role.APP, "phone")
    await it.profile("home", nobody=True)
    yield it
    await it.stop()


@pytest.fixture
async def hubs(tmp_path: Path, postgres_server: Postgres) -> AsyncIterator[list[Tower]]:
    """Two hubs on one ledger."""
    shared = {
        "ledger": postgres_server.create_database(),
        "secret_key": str(tmp_path / "secret.key"),
    }
    towers = [Tower(tmp_path / name, allow_private_webhooks=True, **shared) for name in ("one", "two")]
    async with contextlib.AsyncExitStack() as closing:
        for tower in towers:
            await tower.start()
            closing.push_async_callback(tower.stop)
        yield towers


@pytest.fixture
async def hook() -> AsyncIterator[Receiver]:
    async with receiver() as it:
        yield it


@pytest.fixture
async def box() -> AsyncIterator[Mailbox]:
    async with mail_server() as it:
        yield it
