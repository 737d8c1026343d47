"""The folder of the embedded broker: one hub at a time uses it, and a broker left over in it is ended first.

The law: the folder is locked for as long as its broker may run, and the lock ends with the hub's process. A
broker that runs although the folder could be locked was left over by a hub that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from duly.errors import BrokerError
from duly.runtime.files import PRIVATE_FILE, private_folder

STOP_WITHIN: Final = 5.0
"""Seconds within which the broker has to end by itself."""

_PROC: Final = Path("/proc")
"""Where Linux shows processes. macOS has no such folder, and `ps` is asked there."""


class _LogFile(RotatingFileHandler):
    """A log file that only its owner may read; a line that does not fit on a full disk is lost without an
    error."""

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
        return os.fdopen(fd, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop the line: a full disk must not end what is logged."""


class BrokerFolder:
    """The folder with the configuration, the store, the log and the pid file of the embedded broker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log: logging.Logger | None = None
        """writes to the log file while it is open"""
        self._lock: int | None = None
        self._pid_file = path / "nats.pid"

    @property
    def configuration(self) -> Path:
        """The file with the configuration of the broker."""
        return self.path / "nats.conf"

    @property
    def client_ids(self) -> Path:
        """The file that says which account each client id belongs to."""
        return self.path / "client_ids.json"

    def claim(self) -> None:
        """Lock the folder; raises `BrokerError` if another process uses it."""
        private_folder(self.path)
        held = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise BrokerError(
                f"another duly runs its broker in {self.path}; stop it, or use another data folder"
            ) from None
        self._lock = held

    def release(self) -> None:
        """Close the log and unlock the folder."""
        if self.log is not None:
            for handler in list(self.log.handlers):
                self.log.removeHandler(handler)
                handler.close()
            self.log = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def note_pid(self, pid: int) -> None:
        """Write the pid file in place: a full disk has no room for a second file."""
        fd = os.open(self._pid_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
        with os.fdopen(fd, "w") as file:
            file.write(f"{pid}\n")

    def forget_pid(self) -> None:
        """Remove the pid file of a broker that has ended."""
        self._pid_file.unlink(missing_ok=True)

    async def end_leftover(self) -> None:
        """End a broker that still runs in this folder: the folder is locked by us, so its hub was killed."""
        try:
            pid = int(self._pid_file.read_text())
        except (OSError, ValueError):
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            if not await self._is_ours(pid):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
            await self._wait_for_end(pid)
        self.forget_pid()

    async def _is_ours(self, pid: int) -> bool:
        """Return whether a process runs our configuration; another program may have got the same pid."""
        configuration = os.fsencode(str(self.configuration))
        if (_PROC / "self").exists():
            try:
                return configuration in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            except OSError:
                return False
        ps = await asyncio.create_subprocess_exec(
            "ps", "-ww", "-o", "command=", "-p", str(pid), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await ps.communicate()
        return configuration in said

    async def _wait_for_end(self, pid: int) -> None:
        """Wait until a process has ended, but no longer than a broker needs for that."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(pidfd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_WITHIN):
                    await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def open_log(self) -> None:
        """Open the log file, which keeps its last few megabytes."""
        handler = _LogFile(
            self.path / "nats.log", maxBytes=4 << 20, backupCount=2, encoding="utf-8", errors="replace"
        )
        self.log = logging.Logger("duly.broker.embedded", logging.INFO)  # not a child of the root logger
        self.log.addHandler(handler)
