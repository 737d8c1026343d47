"""Limits: a text is refused in a time that grows with its size, not with the square of it."""

from __future__ import annotations

import pytest

from duly.errors import Malformed
from duly.wire import frames, limits
from tests.stopwatch import Stopwatch

MANY_BRACKETS = b'{"seq_id":"1_0","data":' + b"[]" * limits.DEPTH_LIMIT


@pytest.mark.parametrize(
    "rest",
    [b'"' + rb"\"" * 10_000, b'"' * 20_000, rb"\"" * 10_000, b'"seq_id":"' * 2_000, b'"' + b"\\" * 20_001],
)
def test_strings_that_are_not_closed_are_read_once(rest: bytes) -> None:
    took = Stopwatch()
    with pytest.raises(Malformed):
        frames.decode(MANY_BRACKETS + rest)
    frames.seq_id_in(MANY_BRACKETS + rest)
    assert took.seconds < 0.5


@pytest.mark.parametrize("string", [b'"]"', rb'"\"["', rb'"\\"', b'"\\\n["'])
def test_brackets_in_strings_do_not_count(string: bytes) -> None:
    deep = b"[" * limits.DEPTH_LIMIT + string + b"]" * limits.DEPTH_LIMIT
    limits.check(deep, "a frame")
    with pytest.raises(Malformed, match="nested deeper"):
        limits.check(b"[" + deep + b"]", "a frame")
