"""For trying out: a file that notices are appended to, one JSON line each; or the console."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from duly.apps.alerts.channels.channel import Notification
from duly.core.fanout.plan import DoubtPolicy
from duly.core.printable import printable, printable_lines
from duly.errors import NotSent


class LocalChannel:
    """A file, or standard output if it has no path."""

    def __init__(self, path: str, doubt: DoubtPolicy) -> None:
        self.doubt = doubt
        self._path = path

    async def send(self, notice: Notification) -> None:
        if not self._path:
            # Whoever reported the alert wrote most of this.
            sys.stdout.write(f"{printable(notice.title)}\n{printable_lines(notice.text)}\n")
            sys.stdout.flush()
            return
        shown = {"id": notice.id, "title": notice.title, "text": notice.text, **notice.body}
        line = msgspec.json.encode(shown) + b"\n"
        try:
            await asyncio.to_thread(self._append, line)
        except OSError as problem:
            raise NotSent(f"the file cannot be written: {problem.strerror}") from None

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)

    async def close(self) -> None:
        pass
