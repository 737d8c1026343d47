"""Brightness and colours of a light: what Home Assistant is told of them, and how its wishes are read.

The laws. To the device a brightness is a whole number up to the light's own maximum, a colour is `[red,
green, blue]`, each 0 to 255, and a colour temperature is in kelvin. To Home Assistant a brightness is 1 to
255, and a colour temperature is in mireds, which all of its versions understand. A light shows a colour or a
colour temperature, never both. What a device says that is none of these is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from duly.errors import Malformed

FULL: Final = 255
"""The greatest brightness of Home Assistant."""
_MIRED: Final = 1_000_000
"""Kelvin times mired."""
_Byte = Annotated[int, Meta(ge=0, le=FULL)]
_Color = tuple[_Byte, _Byte, _Byte]


class LightWish(Struct, frozen=True, omit_defaults=True):
    """The settings in a command of Home Assistant besides ON."""

    brightness: _Byte | None = None
    color: _Color | None = None
    color_temp: Annotated[int, Meta(ge=1, le=_MIRED)] | None = None


class LightFields(Struct, frozen=True):
    """The fields of a device's data for brightness, colour and colour temperature; empty: it has none."""

    brightness: str = ""
    color: str = ""
    color_temp: str = ""
    most: int = FULL
    """the device's greatest brightness"""

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def names(self) -> frozenset[str]:
        """The fields that the light has."""
        return frozenset((self.brightness, self.color, self.color_temp)) - {""}

    def templates(self) -> dict[str, str]:
        """Return the templates by which Home Assistant reads the state."""
        found = {"state_template": "{{ value_json.state }}"}
        if self.brightness:
            found["brightness_template"] = "{{ value_json.brightness }}"
        if self.color:
            for place, name in enumerate(("red", "green", "blue")):
                value = f"value_json.color[{place}] if value_json.color else None"
                found[f"{name}_template"] = "{{ " + value + " }}"
        if self.color_temp:
            found["color_temp_template"] = "{{ value_json.color_temp }}"
        return found

    def wishes(self) -> str:
        """Return the part of the template for ON that says how bright and in which colour."""
        parts = ""
        if self.brightness:
            parts += '{% if brightness is defined %}, "brightness": {{ brightness }}{% endif %}'
        if self.color:
            parts += '{% if red is defined %}, "color": [{{ red }}, {{ green }}, {{ blue }}]{% endif %}'
        if self.color_temp:
            parts += '{% if color_temp is defined %}, "color_temp": {{ color_temp }}{% endif %}'
        return parts

    def data(self, wish: LightWish) -> dict[str, object]:
        """Return what the device is told; raises `Malformed` for a wish that it has no field for."""
        said: dict[str, object] = {}
        for word, field in (
            ("brightness", self.brightness),
            ("color", self.color),
            ("color_temp", self.color_temp),
        ):
            if getattr(wish, word) is not None and not field:
                raise Malformed(f"this light has no {word}; name the field of its device: {word} = …")
        if wish.brightness is not None:
            level = round(wish.brightness * self.most / FULL)
            said[self.brightness] = max(level, 1) if wish.brightness else 0
        if wish.color is not None:
            said[self.color] = list(wish.color)
        if wish.color_temp is not None:
            said[self.color_temp] = round(_MIRED / wish.color_temp)
        return said

    def learned(self, known: LightWish, data: Mapping[str, object]) -> LightWish:
        """Return what is known of a light after this report of its device. If it has both a colour and a
        colour temperature, the light stays in the mode that it was in."""
        brightness, color, color_temp = known.brightness, known.color, known.color_temp
        said = self.names & data.keys()
        if self.brightness in said:
            brightness = self._brightness(data[self.brightness])
        if self.color_temp in said:
            color_temp = _mireds(data[self.color_temp])
        if self.color in said:
            color = _color(data[self.color])
        if color is not None and color_temp is not None:
            both = {self.color, self.color_temp} <= said
            if known.color_temp is not None if both else self.color_temp in said:
                color = None
            else:
                color_temp = None
        return LightWish(brightness, color, color_temp)

    def forgotten(self, known: LightWish, data: Mapping[str, object]) -> LightWish:
        """Return what is still known after a command with this data whose outcome is unknown."""
        told = self.names & data.keys()
        coloured = self.color in told or self.color_temp in told
        return LightWish(
            None if self.brightness in told else known.brightness,
            None if coloured else known.color,
            None if coloured else known.color_temp,
        )

    def _brightness(self, value: object) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= self.most:
            return None
        return max(round(value * FULL / self.most), 1) if value else 0


def show(state: str, known: LightWish) -> str:
    """Return the state of a light as its templates read it. Home Assistant takes the brightness 0 for
    none."""
    shown = {
        "state": state,
        "brightness": known.brightness or 0,
        "color": known.color,
        "color_temp": known.color_temp,
    }
    return msgspec.json.encode(shown).decode()


def _color(value: object) -> _Color | None:
    try:
        color: _Color = msgspec.convert(value, _Color)
    except msgspec.ValidationError:
        return None
    return color


def _mireds(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MIRED:
        return None
    return round(_MIRED / value)
