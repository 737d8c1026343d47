from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duly.core.signing import Algorithm, Keyring
from duly.errors import Malformed
from duly.identity import keyring as keys
from tests.guard import GUARD


def test_a_keyring_is_written_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "some" / "keys.json"
    own = keys.new_key()
    written = keys.edit(path, lambda ring: Keyring("A", own=own))
    assert keys.load(path) == written
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.edit(path, lambda ring: ring.trust("B", own) if ring else Keyring("?")).name == "A"
    assert [p.name for p in keys.load(path).peers] == ["B"]
    assert [p.name for p in tmp_path.joinpath("some").iterdir()] == ["keys.json"], (
        "nothing is left lying about"
    )


def test_no_two_keys_are_the_same() -> None:
    assert len({keys.new_key(algorithm).kid for algorithm in Algorithm for _ in range(10)}) == 20


def test_secrets_that_others_may_read_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys.edit(path, lambda ring: Keyring("A", own=keys.new_key()))
    path.chmod(0o640)
    with pytest.raises(Malformed, match="chmod 600"):
        keys.load(path)
    with pytest.raises(Malformed, match="chmod 600"):
        keys.edit(path, lambda ring: Keyring("A"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"own":null}',
        b'{"name":"A","own":{"algorithm":"rsa"}}',
        b'{"name":"A","own":{"algorithm":"ed25519","secret":"AAAA"}}',
        b'{"name":"A","own":{"algorithm":"ed25519"}}',
    ],
)
def test_a_file_that_is_no_keyring_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "keys.json"
    path.touch(0o600)
    path.write_bytes(text)
    with pytest.raises(Malformed, match="not a keyring"):
        keys.load(path)
    assert path.read_bytes() == text


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def fail(ring: Keyring | None) -> Keyring:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        keys.edit(path, fail)
    assert not path.exists()
    ring = keys.edit(path, lambda _: Keyring("A"))
    with pytest.raises(ZeroDivisionError):
        keys.edit(path, fail)
    assert keys.load(path) == ring


def test_two_who_change_it_at_once_both_succeed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys.edit(path, lambda _: Keyring("A"))
    program = (
        "import sys; from duly.identity import keyring as keys\n"
        "for n in range(20): keys.edit(sys.argv[1], lambda r: r.trust(f'{sys.argv[2]}{n}', keys.new_key()))"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, path, name]) for name in "xy"]
    assert [one.wait(GUARD) for one in both] == [0, 0]
    assert {p.name for p in keys.load(path).peers} == {f"{name}{n}" for name in "xy" for n in range(20)}


def test_a_shared_secret_travels_in_a_file_of_its_own(tmp_path: Path) -> None:
    path, key = tmp_path / "tiny.key", keys.new_key(Algorithm.HMAC)
    keys.write_key(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.read_key_file(path) == key
    with pytest.raises(Malformed, match="exists already"):
        keys.write_key(path, key)
    path.write_text("nonsense")
    with pytest.raises(Malformed, match="holds no key"):
        keys.read_key_file(path)
