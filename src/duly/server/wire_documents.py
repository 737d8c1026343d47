"""The machine-readable descriptions of the wire: JSON Schemas of all messages, and AsyncAPI.

The law: both are generated from the types that decode and encode, at the first request, and never change
while a hub runs. They are public, like the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from duly.apps.alerts.heartbeats import HeartbeatData
from duly.apps.alerts.model import AlertChange, AlertEvent
from duly.apps.chat.conversations import LineNumber
from duly.apps.chat.friends import FriendRequest
from duly.apps.chat.groups import CreateGroup, GroupRequest, MemberRequest, RankRequest
from duly.apps.chat.line_requests import EditRequest
from duly.apps.chat.queries import HistoryPage
from duly.wire.fd import PREFIX, FdKind
from duly.wire.schemas import CLIENT_FRAMES, HUB_FRAMES, JsonSchema, Party, schemas

_DATA: Final[Mapping[str, type[Struct]]] = {
    "alert_event": AlertEvent,
    "alert_update": AlertChange,
    "alert_cancel": AlertChange,
    "alert_heartbeat": HeartbeatData,
    "edit": EditRequest,
    "delete": LineNumber,
    "receipts": LineNumber,
    "history": HistoryPage,
    "group_create": CreateGroup,
    "group_info": GroupRequest,
    "group_join": GroupRequest,
    "group_leave": GroupRequest,
    "group_invite": MemberRequest,
    "group_remove": MemberRequest,
    "group_role": RankRequest,
    **dict.fromkeys(("friend_ask", "friend_accept", "friend_remove", "block", "unblock"), FriendRequest),
}
"""The types that decode the `data` of frames."""

_VERSION: Final = "1"


@cache
def json_schemas() -> JsonSchema:
    """Return one JSON Schema: a message is a frame of a client, a frame of a hub, or an FD message."""
    found = schemas("#/$defs/{name}", _DATA)
    families = {family: [name for name in found if name.startswith(family)] for family in _FAMILIES}
    groups: JsonSchema = {
        title: {
            "description": f"Any {_FAMILIES[family]}.",
            "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        }
        for title, (family, names) in zip(("client", "hub", "fd"), families.items(), strict=True)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "duly",
        "description": "Every frame (WebSocket and HTTP) and every FD message (MQTT) of duly, by name.",
        "$defs": groups | found,
        "anyOf": [{"$ref": f"#/$defs/{title}"} for title in groups],
    }


_FAMILIES: Final = {"client.": "frame of a client", "hub.": "frame of a hub", "fd.": "message of FD"}

_BROKERS: Final = ("broker", "broker_websocket", "outside_broker")

_TASK_BINDING: Final[JsonSchema] = {
    "responseTopic": {
        "type": "string",
        "description": "The sender's topic for `complete`; `ack` and `failed` go to those beside it.",
    },
    "correlationData": {"type": "string", "description": "The `msg_id` of the task."},
    "bindingVersion": "0.2.0",
}
"""The MQTT 5 properties of a task."""

_TOPICS: Final[Mapping[FdKind, str]] = {
    FdKind.PENDING: "Tasks for the node or device of this name. Of a device only its hub writes here.",
    FdKind.ACK: "That the node's tasks, or a device's pushes, have been received and stored.",
    FdKind.COMPLETE: "Results of the tasks that the node has sent; a device writes to the hub's.",
    FdKind.FAILED: "Errors of the tasks that the node has sent, or refusals of a device's pushes.",
    FdKind.STATUS: "How the node is, retained; of a device also its pushes, not retained.",
}


@cache
def asyncapi() -> JsonSchema:
    """Return the AsyncAPI document, from the hub's side: it receives what clients send."""
    components = schemas("#/components/schemas/{name}", _DATA)
    messages = {
        name: {
            "name": name,
            "title": schema["title"],
            "summary": str(schema.get("description", "")).split("\n\n", maxsplit=1)[0],
            "contentType": "application/json",
            "payload": {"$ref": f"#/components/schemas/{name}"},
        }
        for name, schema in components.items()
        if name.startswith(tuple(_FAMILIES))
    }
    messages["fd.pending"]["bindings"] = {"mqtt": _TASK_BINDING}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "duly",
            "version": _VERSION,
            "description": "Messages that take effect once, in order, and tell their senders how they ended.",
        },
        "defaultContentType": "application/json",
        "servers": {
            "hub": {"host": "localhost:7800", "protocol": "ws", "description": "What `duly up` listens on."},
            "broker": {
                "host": "localhost:7883",
                "protocol": "mqtt",
                "protocolVersion": "3.1.1",
                "description": "The embedded broker. QoS 1, persistent sessions.",
            },
            "broker_websocket": {
                "host": "localhost:7884",
                "pathname": "/mqtt",
                "protocol": "mqtt",
                "protocolVersion": "3.1.1",
                "description": "The embedded broker over WebSocket, where `--mqtt-ws-port` opens a port.",
            },
            "outside_broker": {
                "host": "broker.example:1883",
                "protocol": "mqtt",
                "protocolVersion": "5",
                "description": "Another broker, with MQTT 5 if it speaks that, else 3.1.1. What only MQTT 5 "
                "has in a binding holds here.",
            },
        },
        "channels": _channels(messages),
        "operations": _operations(),
        "components": {"schemas": components, "messages": messages},
    }


def _channels(messages: Mapping[str, object]) -> JsonSchema:
    frames = [name for name in messages if not name.startswith("fd.")]
    channels: JsonSchema = {
        "frames": {
            "address": "/v1/ws",
            "description": "One JSON text frame per message. POST /v1/messages takes the same frames.",
            "servers": [{"$ref": "#/servers/hub"}],
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in frames},
            "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
        }
    }
    for kind, about in _TOPICS.items():
        name = f"fd.{kind}"
        channels[kind.value] = {
            "address": f"{PREFIX}/{{name}}/{kind}",
            "description": about,
            "parameters": {"name": {"description": "The user name of a node, of a device, or `hub`."}},
            "servers": [{"$ref": f"#/servers/{each}"} for each in _BROKERS],
            "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        }
    return channels


def _operations() -> JsonSchema:
    """Return the operations of a hub, by role of the client."""
    operations: JsonSchema = {}
    for party in Party:
        sent = [f"client.{name}" for name, frame in CLIENT_FRAMES.items() if frame.sender is party]
        told = [f"hub.{name}" for name, frame in HUB_FRAMES.items() if frame.reader is party]
        role = party.value.replace(" ", "_")
        if sent:
            operations[f"from_{role}"] = _operation(
                "receive", "frames", sent, f"Frames that it takes from {party.value}."
            )
        if told:
            operations[f"to_{role}"] = _operation(
                "send", "frames", told, f"Frames that it sends to {party.value}."
            )
    mqtt: JsonSchema = {"qos": 1, "retain": False, "bindingVersion": "0.2.0"}
    expiring: JsonSchema = {
        "messageExpiryInterval": {
            "type": "integer",
            "description": "The seconds until the task expires, where the broker speaks MQTT 5.",
        }
    }
    for kind in FdKind:
        for action in ("send", "receive"):
            operation = _operation(action, kind.value, [f"fd.{kind}"], f"{action.capitalize()} a {kind}.")
            binding = mqtt | expiring if kind is FdKind.PENDING else mqtt
            operations[f"{action}_{kind}"] = operation | {"bindings": {"mqtt": binding}}
    return operations


def _operation(action: str, channel: str, messages: list[str], summary: str) -> JsonSchema:
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in messages],
    }


def routes() -> list[web.RouteDef]:
    """Return the routes of the two documents."""
    return [
        web.get("/v1/schemas.json", _document(json_schemas)),
        web.get("/v1/asyncapi.json", _document(asyncapi)),
    ]


def _document(make: Callable[[], JsonSchema]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(make()), content_type="application/json")

    return serve
