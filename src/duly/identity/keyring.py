"""Reads and writes a keyring file.

A keyring that other users of the machine can read is not used. It changes as a whole or not at all, and two
processes that change it at once both succeed. Secrets are made here, from the system's randomness, and never
printed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from duly.core.signing import KEY_SIZE, Algorithm, Key, Keyring
from duly.errors import Malformed
from duly.runtime.files import write_private


def new_key(algorithm: Algorithm = Algorithm.ED25519) -> Key:
    """Make a new secret key."""
    return Key(algorithm, secret=secrets.token_bytes(KEY_SIZE))


def load(path: str | Path) -> Keyring:
    """Read a keyring file."""
    return _read(_private(Path(path)))


def edit(path: str | Path, change: Callable[[Keyring | None], Keyring]) -> Keyring:
    """Replace a keyring file by what `change` makes of it; `change` gets None if there is no file yet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not path.exists() or os.fstat(held).st_ino != path.stat().st_ino:
                continue  # another process has just replaced the file
            text = _private(path)
            try:
                ring = change(_read(text) if text else None)
            except BaseException:
                if not text:
                    path.unlink()
                raise
            write_private(path, msgspec.json.format(msgspec.json.encode(ring), indent=2) + b"\n")
            return ring
        finally:
            os.close(held)


def write_key(path: str | Path, key: Key) -> None:
    """Write a secret key to a new file, to be carried to the peer it is shared with."""
    path = Path(path)
    if path.exists():
        raise Malformed(f"{path} exists already; choose another file")
    write_private(path, msgspec.json.encode(key) + b"\n")


def read_key_file(path: str | Path) -> Key:
    """Read a file that `write_key` has written."""
    try:
        return msgspec.json.decode(_private(Path(path)), type=Key)
    except msgspec.DecodeError as problem:
        raise Malformed(f"{path} holds no key: {problem}") from None


def _private(path: Path) -> bytes:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise Malformed(f"{path} holds secrets and other users may read it; run: chmod 600 {path}")
        return path.read_bytes()
    except OSError as problem:
        raise Malformed(
            f"the keys in {path} cannot be read: {problem.strerror}; 'duly keys new' makes some"
        ) from None


def _read(text: bytes) -> Keyring:
    try:
        return msgspec.json.decode(text, type=Keyring)
    except msgspec.DecodeError as problem:
        raise Malformed(f"the file is not a keyring: {problem}") from None
