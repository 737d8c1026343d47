"""What Home Assistant is told of an entity, and how its commands are read. The messages here were checked
with the schemas of Home Assistant 2025.4 (docs/adr/0063)."""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.ids import uuid7_time
from duly.core.units import SECOND
from duly.errors import Expired, Malformed, SenderError
from duly.integrations.home_assistant.entities import (
    UNKNOWN,
    EntityDeclaration,
    Topics,
    check_entities,
    device_names,
    discovery,
    read_command,
    slug,
)

LOCK = EntityDeclaration(device="lock-1", kind="lock", name="Front door")
LIGHT = EntityDeclaration(device="lamp", kind="light")
SWITCH = EntityDeclaration(device="plug", kind="switch", device_class="outlet")
BATTERY = EntityDeclaration(
    device="lock-1",
    kind="sensor",
    field="battery",
    unit="%",
    device_class="battery",
    state_class="measurement",
)
NOW = 1_700_000_000 * SECOND


def common(entity: str, device: str, name: str) -> dict[str, Any]:
    return {
        "unique_id": f"duly_{entity}",
        "device": {"identifiers": [f"duly_{device}"], "name": name},
        "availability": [{"topic": "duly/availability"}, {"topic": f"duly/{device}/availability"}],
        "availability_mode": "all",
        "state_topic": f"duly/{entity}/state",
        "qos": 1,
    }


def commanded(entity: str) -> dict[str, Any]:
    return {
        "name": None,
        "command_topic": f"duly/{entity}/set",
        "json_attributes_topic": f"duly/{entity}/attributes",
        "optimistic": False,
    }


TIMED = '{"command": "{{ value }}", "at": {{ now().timestamp() }}}'


@pytest.mark.parametrize(
    ("entity", "topic", "message"),
    [
        (
            LOCK,
            "homeassistant/lock/lock-1_lock/config",
            common("lock-1_lock", "lock-1", "Front door")
            | commanded("lock-1_lock")
            | {"command_template": TIMED},
        ),
        (
            LIGHT,
            "homeassistant/light/lamp_light/config",
            common("lamp_light", "lamp", "lamp")
            | commanded("lamp_light")
            | {
                "schema": "template",
                "command_on_template": TIMED.replace("{{ value }}", "ON"),
                "command_off_template": TIMED.replace("{{ value }}", "OFF"),
                "state_template": "{{ value }}",
            },
        ),
        (
            SWITCH,
            "homeassistant/switch/plug_switch/config",
            common("plug_switch", "plug", "plug")
            | commanded("plug_switch")
            | {"command_template": TIMED, "device_class": "outlet"},
        ),
        (
            BATTERY,
            "homeassistant/sensor/lock-1_battery/config",
            common("lock-1_battery", "lock-1", "Front door")
            | {
                "name": "battery",
                "device_class": "battery",
                "state_class": "measurement",
                "unit_of_measurement": "%",
            },
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, EntityDeclaration) else "",
)
def test_the_discovery_message_of_each_kind(
    entity: EntityDeclaration, topic: str, message: dict[str, Any]
) -> None:
    names = device_names([BATTERY, LOCK, LIGHT, SWITCH])
    found = discovery(entity, Topics(), names[entity.device])
    assert found.pop("origin") == {"name": "duly", "sw_version": version("duly")}
    assert (Topics().config(entity), found) == (topic, message)


def given_at(word: str, at: float | None) -> bytes:
    return json.dumps({"command": word, "at": at}).encode()


def test_a_command_that_comes_twice_is_the_same_command() -> None:
    payload = given_at("UNLOCK", NOW / SECOND - 5)
    first, again = (read_command(LOCK, payload, NOW + later) for later in (0, 3 * SECOND))
    assert first.id == again.id
    assert uuid7_time(first.id) == NOW - 5 * SECOND
    assert first == again
    assert (first.data, first.expires_at) == ({"open": True}, NOW / SECOND + 25)


def test_commands_of_two_moments_or_entities_are_two() -> None:
    at = NOW / SECOND
    ids = {
        read_command(LOCK, given_at("LOCK", at), NOW).id,
        read_command(LOCK, given_at("UNLOCK", at), NOW).id,
        read_command(LOCK, given_at("LOCK", at + 0.000_01), NOW).id,
        read_command(LIGHT, given_at("ON", at), NOW).id,
        read_command(SWITCH, given_at("ON", at), NOW).id,
    }
    assert len(ids) == 5


def test_a_command_that_was_given_long_ago_is_not_carried_out() -> None:
    with pytest.raises(Expired, match="31 s ago, and is valid for 30 s"):
        read_command(LOCK, given_at("UNLOCK", NOW / SECOND - 31), NOW)
    assert read_command(LOCK, given_at("UNLOCK", NOW / SECOND + 3600), NOW).expires_at == NOW / SECOND + 30


WORDS = st.sampled_from(["LOCK", "UNLOCK", "", "lock"])
TIMES = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.none() | st.booleans()


@given(st.binary(max_size=20) | st.builds(given_at, WORDS, TIMES))
def test_what_is_no_command_is_refused_in_words(payload: bytes) -> None:
    with contextlib.suppress(SenderError):  # no other error, whatever the message is
        assert read_command(LOCK, payload, NOW).word in ("LOCK", "UNLOCK")


@pytest.mark.parametrize(
    ("entity", "value", "state"),
    [
        (LOCK, True, "UNLOCKED"),
        (LOCK, False, "LOCKED"),
        (LOCK, "yes", UNKNOWN),
        (LIGHT, True, "on"),
        (SWITCH, False, "OFF"),
        (SWITCH, None, UNKNOWN),
        (BATTERY, 81, "81"),
        (BATTERY, [81], UNKNOWN),
    ],
)
def test_states(entity: EntityDeclaration, value: object, state: str) -> None:
    assert entity.state_of(value) == state


def test_declarations_that_cannot_be_meant() -> None:
    with pytest.raises(Malformed, match="name it: field"):
        EntityDeclaration(device="lock-1", kind="sensor")
    with pytest.raises(Malformed, match="takes no commands"):
        EntityDeclaration(device="lock-1", kind="sensor", field="battery", command="query")
    with pytest.raises(Malformed, match="name of its device"):
        EntityDeclaration(device="", kind="lock")
    with pytest.raises(Malformed, match="declared twice"):
        check_entities([LOCK, LOCK])
    with pytest.raises(Malformed, match="no device is named"):
        check_entities([])
    for prefix in ("", "a/+", "$SYS"):
        with pytest.raises(Malformed, match="cannot begin topics"):
            Topics(prefix)


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_names_never_share_a_topic(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)
    assert slug(one).replace("_", "").replace("-", "").isalnum() or set(slug(one)) <= set("_-")
    assert slug(one).isascii()
