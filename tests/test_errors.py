from __future__ import annotations

import pkgutil
import re
from importlib import import_module

import duly
from duly import errors
from duly.errors import DulyError


def tree_of(kind: type[DulyError]) -> list[type[DulyError]]:
    return [one for child in kind.__subclasses__() for one in (child, *tree_of(child))]


def test_the_whole_tree_is_in_one_file_and_as_drawn() -> None:
    for module in pkgutil.walk_packages(duly.__path__, "duly."):
        if not module.name.startswith(("duly.micropython", "duly.__main__")):
            import_module(module.name)
    found = {one for one in tree_of(DulyError) if one.__module__.startswith("duly.")}
    assert {one.__module__ for one in found} == {"duly.errors"}
    drawn: dict[str, str] = {}
    above: list[str] = []
    for rest, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(rest) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1] if depth else ""
    assert drawn == {"DulyError": ""} | {one.__name__: one.__bases__[0].__name__ for one in found}


def test_every_error_has_a_word_of_its_own_and_says_what_it_is() -> None:
    found: list[type[DulyError]] = [DulyError, *tree_of(DulyError)]
    assert all(one.__doc__ for one in found)
    words = [one.word for one in found if one is not errors.Refused]  # what the hub did is what it is
    assert len(set(words)) == len(words)
