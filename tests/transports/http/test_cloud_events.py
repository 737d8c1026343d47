"""CloudEvents on the wire, written and read by the SDK of CloudEvents: each takes effect once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent

import duly
from duly.apps.alerts.profiles import ProfileDraft
from duly.clients.device import Command
from duly.identity.accounts import Role
from tests.local_hub import LocalHub
from tests.receivers import receiver

MODES: list[Callable[[CloudEvent], HTTPMessage]] = [to_structured_event, to_binary_event]


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path, allow_private_webhooks=True)
    await it.start()
    await it.add(Role.APP, "shop")
    await it.add(Role.DEVICE, "lock-1")
    await it.add(Role.SENTINEL, "gate")
    await it.hub.accounts.grant("shop", "lock-1")
    yield it
    await it.stop()


def event(type_: str, id_: str = "1", data: Any = None, **attributes: Any) -> CloudEvent:
    named = {"type": type_, "source": "https://shop.example.com/orders", "id": id_} | attributes
    return CloudEvent(attributes=named, data=data or {})


async def send(
    local: LocalHub, message: HTTPMessage, who: str = "shop", query: str = ""
) -> tuple[int, dict[str, Any]]:
    headers = dict(message.headers) | {"Authorization": f"Bearer {local.tokens[who]}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{local.url}/v1/cloudevents{query}", data=message.body, headers=headers) as said,
    ):
        return said.status, await said.json()


@pytest.mark.parametrize("write", MODES)
async def test_a_command_takes_effect_once_however_often_its_event_comes(
    local: LocalHub, write: Callable[[CloudEvent], HTTPMessage]
) -> None:
    opened: list[Any] = []
    lock = duly.Device(local.url, local.tokens["lock-1"])

    @lock.on("lock_control")
    async def open_(command: Command) -> dict[str, bool]:
        opened.append((command.sender, command.data))
        return {"opened": True}

    made = event(
        "com.example.lock_control", data={"open": True}, subject="lock-1", time=datetime.now(UTC), queue=True
    )
    async with lock:
        said = await asyncio.gather(*(send(local, write(made), query="?wait=20") for _ in range(5)))
        again = await send(local, write(made), query="?wait=20")
    assert opened == [("shop", {"open": True})]
    assert [status for status, _ in said] == [200] * 5
    assert again[1]["ack"]["data"] == {"opened": True}


async def test_the_other_mode_is_the_same_event_and_other_data_a_conflict(local: LocalHub) -> None:
    await alerts_to(local)
    made = alert()
    for write in MODES:
        status, said = await send(local, write(made), "gate")
        assert (status, said["code"]) == (200, 0 if write is MODES[0] else 5)
    status, said = await send(local, to_binary_event(alert(trigger_reason="other")), "gate")
    assert (status, said["error"]) == (422, "id_conflict")


def alert(id_: str = "a1", **data: Any) -> CloudEvent:
    data = {"profile_id": "home", "trigger_reason": "smoke"} | data
    return event("alert_event", id_, data, time=datetime(2026, 11, 16, tzinfo=UTC).replace(microsecond=0))


async def alerts_to(local: LocalHub, *urls: str) -> None:
    await local.hub.alerts.profiles.set("home", ProfileDraft(send=urls, nobody=not urls))


async def test_what_is_offline_may_be_tried_again_and_an_old_event_has_no_effect(local: LocalHub) -> None:
    now = datetime.now(UTC)
    status, said = await send(local, to_structured_event(event("lock_control", subject="lock-1", time=now)))
    assert (status, said["error"]) == (503, "offline")
    old = event("lock_control", subject="lock-1", time=now - timedelta(hours=1))
    status, said = await send(local, to_structured_event(old))
    assert (status, said["error"]) == (400, "expired")


async def test_an_event_beyond_the_limit_of_its_account_is_429(tmp_path: Path) -> None:
    local = LocalHub(tmp_path / "hub", alerts_per_minute=1)
    await local.start()
    try:
        await local.add(Role.SENTINEL, "gate")
        await alerts_to(local)
        statuses = [(await send(local, to_binary_event(alert(id_)), "gate"))[0] for id_ in ("a1", "a1", "a2")]
    finally:
        await local.stop()
    assert statuses == [200, 200, 429]


async def test_a_batch_is_answered_by_an_array_and_the_worst_status(local: LocalHub) -> None:
    await alerts_to(local)

    async def batch(*events: CloudEvent) -> tuple[int, Any]:
        body = b"[" + b",".join(bytes(to_structured_event(one).body) for one in events) + b"]"
        head = {"content-type": "application/cloudevents-batch+json"}
        return await send(local, HTTPMessage(head, body), "gate")

    assert (await batch())[0] == 200
    status, said = await batch(alert("a1"), alert("a2"))
    assert (status, [one["code"] for one in said]) == (200, [0, 0])
    status, said = await batch(alert("a1"), alert("a3", profile_id="nowhere"), alert("a4"))
    assert (status, [one["code"] for one in said]) == (400, [5, 2, 0])


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"\xff", b"[[[["])
async def test_no_body_is_a_fault_of_the_hub(local: LocalHub, body: bytes) -> None:
    for form in ("application/cloudevents+json", "application/cloudevents-batch+json", "text/plain"):
        status, said = await send(local, HTTPMessage({"content-type": form}, body))
        assert (status, said["error"]) == (400, "malformed")


@pytest.mark.parametrize("scheme", ["cloudevents+", "cloudevents-binary+"])
async def test_a_recipient_is_told_in_the_form_of_cloudevents(local: LocalHub, scheme: str) -> None:
    async with receiver() as hook:
        await alerts_to(local, f"{scheme}{hook.url}")
        assert (await send(local, to_binary_event(alert()), "gate"))[0] == 202
        await hook.got(1)
    ((headers, body),) = hook.requests
    told = from_http_event(HTTPMessage({name.lower(): value for name, value in headers.items()}, body))
    assert (told.get_type(), told.get_source()) == ("duly.alert.event", "/duly/alerts/gate")
    assert told.get_id() == headers["webhook-id"]
    assert told.get_subject() == "https://shop.example.com/orders a1"
    assert told.get_time() == datetime(2026, 11, 16, tzinfo=UTC)
    data = told.get_data()
    assert isinstance(data, dict)
    assert data["reason"] == "smoke"
    assert "webhook-signature" in headers
    assert json.dumps(data)
