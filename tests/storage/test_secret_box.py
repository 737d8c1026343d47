"""An encrypted value opens with its key, at its place, and not otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duly.errors import Malformed, SecretKeyMissing
from duly.storage import open_ledger
from duly.storage.secret_box import FILE, SecretBox, is_encrypted, make_key, open_box, read_key

KEY = b"k" * 32


def test_what_is_sealed_opens_at_its_place_and_shows_nothing_of_itself() -> None:
    box = SecretBox(KEY)
    encrypted = box.encrypt("hunter2", "addresses/home")
    assert is_encrypted(encrypted)
    assert "hunter2" not in encrypted
    assert SecretBox(KEY).decrypt(encrypted, "addresses/home") == "hunter2"
    assert box.encrypt("hunter2", "addresses/home") != encrypted, "the same secret twice cannot be told"


def test_it_opens_nowhere_else_with_no_other_key_and_not_when_it_was_changed() -> None:
    box = SecretBox(KEY)
    encrypted = box.encrypt("hunter2", "addresses/home")
    with pytest.raises(SecretKeyMissing, match="belongs to another ledger"):
        box.decrypt(encrypted, "addresses/office")
    with pytest.raises(SecretKeyMissing, match="but this program has key"):
        SecretBox(b"x" * 32).decrypt(encrypted, "addresses/home")
    for at in range(encrypted.rindex(":") + 1, len(encrypted) - 2):
        changed = encrypted[:at] + ("A" if encrypted[at] != "A" else "B") + encrypted[at + 1 :]
        with pytest.raises(SecretKeyMissing):
            box.decrypt(changed, "addresses/home")


def test_what_was_never_sealed_is_read_as_it_is() -> None:
    assert SecretBox(KEY).decrypt('{"url":"console:"}', "addresses/x") == '{"url":"console:"}'


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / FILE
    make_key(path)
    first = path.read_bytes()
    make_key(path)
    assert path.read_bytes() == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_key_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("password")
    with pytest.raises(Malformed, match="too short"):
        read_key(tmp_path / "short")
    with pytest.raises(Malformed, match="cannot be read"):
        read_key(tmp_path / "nowhere")


async def test_who_only_reads_makes_no_key_and_claims_no_ledger(tmp_path: Path) -> None:
    async with await open_ledger("memory:") as ledger:
        assert await open_box(ledger, tmp_path, reading=True) is None
        assert await open_box(ledger, tmp_path, make=False) is None
        assert not (tmp_path / FILE).exists()
        box = await open_box(ledger, tmp_path)
        assert box is not None
        again = await open_box(ledger, tmp_path, reading=True)
        assert again is not None
        assert again.id == box.id


async def test_of_two_that_begin_at_once_the_slower_keeps_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_ledger("memory:") as ledger:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        write = ledger.write

        async def late(*writes: Any) -> object:
            monkeypatch.setattr(ledger, "write", write)
            assert await open_box(ledger, tmp_path / "one") is not None
            return await write(*writes)

        monkeypatch.setattr(ledger, "write", late)
        with pytest.raises(SecretKeyMissing, match=r"copy secret\.key"):
            await open_box(ledger, tmp_path / "two")
        assert not (tmp_path / "two" / FILE).exists()
