"""What can be set, and where: flags before environment before duly.toml before defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from duly.core.monitor.signals import SentinelPolicy
from duly.errors import Malformed
from duly.settings import load, section


def file(folder: Path, text: str) -> Path:
    (folder / "duly.toml").write_text(text)
    return folder


def test_a_section_has_the_same_precedence_as_the_hubs_settings(tmp_path: Path) -> None:
    folder = file(tmp_path, "port = 7000\n[sentinel]\ncountdown = 10\ndebounce = 20\ncooldown = 30\n")
    policy = section(
        "sentinel", SentinelPolicy, {"cooldown": 1.0, "keep": None}, {"DULY_SENTINEL_DEBOUNCE": "2"}, folder
    )
    assert (policy.countdown, policy.debounce, policy.cooldown) == (10, 2, 1)
    assert policy.keep == SentinelPolicy().keep
    assert load({}, {}, folder).port == 7000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sentinel]\ncountdwon = 10\n", "countdwon"),
        ("[sentinel]\nper_hour = 0\n", "at least 1 signal"),
        ("[sentinel]\ncountdown = 'soon'\n", "countdown"),
        ("sentinel = 3\n", "is a table"),
        ("[sentinel\n", "is not TOML"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        section("sentinel", SentinelPolicy, {}, {}, file(tmp_path, text))


def test_an_unknown_table_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="sentinal"):
        load({}, {}, file(tmp_path, "[sentinal]\ncountdown = 10\n"))
