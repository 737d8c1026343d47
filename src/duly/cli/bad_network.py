"""A bad network for `duly demo`: a TCP proxy that knows where a WebSocket frame begins and ends.

The law: it knows nothing of duly and changes no byte of a frame. It delays frames, drops some, sends some
twice, lets some overtake others, and cuts connections; after a reconnect it repeats, both ways, the last
frames from before the cut, as a network that repeats would. The first frame each way (auth, welcome) is left
alone: without it there is no connection."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

TEXT: Final = 0x1
REPEATED: Final = 6
"""How many frames of the last connection are repeated on the next."""

DROP: Final = 0.06
TWICE: Final = 0.15
OVERTAKEN: Final = 0.10
DELAY_SECONDS: Final = 0.02
OVERTAKEN_SECONDS: Final = 0.2
CUT_AFTER: Final = (4, 14)
"""How many frames a connection carries before it is cut."""


class Damage(Struct):
    """Counts of the faults that the network has made, on all connections together."""

    frames: int = 0
    dropped: int = 0
    repeated: int = 0
    overtaken: int = 0
    cuts: int = 0


class BadConnection:
    """One client's connection to the hub. `calm` ends the faults; the delays stay."""

    def __init__(self, hub: str, damage: Damage, chance: random.Random) -> None:
        parts = urlsplit(hub)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._damage = damage
        self._chance = chance
        self._last: dict[bool, deque[bytes]] = {True: deque(maxlen=REPEATED), False: deque(maxlen=REPEATED)}
        self._tasks: set[asyncio.Task[None]] = set()
        self.calm = False
        self.arrived = 0
        """frames that reached the client after its welcome"""
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until either side ends it or it is cut."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
            writers.append(back)
            budget = [self._chance.randint(*CUT_AFTER)]
            ways = [
                asyncio.ensure_future(self._way(reader, back, budget, to_client=False)),
                asyncio.ensure_future(self._way(there, writer, budget, to_client=True)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the hub is unreachable, or the proxy stops: asyncio's server would log the cancellation
        finally:
            self._tasks.discard(task)
            for one in writers:
                one.transport.abort()

    async def _way(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        budget: list[int],
        *,
        to_client: bool,
    ) -> None:
        """Carry one direction of one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await reader.readuntil(b"\r\n\r\n"))  # the handshake
            frames = 0
            while True:
                opcode, frame = await _read_frame(reader)
                if opcode != TEXT:
                    writer.write(frame)
                    continue
                frames += 1
                if frames == 1:
                    writer.write(frame)
                    self._say_again(writer, to_client)
                    continue
                if not await self._pass(frame, writer, to_client) or not self._go_on(budget):
                    return

    def _go_on(self, budget: list[int]) -> bool:
        budget[0] -= 1
        if budget[0] > 0 or self.calm:
            return True
        self._damage.cuts += 1
        return False

    def _say_again(self, writer: asyncio.StreamWriter, to_client: bool) -> None:
        last = self._last[to_client]
        while last and not self.calm:
            self._write(last.popleft(), writer, to_client)
            self._damage.repeated += 1

    async def _pass(self, frame: bytes, writer: asyncio.StreamWriter, to_client: bool) -> bool:
        damage, chance = self._damage, self._chance.random()
        damage.frames += 1
        await asyncio.sleep(self._chance.uniform(0, DELAY_SECONDS))
        if self.calm:
            self._write(frame, writer, to_client)
        elif chance < DROP:
            damage.dropped += 1
            return True
        elif chance < DROP + TWICE:
            damage.repeated += 1
            self._write(frame, writer, to_client)
            self._write(frame, writer, to_client)
        elif chance < DROP + TWICE + OVERTAKEN:
            damage.overtaken += 1
            later = self._chance.uniform(0, OVERTAKEN_SECONDS)
            asyncio.get_running_loop().call_later(later, self._write, frame, writer, to_client)
        else:
            self._write(frame, writer, to_client)
        self._last[to_client].append(frame)
        return not writer.is_closing()

    def _write(self, frame: bytes, writer: asyncio.StreamWriter, to_client: bool) -> None:
        if not writer.is_closing():
            writer.write(frame)
            self.arrived += to_client


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one whole frame, and return it with its opcode (RFC 6455, section 5.2)."""
    head = await reader.readexactly(2)
    length = head[1] & 0x7F
    if length >= 126:
        more = await reader.readexactly(2 if length == 126 else 8)
        length = int.from_bytes(more, "big")
        head += more
    mask = 4 if head[1] & 0x80 else 0
    return head[0] & 0x0F, head + await reader.readexactly(mask + length)
