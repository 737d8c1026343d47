"""Conformance vectors: inputs, and the outcomes that every implementation of the protocol must come to.

They are JSON files beside this one; the README there says what is in them. `tools/vectors` writes them from
the core.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final, TypeAlias

import msgspec

NAMES: Final = ("ids", "windows", "fingerprints", "lanes", "signatures", "contents", "codes", "media")

VectorCase: TypeAlias = dict[str, Any]
"""One case: its input and what comes of it, by name."""


def read(name: str) -> dict[str, list[VectorCase]]:
    """Return the cases of one file, by what they are about.

    >>> read("codes")["server"][5]["name"]
    'duplicate'
    """
    text = files(__name__).joinpath(f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=_VectorFile).cases


class _VectorFile(msgspec.Struct):
    about: str
    version: int
    cases: dict[str, list[VectorCase]]
