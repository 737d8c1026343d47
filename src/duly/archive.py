"""The archive: what the ledger forgets about alerts, as compressed JSON lines, a file a month.

The laws. A line is on the disk before its alert is forgotten; a crash in between leaves the same line twice,
and never none. Files are only appended to (a gzip file may have many parts), so nothing written is ever at
risk, and `zcat` reads them all. A file goes when its whole month is older than the archive is kept.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import time
from calendar import timegm
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from duly.core.units import DAY, SECOND

MONTH: Final = 31 * DAY
_NAME: Final = re.compile(r"alerts-(\d{4})-(\d{2})\.jsonl\.gz")


class Archive:
    """One folder's; `keep` is how long its files stay (µs), 0: nothing is archived."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def add(self, alerts: Iterable[object], now: int) -> None:
        """Write them down, one line each; returns when they are on the disk."""
        lines = b"".join(msgspec.json.encode(alert) + b"\n" for alert in alerts)
        if lines and self._keep:
            await asyncio.to_thread(self._append, lines, now)

    def _append(self, lines: bytes, now: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        month = time.strftime("%Y-%m", time.gmtime(now / SECOND))
        fd = os.open(self._folder / f"alerts-{month}.jsonl.gz", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        before = os.fstat(fd).st_size
        try:
            left = memoryview(gzip.compress(lines))
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, before)  # half a part would make all that follow unreadable
            raise
        finally:
            os.close(fd)

    def old(self, now: int) -> list[Path]:
        """The files that need not be kept any longer."""
        found: list[Path] = []
        for path in sorted(self._folder.glob("alerts-*.jsonl.gz")) if self._folder.is_dir() else []:
            named = _NAME.fullmatch(path.name)
            if named is not None:
                begin = timegm((int(named[1]), int(named[2]), 1, 0, 0, 0)) * SECOND
                if begin + MONTH + self._keep < now:
                    found.append(path)
        return found

    async def sweep(self, now: int) -> list[str]:
        """Remove what is too old; the names of what is gone."""
        old = self.old(now)
        for path in old:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        return [path.name for path in old]
