"""What Home Assistant is told of a device, and how its commands are read.

The laws. Nothing here knows a socket. A command carries the time at which it was given, to the microsecond.
Its id is made from that and its text, so a command that the broker delivers twice is the same command, and
one that comes too late is refused. A value that a kind cannot have is shown as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version
from typing import Final, Literal

import msgspec
from msgspec import Struct

from duly.core.ids import uuid7
from duly.core.units import SECOND
from duly.errors import Expired, Malformed
from duly.integrations.home_assistant.lights import FULL, LightFields, LightWish, show

UNKNOWN: Final = "None"
"""The state that Home Assistant shows as unknown."""

PREFIX: Final = "duly"
DISCOVERY: Final = "homeassistant"
ONLINE: Final = "online"
OFFLINE: Final = "offline"

EXPIRES: Final = 30.0
"""Seconds after which a command of Home Assistant is not carried out any more."""

EntityKind = Literal["lock", "light", "switch", "sensor"]

_FIELDS: Final = {"lock": "open", "light": "on", "switch": "on"}
_COMMANDS: Final = {"lock": "lock_control", "light": "dev_control", "switch": "dev_control"}
_PAYLOADS: Final = {
    "lock": {"LOCK": False, "UNLOCK": True},
    "light": {"ON": True, "OFF": False},
    "switch": {"ON": True, "OFF": False},
}
"""What each command means for the field of the device."""
_STATES: Final = {
    "lock": {True: "UNLOCKED", False: "LOCKED"},
    "light": {True: "on", False: "off"},
    "switch": {True: "ON", False: "OFF"},
}
_WORKING: Final = {"UNLOCK": "UNLOCKING", "LOCK": "LOCKING"}

_AT: Final = '"at": {{ now().timestamp() }}'
_COMMAND: Final = '{"command": "{{ value }}", ' + _AT + "}"
_UNSAFE: Final = re.compile(r"[^a-zA-Z0-9_-]")


class EntityDeclaration(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device, or one of its values, that is to appear in Home Assistant.

    >>> EntityDeclaration(device="lock-1", kind="lock").object_id
    'lock-1_lock'
    """

    device: str
    kind: EntityKind
    name: str = ""
    """how people call it; the device's name by default"""
    field: str = ""
    """the field of the device's data that is its state: `open` of a lock, `on` of a light or switch"""
    command: str = ""
    """the type of the commands that it gets: `lock_control` for a lock, `dev_control` for others"""
    brightness: str = ""
    """of a light: the field that is its brightness, a whole number up to `brightness_max`"""
    brightness_max: int = FULL
    color: str = ""
    """of a light: the field that is its colour, [red, green, blue], each 0 to 255"""
    color_temp: str = ""
    """of a light: the field that is its colour temperature, in kelvin"""
    unit: str = ""
    device_class: str = ""
    state_class: str = ""

    def __post_init__(self) -> None:
        if not self.device:
            raise Malformed("an entity needs the name of its device")
        if self.kind == "sensor" and not self.field:
            raise Malformed(f"a sensor shows a field of what {self.device} reports; name it: field = …")
        if self.kind == "sensor" and self.command:
            raise Malformed(f"a sensor of {self.device} takes no commands; leave out command = …")
        if self.kind != "light" and self.light:
            raise Malformed(
                f"a {self.kind} has no brightness and no colours; only a light has ({self.device})"
            )
        if self.brightness_max < 1:
            raise Malformed(f"brightness_max of {self.device} must be its greatest brightness, 1 or more")
        fields = [self.read_from, self.brightness, self.color, self.color_temp]
        if any(field and fields.count(field) > 1 for field in fields):
            raise Malformed(f"two things of {self.device} cannot be the same field: {', '.join(fields)}")

    @property
    def light(self) -> LightFields:
        """The fields of a light for its brightness and colours."""
        return LightFields(self.brightness, self.color, self.color_temp, self.brightness_max)

    @property
    def read_from(self) -> str:
        """The field of the device's data that is its state."""
        return self.field or _FIELDS[self.kind]

    @property
    def command_type(self) -> str:
        """The type of the commands that the device gets."""
        return self.command or _COMMANDS[self.kind]

    @property
    def object_id(self) -> str:
        """The name of the entity in topics."""
        return slug(f"{self.device}_{self.field or self.kind}")

    def state_of(self, value: object, light: LightWish | None = None) -> str:
        """Return how Home Assistant writes this value of the field, and what is known of a light; `UNKNOWN`
        for a value that the kind cannot have."""
        if self.light:
            return show(self._word_of(value), light or LightWish())
        return self._word_of(value)

    def _word_of(self, value: object) -> str:
        if self.kind == "sensor":
            if isinstance(value, bool | int | float | str):
                return str(value)
            return UNKNOWN
        return _STATES[self.kind][value] if isinstance(value, bool) else UNKNOWN

    def working(self, word: str) -> str | None:
        """Return the state while a command is under way; None if the kind has no such state."""
        return _WORKING.get(word)


class HomeAssistantCommand(Struct, frozen=True):
    """A command of Home Assistant, as it goes to the device."""

    word: str
    data: dict[str, object]
    """what the device is told"""
    id: str
    expires_at: float
    """until when it may be carried out, in seconds since 1970: the same whenever it is delivered"""
    given_at: int
    """when Home Assistant gave it, in microseconds"""


class _Given(LightWish, frozen=True, kw_only=True):
    command: str
    at: float


_given: Final = msgspec.json.Decoder(_Given)


class Topics(Struct, frozen=True):
    """The topics of a bridge: its own, and those of discovery."""

    prefix: str = PREFIX
    discovery: str = DISCOVERY

    def __post_init__(self) -> None:
        for text in (self.prefix, self.discovery):
            if not text or any(c in text for c in "+#\0") or text.startswith("$"):
                raise Malformed(
                    f"{text!r} cannot begin topics; it must not be empty, contain + or #, or begin with $"
                )

    @property
    def availability(self) -> str:
        """Whether the bridge reaches its hub."""
        return f"{self.prefix}/availability"

    @property
    def birth(self) -> str:
        """Where Home Assistant says that it has started."""
        return f"{self.discovery}/status"

    def online(self, device: str) -> str:
        """Return whether a device is online."""
        return f"{self.prefix}/{slug(device)}/availability"

    def state(self, entity: EntityDeclaration) -> str:
        """Return the state of an entity."""
        return f"{self.prefix}/{entity.object_id}/state"

    def attributes(self, entity: EntityDeclaration) -> str:
        """Return how the last command of an entity has ended."""
        return f"{self.prefix}/{entity.object_id}/attributes"

    def commands(self, entity: EntityDeclaration) -> str:
        """Return where Home Assistant commands an entity."""
        return f"{self.prefix}/{entity.object_id}/set"

    def config(self, entity: EntityDeclaration) -> str:
        """Return where Home Assistant reads what an entity is."""
        return f"{self.discovery}/{entity.kind}/{entity.object_id}/config"


def discovery(entity: EntityDeclaration, topics: Topics, device_name: str) -> dict[str, object]:
    """Return the discovery message of an entity; `device_name` is the name of its device for people."""
    described: dict[str, object] = {
        "name": (entity.name or entity.field) if entity.kind == "sensor" else None,
        "unique_id": f"{slug(topics.prefix)}_{entity.object_id}",
        "device": {"identifiers": [f"{slug(topics.prefix)}_{slug(entity.device)}"], "name": device_name},
        "origin": {"name": "duly", "sw_version": version("duly")},
        "availability": [{"topic": topics.availability}, {"topic": topics.online(entity.device)}],
        "availability_mode": "all",
        "state_topic": topics.state(entity),
        "qos": 1,
    }
    more = {
        "device_class": entity.device_class,
        "state_class": entity.state_class,
        "unit_of_measurement": entity.unit,
    }
    described |= {word: value for word, value in more.items() if value}
    if entity.kind == "sensor":
        return described
    described |= {
        "command_topic": topics.commands(entity),
        "json_attributes_topic": topics.attributes(entity),
        "optimistic": False,
    }
    if entity.kind == "light":
        return described | {
            "schema": "template",
            "command_on_template": '{"command": "ON"' + entity.light.wishes() + ", " + _AT + "}",
            "command_off_template": '{"command": "OFF", ' + _AT + "}",
            **(entity.light.templates() if entity.light else {"state_template": "{{ value }}"}),
        }
    return described | {"command_template": _COMMAND}


def read_command(
    entity: EntityDeclaration, payload: bytes, now: int, expires: float = EXPIRES
) -> HomeAssistantCommand:
    """Return the command in a message; raises `Malformed`, or `Expired` if it was given too long ago.

    >>> lock = EntityDeclaration(device="lock-1", kind="lock")
    >>> read_command(lock, b'{"command": "UNLOCK", "at": 5.25}', now=6_000_000).data
    {'open': True}
    """
    try:
        given = _given.decode(payload)
    except msgspec.DecodeError as problem:
        raise Malformed(
            f"not a command of Home Assistant: {problem}; it needs Home Assistant 2024.11 or later"
        ) from None
    value = _PAYLOADS.get(entity.kind, {}).get(given.command)
    if value is None:
        raise Malformed(f"a {entity.kind} does not know the command {given.command[:60]!r}")
    at = int(given.at * SECOND) if 0 <= given.at < 1e11 else -1
    if at < 0:
        raise Malformed(f"{given.at} is not a time in seconds since 1970")
    left = expires - (now - at) / SECOND
    if left <= 0:
        raise Expired(
            f"{given.command} was given {(now - at) / SECOND:.0f} s ago, and is valid for {expires:g} s"
        )
    digest = blake2b(b"%b\0%b" % (entity.object_id.encode(), payload), digest_size=10).digest()
    return HomeAssistantCommand(
        given.command,
        {entity.read_from: value, **entity.light.data(given)},
        uuid7(at, int.from_bytes(digest, "big")),
        min(at, now) / SECOND + expires,
        at,
    )


def check_entities(entities: Sequence[EntityDeclaration]) -> Sequence[EntityDeclaration]:
    """Return these entities, if no two of them have the same topics; raises `Malformed` otherwise."""
    if not entities:
        raise Malformed("no device is named for Home Assistant; name one with --lock, --light or --switch")
    seen: dict[str, EntityDeclaration] = {}
    for entity in entities:
        if entity.object_id in seen:
            raise Malformed(f"{entity.device} is declared twice as {entity.field or entity.kind}")
        seen[entity.object_id] = entity
    return entities


def device_names(entities: Sequence[EntityDeclaration]) -> Mapping[str, str]:
    """Return the name of each device for people: that of its first entity that is not a sensor, if it has
    one."""
    names = {entity.device: entity.device for entity in entities}
    for entity in reversed(entities):
        if entity.name and entity.kind != "sensor":
            names[entity.device] = entity.name
    return names


def slug(text: str) -> str:
    """Return a text as a level of a topic and an id of Home Assistant: letters, digits, _ and -. Other
    characters become _, and a digest keeps two such names apart.

    >>> slug("lock-1"), slug("Tür 1") == slug("Tur 1")
    ('lock-1', False)
    """
    safe = _UNSAFE.sub("_", text)
    return safe if safe == text else f"{safe}_{blake2b(text.encode(), digest_size=3).hexdigest()}"
