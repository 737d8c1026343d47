"""Limits: a text is refused in a time that grows with its size, not with the square of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from duly.errors import Malformed, TooLarge
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


def test_no_python_code_runs_for_each_bracket() -> None:
    lines: list[int] = []
    for text in (b"[" + b"[]," * 100 + b"]", b"[" + b"[]," * 50_000 + b"]"):
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal count
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            limits.check_depth(text, "a frame")
        finally:
            sys.settrace(before)
        lines.append(count)
    assert lines[0] == lines[1]


@pytest.mark.parametrize("text", [b"", b"[]", b"[1]", b'[{"a":[1]},null,"]"]'])
def test_the_parts_of_an_array_are_its_frames(text: bytes) -> None:
    parts = frames.decode_batch(text)
    assert parts is None if not text else parts == [msgspec.json.encode(one) for one in json.loads(text)]


def test_an_array_is_read_no_further_than_its_limit() -> None:
    full = b"[" + b",".join([b"{}"] * frames.BATCH_LIMIT)
    assert len(frames.decode_batch(full + b"]") or ()) == frames.BATCH_LIMIT
    with pytest.raises(TooLarge, match="more than 1000"):
        frames.decode_batch(full + b",1, and no JSON")
