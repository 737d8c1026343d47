"""Options are declared once: each has a help text that names its default, and groups become plain options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import typer

from duly.cli import app
from duly.cli.options import Json, LedgerOptions, grouped


def _options(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            yield f"{path} {parameter.opts[0]}", parameter
    for name, inner in getattr(command, "commands", {}).items():
        yield from _options(inner, f"{path} {name}")


@dataclass(frozen=True)
class Colours:
    front: str = "red"
    back: str = "blue"


OPTIONS = dict(_options(typer.main.get_command(app), "duly"))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_says_what_it_is_for_and_what_it_is_by_default(name: str) -> None:
    option = OPTIONS[name]
    assert option.help
    if not option.is_flag and not option.required and option.default in (None, ""):
        assert option.help.endswith("]"), "its default is in brackets at the end of its help"


def test_a_group_becomes_the_options_it_consists_of() -> None:
    seen: list[object] = []

    @grouped
    def paint(name: str, *, colours: Colours, at: LedgerOptions, json: Json = False) -> None:
        seen.append((name, colours, at.folder, json))

    paint(name="wall", front="green", back="blue", folder="x", ledger=None, url=None, token=None, json=True)
    assert seen == [("wall", Colours("green"), "x", True)]
