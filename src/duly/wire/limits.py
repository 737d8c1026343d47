"""The limits of every dialect, checked before a text is decoded: size, nesting, and UTF-8."""

from __future__ import annotations

import re
from typing import Final

from duly.errors import Malformed, TooLarge

SIZE_LIMIT: Final = 256 * 1024
DEPTH_LIMIT: Final = 32
FLAT: Final = 2 * DEPTH_LIMIT
"""A text of this many bytes cannot exceed the depth limit, since every bracket is closed."""

STRINGS: Final = rb'"(?:[^"\\]++|\\.)*+"?'
"""Matches a JSON string, and one that is not closed to the end of the text. Otherwise a search would try each
escaped quote in it as the beginning of a string, and take minutes for one frame."""
_BRACKETS: Final = re.compile(STRINGS + rb"|[\[\]{}]", re.DOTALL)


def check(text: bytes, what: str) -> None:
    """Refuse a text of this kind (`what`: "a frame") that is too large, too deep or not UTF-8."""
    size = len(text)
    if size > SIZE_LIMIT:
        raise TooLarge(f"{what} of {size} bytes; the limit is {SIZE_LIMIT}, send it in parts")
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as problem:
            raise Malformed(f"{what} must be UTF-8; byte {problem.start} is not") from None
    if size > FLAT and text.count(b"{") + text.count(b"[") > DEPTH_LIMIT:
        check_depth(text, what)


def check_depth(text: bytes, what: str) -> None:
    """Refuse a text whose brackets are nested too deeply."""
    # Most texts have fewer brackets than the limit, and so cannot exceed it.
    if text.count(b"{") + text.count(b"[") <= DEPTH_LIMIT:
        return
    depth = 0
    for token in _BRACKETS.finditer(text):
        match token[0]:
            case b"{" | b"[":
                depth += 1
                if depth > DEPTH_LIMIT:
                    raise Malformed(f"{what} nested deeper than {DEPTH_LIMIT} levels")
            case b"}" | b"]":
                depth -= 1
            case _:
                pass
