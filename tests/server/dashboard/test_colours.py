"""The colours of the charts: each can be told from the others and from what is behind it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

CSS = Path(__file__).parents[3] / "src" / "duly" / "server" / "dashboard" / "static" / "app.css"
BLOCKS = re.findall(r"(:root[^{]*){([^}]*)}", CSS.read_text(encoding="utf-8"))
APART = 40.0
"""Two colours that differ by so much (CIE 1976) are called by different names."""
CONTRAST = 3.0
"""What WCAG 2 asks of the parts of a picture."""


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lab(colour: str) -> tuple[float, float, float]:
    red, green, blue = linear(colour)
    white = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in white)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(("theme", "block"), BLOCKS, ids=["light", "dark by system", "dark by choice"])
def test_the_lines_of_a_chart_can_be_told_apart(theme: str, block: str) -> None:
    names = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    lines = {name: names[name] for name in ("c1", "c2", "c3", "c4", "c5", "c6")}
    for (one, first), (other, second) in itertools.combinations(lines.items(), 2):
        apart = sum((a - b) ** 2 for a, b in zip(lab(first), lab(second), strict=True)) ** 0.5
        assert apart >= APART, f"{one} and {other} of {theme} differ by {apart:.0f}"
    for name, colour in lines.items():
        lighter, darker = sorted((luminance(colour), luminance(names["surface"])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= CONTRAST, f"{name} of {theme}"
