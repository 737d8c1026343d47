"""The channel for trying out: appends notifications to a file, one JSON line each, or prints them.

Its files are in one folder of the hub's data folder, and an address contains only a file name. Profiles are
set remotely, and most of the text comes from sentinels: with a free path, the holder of an administrator's
token could write lines from a sentinel into any file that the hub's user may write.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Final

import msgspec

from duly.apps.alerts.channels.channel import Channel, Notification
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.core.printable import printable, printable_json, printable_lines
from duly.errors import Declined, InDoubt, Malformed, NotSent
from duly.runtime.files import PRIVATE_FILE, PRIVATE_FOLDER

FOLDER: Final = "notifications"
"""The folder of all files, within the data folder. Its owner may replace it by a link to another folder."""
OUTSIDE: Final = (
    f"a file: address is a file name without a folder, such as file:alerts.jsonl; the hub writes the file in "
    f"the folder '{FOLDER}' of its data folder"
)
NOT_A_FILE: Final = (
    f"what has this name in the folder '{FOLDER}' is a link, or no ordinary file; remove it, or choose "
    "another name"
)
LONGEST_NAME: Final = 200
SECONDS: Final = 15.0
"""The limit for one notification."""


def is_file_name(name: str) -> bool:
    """Return whether this is the plain name of a file, without a folder.

    >>> is_file_name("alerts.jsonl"), is_file_name("../alerts.jsonl")
    (True, False)
    """
    plain = name.isprintable() and not {"/", "\\"} & set(name) and len(name.encode()) <= LONGEST_NAME
    return plain and name not in ("", ".", "..")


def check_file_name(name: str) -> None:
    """Raise `Malformed` unless this is the plain name of a file."""
    if not is_file_name(name):
        raise Malformed(OUTSIDE)


class ConsoleChannel(Channel):
    """Prints notifications on the standard output of the hub."""

    def __init__(self, threads: ChannelThreads) -> None:
        self._threads = threads

    async def send(self, notification: Notification) -> None:
        """Print the notification. Most of its text comes from the sentinel, which may be hostile. The output
        may be a pipe that stands still."""
        text = f"{printable(notification.title)}\n{printable_lines(notification.text)}\n"
        try:
            await self._threads.run("console", SECONDS, lambda: self._print(text))
        except TimeoutError:
            raise InDoubt(f"the output took nothing within {SECONDS:.0f} s") from None

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    async def close(self) -> None:
        """Do nothing: standard output stays open."""


class FileChannel(Channel):
    """Appends to a file in the folder `notifications` of a data folder."""

    def __init__(self, folder: Path | None, name: str, threads: ChannelThreads) -> None:
        check_file_name(name)
        if folder is None:
            raise Declined("this hub has no data folder, so it cannot write files; use another channel")
        self._threads = threads
        self._folder = folder / FOLDER
        self._name = name

    async def send(self, notification: Notification) -> None:
        """Append the notification to the file and flush it."""
        shown = {
            "id": notification.id,
            "title": notification.title,
            "text": notification.text,
            **notification.body,
        }
        # The file is also read in terminals, so control characters are escaped; the JSON stays equivalent.
        line = f"{printable_json(msgspec.json.encode(shown).decode())}\n".encode()
        try:
            await self._threads.run("file", SECONDS, lambda: self._append(line))
        except TimeoutError:
            raise InDoubt(f"the disk did not answer within {SECONDS:.0f} s") from None
        except OSError as problem:
            raise NotSent(f"the file cannot be written: {problem.strerror}") from None

    def _append(self, line: bytes) -> None:
        if not self._folder.is_dir():
            if not self._folder.parent.is_dir():
                raise NotSent("the file cannot be written: there is no data folder; 'duly up' makes it")
            self._folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._folder / self._name, flags, PRIVATE_FILE)
        except OSError as problem:
            if problem.errno in (errno.ELOOP, errno.ENXIO):
                raise Declined(NOT_A_FILE) from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Declined(NOT_A_FILE)
            size = os.fstat(fd).st_size
            # A hub that was killed while writing leaves a partial line.
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" * torn + line)
            os.fsync(fd)
        finally:
            os.close(fd)

    async def close(self) -> None:
        """Do nothing: the file is closed after each notification."""
