"""Numbers that JSON allows, and what is not JSON."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from duly.wire import any_json, fd_content, frames
from duly.wire.fields import load_fields


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"1e400", inf),
        (b"-1E400", -inf),
        (b"9" * 5_000, inf),
        (b"18446744073709551616", 2**64),
        (b"-9223372036854775809", -(2**63) - 1),
        (b"-0", 0),
        (b"1e-400", 0.0),
        (b"0." + b"1" * 500, 1 / 9),
    ],
)
def test_every_number_of_json_is_read(text: bytes, value: float) -> None:
    assert any_json.read(text) == frames.load(text) == value
    assert frames.load(b'{"a":[%b,"x"]}' % text) == {"a": [value, "x"]}
    assert load_fields({"a": msgspec.Raw(text)}) == {"a": value}


@pytest.mark.parametrize("value", [inf, [inf, None], {"a": [{"b": -inf}], "c": None}, None, 7])
def test_an_infinity_is_written_so_that_it_is_read_again(value: object) -> None:
    assert any_json.read(any_json.write(value)) == value
    assert fd_content.content_of(value, fd_content.Form.JSON).value == value
    assert frames.load(frames.dump(value)) == value


@pytest.mark.parametrize(
    "text",
    [b"[1e400", b"[1e400,NaN]", b"[1e400,Infinity]", b'[1e400,"\\ud800"]', b'[1e400,"\xff"]', b"1e400 1"],
)
def test_what_is_not_json_is_refused_beside_such_a_number(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        any_json.read(text)
