"""Brightness and colours of lights: what Home Assistant is told, and what its commands mean to the device.
The messages and templates here were tried with Home Assistant 2025.4 (docs/adr/0084)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.units import SECOND
from duly.errors import Malformed
from duly.integrations.home_assistant.entities import EntityDeclaration, Topics, discovery, read_command
from duly.integrations.home_assistant.lights import LightFields, LightWish

NOW = 1_700_000_000 * SECOND
LAMP = EntityDeclaration(
    device="lamp", kind="light", brightness="level", brightness_max=100, color="rgb", color_temp="kelvin"
)
DIMMER = EntityDeclaration(device="dimmer", kind="light", brightness="level")


def commanded(entity: EntityDeclaration, **more: Any) -> dict[str, object]:
    said = {"command": "ON", "at": NOW / SECOND, **more}
    return read_command(entity, json.dumps(said).encode(), NOW).data


def test_the_discovery_message_names_what_a_light_has() -> None:
    lamp, dimmer = (discovery(entity, Topics(), entity.device) for entity in (LAMP, DIMMER))
    assert lamp["schema"] == "template"
    assert {"brightness_template", "red_template", "blue_template", "color_temp_template"} <= lamp.keys()
    assert "red_template" not in dimmer
    assert "color_temp_template" not in dimmer
    assert dimmer["state_template"] == "{{ value_json.state }}"
    assert dimmer["command_on_template"] == (
        '{"command": "ON"{% if brightness is defined %}, "brightness": {{ brightness }}{% endif %}, '
        '"at": {{ now().timestamp() }}}'
    )


def test_a_wish_becomes_the_fields_of_the_device() -> None:
    assert commanded(LAMP) == {"on": True}
    assert commanded(LAMP, brightness=255) == {"on": True, "level": 100}
    assert commanded(LAMP, brightness=1) == {"on": True, "level": 1}, "the darkest is not off"
    assert commanded(LAMP, color=[255, 0, 10]) == {"on": True, "rgb": [255, 0, 10]}
    assert commanded(LAMP, color_temp=250) == {"on": True, "kelvin": 4000}
    assert commanded(DIMMER, brightness=128) == {"on": True, "level": 128}


@pytest.mark.parametrize(
    "more",
    [{"brightness": 256}, {"brightness": -1}, {"brightness": "full"}, {"color": [1, 2]}, {"color_temp": 0}],
    ids=str,
)
def test_a_wish_that_no_light_has_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        commanded(LAMP, **more)


def test_a_wish_that_this_light_has_no_field_for_is_refused() -> None:
    with pytest.raises(Malformed, match="no color;"):
        commanded(DIMMER, color=[1, 2, 3])


def test_the_state_shows_what_the_device_says() -> None:
    said = LAMP.light.learned(LightWish(), {"on": True, "level": 50, "rgb": [1, 2, 3]})
    assert json.loads(LAMP.state_of(True, said)) == {
        "state": "on",
        "brightness": 128,
        "color": [1, 2, 3],
        "color_temp": None,
    }
    warm = LAMP.light.learned(said, {"kelvin": 4000})
    assert (warm.color, warm.color_temp, warm.brightness) == (None, 250, 128), "a colour or a temperature"
    assert LAMP.light.learned(warm, {"rgb": [9, 9, 9]}).color_temp is None
    assert json.loads(LAMP.state_of(None))["state"] == "None"


def test_a_report_of_both_changes_neither_into_the_other() -> None:
    """A lamp that reports all its fields was shown in colour after its colour temperature had been set."""
    both = {"on": True, "rgb": [1, 2, 3], "kelvin": 4000}
    assert LAMP.light.learned(LightWish(color_temp=250), both) == LightWish(color_temp=250)
    assert LAMP.light.learned(LightWish(color=(9, 9, 9)), both) == LightWish(color=(1, 2, 3))
    assert LAMP.light.learned(LightWish(), both) == LightWish(color=(1, 2, 3))
    assert LAMP.light.learned(LightWish(color_temp=250), both | {"kelvin": None}).color == (1, 2, 3)
    assert LAMP.light.learned(LightWish(color=(9, 9, 9)), both | {"rgb": None}).color_temp == 250


@pytest.mark.parametrize("value", [True, "bright", -1, 101, None, [1]], ids=repr)
def test_a_brightness_that_cannot_be_is_not_known(value: object) -> None:
    assert LAMP.light.learned(LightWish(brightness=7), {"level": value}).brightness is None


def test_what_a_command_without_an_end_would_have_set_is_not_known() -> None:
    known = LightWish(brightness=10, color=(1, 2, 3))
    assert LAMP.light.forgotten(known, {"on": True, "level": 4}) == LightWish(color=(1, 2, 3))
    assert LAMP.light.forgotten(known, {"on": True, "kelvin": 4000}) == LightWish(brightness=10)


@given(brightness=st.integers(0, 255), most=st.integers(1, 100_000))
def test_on_stays_on_and_the_full_brightness_is_the_device_s_own(brightness: int, most: int) -> None:
    fields = LightFields(brightness="level", most=most)
    level = fields.data(LightWish(brightness=brightness))["level"]
    assert isinstance(level, int)
    assert 0 <= level <= most
    assert (level > 0) == (brightness > 0)
    assert fields.data(LightWish(brightness=255))["level"] == most
    back = fields.learned(LightWish(), {"level": level}).brightness
    assert back is not None
    assert abs(back - brightness) <= 255 / most + 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "switch", "brightness": "level"}, "only a light"),
        ({"kind": "light", "brightness": "level", "brightness_max": 0}, "1 or more"),
        ({"kind": "light", "brightness": "level", "color": "level"}, "cannot be the same field"),
        ({"kind": "light", "brightness": "on"}, "cannot be the same field"),
    ],
)
def test_what_cannot_be_declared(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        EntityDeclaration(device="lamp", **fields)
