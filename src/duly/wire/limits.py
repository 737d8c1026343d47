"""The limits of every dialect, checked before a text is decoded: size, nesting, and UTF-8."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Final

from duly.errors import Malformed, TooLarge

SIZE_LIMIT: Final = 256 * 1024
DEPTH_LIMIT: Final = 32
FLAT: Final = 2 * DEPTH_LIMIT
"""A text of this many bytes cannot exceed the depth limit, since every bracket is closed."""

STRINGS: Final = rb'"(?:[^"\\]++|\\.)*+"?'
"""Matches a JSON string, and one that is not closed to the end of the text. Otherwise a search would try each
escaped quote in it as the beginning of a string, and take minutes for one frame."""
_remove_strings: Final = re.compile(STRINGS, re.DOTALL).sub
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_step: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.__getitem__
"""How a bracket changes the depth."""


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
    # A text can be nearly all brackets, so no Python code runs for each.
    brackets = _remove_strings(b"", text).translate(None, _NO_BRACKETS)
    if max(accumulate(map(_step, brackets)), default=0) > DEPTH_LIMIT:
        raise Malformed(f"{what} nested deeper than {DEPTH_LIMIT} levels")
