"""JSON Schemas of frames and FD messages.

The law: a schema is generated from the type that decodes or encodes its message. Only the used and the
required fields of a message are listed by hand: the decoder accepts every field of every frame, and each
application reads the fields that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeAlias

import msgspec
from msgspec import Raw, Struct, structs

from duly.core.messages import NAME_LIMIT
from duly.wire import fd, frames, outgoing
from duly.wire.fd import FdKind

JsonSchema: TypeAlias = dict[str, object]


class Party(Enum):
    """The parties that send and receive frames."""

    APP = "app"
    DEVICE = "device"
    PERSON = "person"
    SENTINEL = "sentinel"
    ADMIN = "admin"
    ANY = "any client"
    HUB = "hub"


class ClientFrame(Struct, frozen=True):
    """A frame of a client: who sends it, and which fields of `Frame` it uses. `type` is its only type, or
    empty if the sender chooses it; `fixed` are fields with one value."""

    sender: Party
    about: str
    type: str = ""
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    fixed: Mapping[str, str] = {}


class HubFrame(Struct, frozen=True):
    """A frame of a hub: who receives it, and the type that encodes it. `type` is its only type if the encoder
    has none of its own."""

    reader: Party
    kind: type[Struct]
    about: str = ""
    type: str = ""


_ID: Final = ("seq_id",)
_ASKS: Final = ("seq_id", "data")


def _request(sender: Party, type_: str, about: str, *needs: str, may: tuple[str, ...] = ()) -> ClientFrame:
    return ClientFrame(sender, about, type_, needs, may)


CLIENT_FRAMES: Final[Mapping[str, ClientFrame]] = {
    "auth": _request(Party.ANY, "auth", "The first frame, unless the token is in the Authorization header.",
                     "token", may=("cursors",)),
    "command": ClientFrame(
        Party.APP, "A command for a device.", "", ("seq_id", "to"),
        ("data", "exp", "queue", "order", "timeout", "traceparent"),
    ),
    "outcome": _request(Party.APP, "outcome", "Asks how a command ended; it is not run by this.", *_ID),
    "ack": ClientFrame(
        Party.DEVICE, "How a command ended at its device.", "ack", ("seq_id", "code"),
        ("to", "data", "state", "detail"),
    ),
    "working": ClientFrame(
        Party.DEVICE, "That a device has a command and is at work on it.", "ack", ("seq_id", "state"),
        ("to", "progress"), {"state": "delivered"},
    ),
    "push": ClientFrame(
        Party.DEVICE, "What a device reports to its apps; with a seq_id it is acknowledged.", "", (),
        ("seq_id", "data"),
    ),
    "watch": _request(Party.ADMIN, "watch", "Asks for what goes through the hub, live.", may=_ID),
    "one_chat": _request(Party.PERSON, "one_chat", "A line to a person.", "to", *_ASKS, may=("exp",)),
    "group_chat": _request(Party.PERSON, "group_chat", "A line to a group.", "to", *_ASKS, may=("exp",)),
    "line_ack": _request(Party.PERSON, "ack", "That everything up to n has arrived.", "conv", "n"),
    "read": _request(Party.PERSON, "read", "That everything up to n is read.", "conv", "n"),
    "typing": _request(Party.PERSON, "typing", "That the person is writing.", "conv", may=("data",)),
    "presence": _request(Party.PERSON, "presence", "How the person is, in their own words.", "data"),
    "edit": _request(Party.PERSON, "edit", "Replaces the text of a line.", *_ASKS),
    "delete": _request(Party.PERSON, "delete", "Deletes the text of a line.", *_ASKS),
    "history": _request(Party.PERSON, "history", "Asks for lines of a conversation.", *_ASKS),
    "receipts": _request(Party.PERSON, "receipts", "Asks how far a line has come.", *_ASKS),
    "conversations": _request(Party.PERSON, "conversations", "Asks for one's conversations, a page at a "
                              "time.", *_ID, may=("data",)),
    "friends": _request(Party.PERSON, "friends", "Asks for one's friends.", *_ID),
    "friend_ask": _request(Party.PERSON, "friend_ask", "Asks a person to be friends.", *_ASKS),
    "friend_accept": _request(Party.PERSON, "friend_accept", "Accepts what a person asked.", *_ASKS),
    "friend_remove": _request(Party.PERSON, "friend_remove", "Ends a friendship.", *_ASKS),
    "block": _request(Party.PERSON, "block", "Takes no more lines from a person.", *_ASKS),
    "unblock": _request(Party.PERSON, "unblock", "Takes lines from a person again.", *_ASKS),
    "group_create": _request(Party.PERSON, "group_create", "Makes a group.", *_ASKS),
    "group_info": _request(Party.PERSON, "group_info", "Asks for a group and its members.", *_ASKS),
    "group_invite": _request(Party.PERSON, "group_invite", "Invites a person into a group.", *_ASKS),
    "group_join": _request(Party.PERSON, "group_join", "Joins a group.", *_ASKS),
    "group_leave": _request(Party.PERSON, "group_leave", "Leaves a group.", *_ASKS),
    "group_remove": _request(Party.PERSON, "group_remove", "Removes a member from a group.", *_ASKS),
    "group_role": _request(Party.PERSON, "group_role", "Gives a member another role.", *_ASKS),
    "alert_event": _request(Party.SENTINEL, "alert_event", "An alert; its seq_id is the event's id.", *_ASKS,
                            may=("time",)),
    "alert_update": _request(Party.SENTINEL, "alert_update", "Newer facts about an alert.", *_ASKS),
    "alert_cancel": _request(Party.SENTINEL, "alert_cancel", "Takes an alert back.", *_ASKS),
    "alert_heartbeat": _request(Party.SENTINEL, "alert_heartbeat", "That the sentinel lives, and when it is "
                                "heard next.", "data", may=_ID),
}  # fmt: skip
"""What clients send, by name. A name is the frame's type, except where a type has several forms."""

HUB_FRAMES: Final[Mapping[str, HubFrame]] = {
    "welcome": HubFrame(Party.ANY, outgoing.WelcomeFrame),
    "server_ack": HubFrame(Party.ANY, outgoing.ServerAck),
    "command": HubFrame(Party.DEVICE, outgoing.CommandFrame),
    "ack": HubFrame(Party.APP, outgoing.AckFrame),
    "push": HubFrame(Party.APP, outgoing.PushFrame),
    "device_status": HubFrame(
        Party.APP, outgoing.PushFrame, "That a device has come or gone.", frames.DEVICE_STATUS
    ),
    "gap": HubFrame(Party.APP, outgoing.GapFrame),
    "line": HubFrame(Party.PERSON, outgoing.LineFrame, "A line of chat, or an event of its conversation."),
    "receipt": HubFrame(Party.PERSON, outgoing.ReceiptFrame),
    "typing": HubFrame(Party.PERSON, outgoing.TypingFrame),
    "presence": HubFrame(Party.PERSON, outgoing.PresenceFrame),
    "seen": HubFrame(Party.ADMIN, outgoing.SeenFrame),
}
"""What a hub sends, by name."""

_OLD_NAMES: Final = {
    "sender": "sender_client_id", "receiver": "receiver_client_id", "msg_id": "message_id",
    "time": "timestamp", "exp": "expiration",
}  # fmt: skip
_A_NAME: Final[JsonSchema] = {"minLength": 1, "maxLength": NAME_LIMIT}
_FD: Final[Mapping[FdKind, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    FdKind.PENDING: (
        "A task, published to its receiver.",
        ("sender", "msg_id", "action"),
        ("receiver", "time", "exp", "payload", "order", "traceparent", "enc"),
    ),
    FdKind.ACK: ("That a task is durably received.", ("msg_id",), ("progress", "enc")),
    FdKind.COMPLETE: ("That a task is done, with its result.", ("msg_id",), ("value", "enc")),
    FdKind.FAILED: ("That a task has failed, with the reason.", ("msg_id",), ("error", "enc")),
    FdKind.STATUS: (
        "How a node is; retained by the broker.",
        (),
        ("time", "online", "battery", "rssi", "ip", "version", "uptime", "session", "heartbeat", "data",
         "enc"),
    ),
}  # fmt: skip


def schemas(ref_template: str, data: Mapping[str, type[Struct]]) -> dict[str, JsonSchema]:
    """Return the schema of every frame (`client.NAME`, `hub.NAME`) and FD message (`fd.KIND`), and what they
    refer to. `data` are the types that decode the `data` of a client's frame, by the frame's name."""
    types: list[type[Struct]] = [
        frames.Frame,
        *fd.FIELDS_OF.values(),
        *(one.kind for one in HUB_FRAMES.values()),
        *data.values(),
    ]
    found = msgspec.json.schema_components(
        [describable(one) for one in dict.fromkeys(types)], ref_template=ref_template, schema_hook=_anything
    )[1]
    made: dict[str, JsonSchema] = {}
    whole = found.pop("Frame")["properties"]
    for name, client in CLIENT_FRAMES.items():
        read_as: JsonSchema = {"$ref": ref_template.format(name=data[name].__name__)} if name in data else {}
        made[f"client.{name}"] = _client(name, client, whole, read_as)
    for name, hub in HUB_FRAMES.items():
        made[f"hub.{name}"] = _hub(name, hub, found[hub.kind.__name__])
    for hub in HUB_FRAMES.values():
        found.pop(hub.kind.__name__, None)
    for kind in FdKind:
        made[f"fd.{kind}"] = _fd(kind, found[fd.FIELDS_OF[kind].__name__]["properties"])
    for fields in set(fd.FIELDS_OF.values()):
        found.pop(fields.__name__)
    return made | found


def describable(type_: type[Struct]) -> type[Struct]:
    """Return the same type without the defaults of its raw JSON, which msgspec cannot write into a schema."""
    config = type_.__struct_config__
    fields = []
    for one in structs.fields(type_):
        if isinstance(one.default, Raw):
            default = msgspec.field(default_factory=object, name=one.encode_name)
        elif one.required:
            default = msgspec.field(name=one.encode_name)
        elif one.default is msgspec.NODEFAULT:
            default = msgspec.field(default_factory=one.default_factory, name=one.encode_name)
        else:
            default = msgspec.field(default=one.default, name=one.encode_name)
        fields.append((one.name, one.type, default))
    return msgspec.defstruct(
        type_.__name__,
        fields,
        tag=config.tag,
        tag_field=config.tag_field,
        namespace={"__doc__": type_.__doc__},
        kw_only=True,
    )


def _anything(type_: type) -> JsonSchema:
    """Return the schema of a type that msgspec has none for: `object` may be anything."""
    if type_ is object:
        return {"description": "anything"}  # msgspec takes an empty one for none
    raise NotImplementedError(f"no schema for {type_}")


def _client(title: str, frame: ClientFrame, whole: Mapping[str, JsonSchema], data: JsonSchema) -> JsonSchema:
    properties: JsonSchema = {"type": {"const": frame.type} if frame.type else _own_type(whole["type"])}
    for name in frame.may:
        properties[name] = whole[name]
    for name in frame.needs:
        properties[name] = {"const": frame.fixed[name]} if name in frame.fixed else _said(whole[name])
    if data:
        properties["data"] = data
    return {
        "title": title,
        "description": frame.about,
        "type": "object",
        "properties": properties,
        "required": ["type", *frame.needs],
    }


def _own_type(schema: JsonSchema) -> JsonSchema:
    return schema | {"not": {"enum": sorted(frames.RESERVED)}}


def _said(schema: JsonSchema) -> JsonSchema:
    """Return the schema of a required field: null counts as absent, so it may not be null."""
    kinds = schema.get("anyOf")
    if not isinstance(kinds, list):
        return schema
    rest = [kind for kind in kinds if kind != {"type": "null"}]
    others = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return others | (rest[0] if len(rest) == 1 else {"anyOf": rest})


def _hub(title: str, frame: HubFrame, schema: JsonSchema) -> JsonSchema:
    made = schema | {"title": title}
    if frame.about:
        made["description"] = frame.about
    if frame.type:
        properties = schema["properties"]
        assert isinstance(properties, dict)
        made["properties"] = properties | {"type": {"const": frame.type}}
    return made


def _named(name: str, schema: JsonSchema) -> JsonSchema:
    """Require a name in this field."""
    return {"required": [name], "properties": {name: _said(schema) | _A_NAME}}


def _fd(kind: FdKind, whole: Mapping[str, JsonSchema]) -> JsonSchema:
    about, needs, may = _FD[kind]
    properties: JsonSchema = {}
    for name in (*needs, *may, "sig", "kid"):
        old = _OLD_NAMES.get(name)
        properties[name] = _said(whole[name]) | _A_NAME if name in needs and old is None else whole[name]
        if old is not None:
            properties[old] = whole[name]
    made: JsonSchema = {"title": kind.value, "description": about, "type": "object", "properties": properties}
    either = [[name, old] for name in needs if (old := _OLD_NAMES.get(name)) is not None]
    if either:
        made["allOf"] = [{"anyOf": [_named(name, whole[names[0]]) for name in names]} for names in either]
    if required := [name for name in needs if name not in _OLD_NAMES]:
        made["required"] = required
    return made
