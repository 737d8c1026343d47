"""The channel for trying out: appends notifications to a file, one JSON line each, or prints them."""

from __future__ import annotations

import asyncio
import os
import stat
import sys

import msgspec

from duly.apps.alerts.channels.channel import Channel, Notification
from duly.core.fanout.plan import DoubtPolicy
from duly.core.printable import printable, printable_json, printable_lines
from duly.errors import NotSent


class LocalChannel(Channel):
    """Writes to a file, or to standard output if it has no path."""

    def __init__(self, path: str, doubt: DoubtPolicy) -> None:
        self.doubt = doubt
        self._path = path

    async def send(self, notification: Notification) -> None:
        """Append the notification to the file and flush it, or print it."""
        if not self._path:
            # Most of this text comes from the sentinel, which may be hostile.
            sys.stdout.write(f"{printable(notification.title)}\n{printable_lines(notification.text)}\n")
            sys.stdout.flush()
            return
        shown = {
            "id": notification.id,
            "title": notification.title,
            "text": notification.text,
            **notification.body,
        }
        # It is read in terminals, too: what would steer one is escaped, and JSON means the same.
        line = f"{printable_json(msgspec.json.encode(shown).decode())}\n".encode()
        try:
            await asyncio.to_thread(self._append, line)
        except OSError as problem:
            raise NotSent(f"the file cannot be written: {problem.strerror}") from None

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(fd).st_size
            # A hub that was killed while it wrote leaves a part of a line.
            torn = size > 0 and stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" * torn + line)
            os.fsync(fd)
        finally:
            os.close(fd)

    async def close(self) -> None:
        """Do nothing: the file is closed after each notification."""
