"""A hub for tests that can lose its disk and come back from a backup."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from duly.server.ledger_backups import back_up, restore
from duly.settings import Settings
from tests.local_hub import LocalHub

LEDGER: Final = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock")


class RestorableHub(LocalHub):
    """A hub that can lose its disk and come back from a backup."""

    @property
    def data(self) -> Settings:
        return Settings(data=str(self.folder))

    async def back_up(self, name: str = "backup.db") -> Path:
        path = self.folder.parent / name
        await back_up(self.data, path)
        return path

    async def come_back(
        self, backup: Path, first: Callable[[], Awaitable[None]] | None = None, skew: int | None = 0
    ) -> None:
        """Lose the disk, restore the backup, and start; `first` happens before clients are back. A `skew` of
        None is the usual one, five minutes."""
        port = self.port
        await self.stop()
        for name in LEDGER:
            (self.folder / name).unlink(missing_ok=True)
        await restore(self.data, backup, skew=skew)
        if first is not None:
            self.port = 0
            await self.start()
            await first()
            await self.stop()
            self.port = port
        await self.start()
