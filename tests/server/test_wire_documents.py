"""The documents of the wire: they are sound by their own standards, and what really goes over the wire fits
them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for

from duly.apps.alerts.profiles import ProfileDraft
from duly.clients.app import App
from duly.clients.chat import Chat
from duly.clients.device import Command, Device
from duly.clients.sentinel import Sentinel
from duly.core.monitor.signals import SentinelPolicy
from duly.identity.accounts import Role
from duly.server.wire_documents import asyncapi, json_schemas
from duly.testing.sim.plan import plan
from duly.testing.sim.runner import WORLDS
from duly.wire.fd import FdKind, parse_topic
from duly.wire.frames import RESERVED, Frame
from duly.wire.schemas import CLIENT_FRAMES, HUB_FRAMES
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.servers import missing

ROOT = Path(__file__).parents[2]
SPECIFICATION = ROOT / ".venv" / "npm" / "node_modules" / "@asyncapi" / "specs" / "schemas" / "3.0.0.json"
BUNDLE: dict[str, Any] = json_schemas()


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": BUNDLE["$defs"]})


CLIENT, HUB = validator("client"), validator("hub")


def test_the_schemas_are_json_schemas() -> None:
    Draft202012Validator.check_schema(BUNDLE)


def test_asyncapi_fits_its_published_schema() -> None:
    if not SPECIFICATION.exists():
        missing("@asyncapi/specs, which 'make' takes from npm,")
    specification = json.loads(SPECIFICATION.read_text())
    validator_for(specification)(specification).validate(json.loads(json.dumps(asyncapi())))


def test_every_reference_in_asyncapi_leads_somewhere() -> None:
    whole: Any = asyncapi()

    def references(part: object) -> Iterator[str]:
        if isinstance(part, dict):
            if isinstance(found := part.get("$ref"), str):
                yield found
            for value in part.values():
                yield from references(value)
        elif isinstance(part, list):
            for value in part:
                yield from references(value)

    for reference in references(whole):
        target: Any = whole
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]


def test_every_type_that_the_protocol_reserves_has_a_schema() -> None:
    described = {frame.type for frame in CLIENT_FRAMES.values()}
    described |= {name for name, frame in HUB_FRAMES.items() if name in RESERVED or frame.type}
    assert described - {""} == RESERVED


def test_every_field_of_a_frame_is_in_a_schema() -> None:
    names = {name for key, schema in BUNDLE["$defs"].items() if "." in key for name in schema["properties"]}
    assert set(Frame.__struct_encode_fields__) <= names


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("client.command", {"type": "lock_control", "to": "lock"}),
        ("client.command", {"type": "lock_control", "seq_id": None, "to": "lock"}),
        ("client.command", {"type": "ack", "seq_id": "1_0", "to": "lock"}),
        ("client.command", {"type": "Lock", "seq_id": "1_0", "to": "lock"}),
        ("client.ack", {"type": "ack", "seq_id": "1_0"}),
        ("client.ack", {"type": "ack", "seq_id": "1_0", "code": "done"}),
        ("client.alert_event", {"type": "alert_event", "seq_id": "e", "data": {"profile_id": "home"}}),
        ("client.history", {"type": "history", "seq_id": "1_0", "data": {}}),
        ("fd.pending", {"sender": "A", "msg_id": "1"}),
        ("fd.pending", {"action": "on", "msg_id": "1"}),
        ("fd.complete", {"value": "1"}),
    ],
)
def test_what_a_hub_would_refuse_does_not_fit(schema: str, message: object) -> None:
    with pytest.raises(ValidationError):
        validator(schema).validate(message)


# ── what really goes over the wire ───────────────────────────────────────────────────────────────


class Tapped(aiohttp.ClientWebSocketResponse):
    """A WebSocket that checks what it carries."""

    sent: ClassVar[set[str]] = set()
    heard: ClassVar[set[str]] = set()

    async def send_frame(self, message: bytes, *more: Any) -> None:
        frame = json.loads(message)
        CLIENT.validate(frame)
        self.sent.add(frame["type"])
        await super().send_frame(message, *more)

    async def receive(self, timeout: float | None = None) -> aiohttp.WSMessage:
        message = await super().receive(timeout)
        if message.type is aiohttp.WSMsgType.TEXT:
            frame = json.loads(message.data)
            HUB.validate(frame)
            self.heard.add(frame["type"])
        return message


@pytest.fixture
def tapped(monkeypatch: pytest.MonkeyPatch) -> type[Tapped]:
    """Every WebSocket of a client is tapped."""
    original = aiohttp.ClientSession.__init__

    def make(self: aiohttp.ClientSession, *args: Any, **options: Any) -> None:
        original(self, *args, **options | {"ws_response_class": Tapped})

    monkeypatch.setattr(aiohttp.ClientSession, "__init__", make)
    Tapped.sent, Tapped.heard = set(), set()
    return Tapped


async def test_commands_and_pushes_fit(local: LocalHub, tapped: type[Tapped]) -> None:
    device = Device(local.url, local.tokens["lock"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> object:
        command.working({"at": 1})
        return {"open": True}

    async with App(local.url, local.tokens["phone"]) as app, device:
        await device.push("event_report", {"door": "open"})
        await app.send("lock", "lock_control", {"open": True}, timeout=60)
        await app.send("lock", "system")
    assert tapped.sent >= {"auth", "lock_control", "ack", "event_report"}
    assert tapped.heard >= {"welcome", "server_ack", "lock_control", "ack", "event_report", "device_status"}


async def test_chat_fits(local: LocalHub, tapped: type[Tapped]) -> None:
    await local.add(Role.USER, "ann", "bob")
    ann, bob = (Chat(local.url, local.tokens[name]) for name in ("ann", "bob"))
    async with ann, bob:
        group = await ann.create_group("club", "bob")
        sent = await ann.send(group, "welcome")
        async with asyncio.timeout(GUARD):
            async for line in bob.lines():
                if line.type == "group_chat":
                    break
        bob.read(group, sent.n)
        bob.typing(group)
        await ann.edit(group, sent.n, "hello")
        await ann.history(group)
        await ann.receipts(group, sent.n)
        await ann.ask_friend("bob")
        await bob.accept_friend("ann")
        await ann.conversations()
        await ann.group(group)
        await ann.friends()
        await ann.delete(group, sent.n)
        await bob.leave(group)
        async with asyncio.timeout(GUARD):
            while not tapped.heard >= {"receipt", "typing", "group_leave"}:
                await asyncio.sleep(0.01)
    assert tapped.sent >= {
        "group_create",
        "group_chat",
        "edit",
        "history",
        "receipts",
        "read",
        "ack",
        "typing",
    }


async def test_alerts_fit(local: LocalHub, tapped: type[Tapped]) -> None:
    await local.add(Role.SENTINEL, "gate")
    await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    policy = SentinelPolicy(countdown=0, debounce=0, heartbeat=30)
    sentinel = Sentinel(local.url, local.tokens["gate"], profile="home", policy=policy, session="night")
    async with sentinel:
        alert = sentinel.trigger("panic", "AA:BB")
        await alert.sent
        sentinel.update(alert.id, location={"lat": 1})
        sentinel.cancel("AA:BB")
        async with asyncio.timeout(GUARD):
            while not tapped.sent >= {"alert_event", "alert_update", "alert_cancel", "alert_heartbeat"}:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ["nodes", "mqtt"])
def test_what_nodes_and_devices_publish_fits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, logger="duly")  # their disks fail on purpose
    world: Any = WORLDS[name](plan(3))
    world.run()
    kinds = set()
    for message in world.broker.recorded:
        if message.payload and message.topic.startswith("nodes/") and is_json(message.payload):
            _, kind = parse_topic("nodes", message.topic)
            validator(f"fd.{kind}").validate(json.loads(message.payload))
            kinds.add(kind)
    assert kinds >= {FdKind.PENDING, FdKind.ACK, FdKind.COMPLETE, FdKind.STATUS}


def is_json(text: bytes) -> bool:
    """The simulation also publishes what is none, to see that nothing breaks."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


async def test_a_hub_serves_both(local: LocalHub) -> None:
    async with aiohttp.ClientSession() as http:
        for name, document in (("schemas", json_schemas()), ("asyncapi", asyncapi())):
            async with http.get(f"{local.url}/v1/{name}.json") as answer:
                assert answer.status == 200
                assert await answer.json() == json.loads(json.dumps(document))
