"""A doorbell over PostgreSQL's LISTEN and NOTIFY: no other server than the ledger's is needed.

One connection, outside any transaction, so that no ring waits for a commit of ours and no commit for a ring:
PostgreSQL lets notifying transactions through one at a time. When the connection breaks it is made again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from duly.backoff import Backoff
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.doorbell import Doorbell
from duly.errors import Malformed

try:
    import asyncpg
except ImportError:
    raise Malformed(
        "this doorbell needs a driver that is not installed: pip install duly[postgres]"
    ) from None

CHANNEL: Final = "duly_doorbell"
AGAIN: Final = RetryPolicy.exponential(100 * MS, 5 * SECOND)
SEND_SECONDS: Final = 0.5
"""A ring that takes longer is lost: the others have looked by then."""
ALIVE_SECONDS: Final = 10.0
TROUBLE: Final = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


class PostgresDoorbell(Doorbell):
    def __init__(self, me: str, url: str) -> None:
        super().__init__(me)
        self._url = url
        self._line: Any = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await super().stop()

    async def _listen(self) -> None:
        backoff = Backoff(AGAIN, self._me)
        while True:
            line = None
            gone = asyncio.Event()
            try:
                line = await asyncpg.connect(
                    self._url, timeout=5, command_timeout=5,
                    server_settings={"application_name": "duly doorbell"},
                )  # fmt: skip
                line.add_termination_listener(lambda _, gone=gone: gone.set())
                await line.add_listener(CHANNEL, self._note)
                self._line = line
                backoff.worked()
                while not gone.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(gone.wait(), ALIVE_SECONDS)
                        break
                    await line.execute("SELECT 1")
            except TROUBLE:
                pass
            finally:
                self._line = None
                if line is not None:
                    line.terminate()
            await backoff.wait()

    def _note(self, _line: object, _pid: int, _channel: str, note: object) -> None:
        self._heard(str(note))

    async def _send(self, note: bytes) -> None:
        line = self._line
        if line is not None:
            with suppress(*TROUBLE):
                await line.execute("SELECT pg_notify($1, $2)", CHANNEL, note.decode(), timeout=SEND_SECONDS)
