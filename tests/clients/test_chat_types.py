"""News of a chat are read from frames; what a newer hub may say does not end the reader."""

from __future__ import annotations

import pytest

from duly.clients.chat_types import Receipt, receipt_of
from duly.errors import Malformed
from duly.wire.frames import Frame, dump


def receipt(data: object) -> Frame:
    return Frame("receipt", conv="#team", n=7, from_="bob", data=dump(data))


def test_a_receipt_says_who_has_a_line_or_has_read_it() -> None:
    assert receipt_of(receipt({"state": "read"})) == Receipt("#team", 7, "bob", "read")


@pytest.mark.parametrize("data", [{"state": "printed"}, {}, ["read"], None])
def test_a_receipt_that_is_not_understood_is_malformed(data: object) -> None:
    """Of a sender, so that the reader of a connection passes it over."""
    with pytest.raises(Malformed, match="a receipt says"):
        receipt_of(receipt(data))
