"""Cursors say nothing to anybody but the hub that encrypted them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import Malformed
from duly.storage.memory import MemoryLedger
from duly.storage.secret_box import SecretBox, is_encrypted
from duly.transports.http.page_cursors import LONGEST, PageCursors, open_cursors

CURSORS = PageCursors(bytes(32))


@given(st.binary(max_size=LONGEST), st.text())
def test_a_cursor_leads_back_to_its_place(place: bytes, reader: str) -> None:
    assert CURSORS.decrypt(reader, CURSORS.encrypt(reader, place)) == place


def test_cursors_are_of_one_length_and_never_the_same() -> None:
    encrypted = [
        CURSORS.encrypt("ann", place) for place in (b"", b"bob\x001700000000000_1", b"x" * LONGEST, b"")
    ]
    assert len({len(one) for one in encrypted}) == 1
    assert len(set(encrypted)) == 4


@given(st.text())
def test_what_was_made_up_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        CURSORS.decrypt("ann", text)


def test_a_cursor_of_another_caller_or_of_another_list_is_refused() -> None:
    encrypted = CURSORS.encrypt("messages/ann", b"place")
    for reader in ("messages/bob", "alerts/ann"):
        with pytest.raises(Malformed):
            CURSORS.decrypt(reader, encrypted)
    garbled = ("A" if encrypted[20] != "A" else "B").join((encrypted[:20], encrypted[21:]))
    with pytest.raises(Malformed):
        CURSORS.decrypt("messages/ann", garbled)


async def test_every_hub_on_a_ledger_reads_the_others() -> None:
    ledger = MemoryLedger()
    box = SecretBox(bytes(32))
    one, other = await open_cursors(ledger, box), await open_cursors(ledger, box)
    assert other.decrypt("ann", one.encrypt("ann", b"place")) == b"place"
    assert is_encrypted((await ledger.item("secrets", "cursors") or b"").decode()), (
        "a copy of the ledger opens none"
    )
