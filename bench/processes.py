"""Processes that a question starts: loads that tell what they found, and servers that are measured.

The law: the bench never waits for ever. Each wait has a limit, and ends at once with an error that says which
process died if the load or one of the servers dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE = 60.0
"""Seconds that a load may take beyond the time it measures: to start, to connect, to finish."""


class ProcessDied(Exception):
    """A load or a server ended before it should."""


class NoAnswer(Exception):
    """A load or a server is there, but does not say anything."""


@dataclass
class Server:
    """A server that is measured."""

    url: str
    pid: int
    name: str = "the server"

    @property
    def memory(self) -> int:
        """Bytes it holds."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    @property
    def worked(self) -> float:
        """Seconds of processor time it has used; with its children that run, such as PostgreSQL's."""
        return sum(map(seconds_of, [self.pid, *children(self.pid)]))

    async def died(self) -> None:
        """Returns when its process has ended."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)


def seconds_of(pid: int) -> float:
    """The processor time of one process and of its children that have ended; none if it has ended itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found + [each for child in found for each in children(child)]


def end_as_interrupted() -> None:
    """Makes SIGTERM end this process as Ctrl-C does: what it has started ends with it. SIGINT itself would
    not do: it is ignored in what a script starts with `&`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def first_line(process: subprocess.Popen[bytes], what: str, seconds: float) -> str:
    """The first line that a server prints; a server that dies or says nothing is an error."""
    assert process.stdout is not None
    deadline, said = time.monotonic() + seconds, b""
    while b"\n" not in said:
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise NoAnswer(f"{what} was not ready within {seconds:g} s")
        more = os.read(process.stdout.fileno(), 4096)
        if not more:
            raise ProcessDied(f"{what} {ending(process.wait(10))} before it was ready")
        said += more
    return said.partition(b"\n")[0].decode()


class Load:
    """A load process: it is told its work, and answers with lines."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, servers: Sequence[Server]) -> None:
        self.name = name
        self.process = process
        self._servers = servers

    async def tell(self, line: bytes) -> None:
        """Writes a line to it; that it has died is noticed when its answer is read."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(line + b"\n")
            await self.process.stdin.drain()

    async def line(self, within: float, begins: bytes = b"") -> bytes:
        """The next line it prints that begins so."""
        reading = asyncio.create_task(self._line(begins))
        watching = {asyncio.create_task(each.died()): each for each in self._servers}
        try:
            await asyncio.wait({reading, *watching}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
            for task, server in watching.items():
                if task.done():
                    raise ProcessDied(f"{server.name} ended while {self.name} was using it")
            if not reading.done():
                raise NoAnswer(f"{self.name} did not answer within {within:g} s")
            return reading.result()
        finally:
            reading.cancel()
            for task in watching:
                task.cancel()
            await asyncio.gather(reading, *watching, return_exceptions=True)

    async def _line(self, begins: bytes) -> bytes:
        assert self.process.stdout is not None
        while True:
            line = await self.process.stdout.readline()
            if not line:
                raise ProcessDied(f"{self.name} {ending(await self.process.wait())}")
            if line.startswith(begins):
                return line.rstrip()


@contextlib.asynccontextmanager
async def load(
    *command: str, servers: Sequence[Server] = (), env: Mapping[str, str] | None = None
) -> AsyncIterator[Load]:
    """A load process (`python` with these arguments) that is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        limit=1 << 24,
    )
    try:
        yield Load(f"the load {' '.join(command[:4])}", process, servers)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def answer_of(
    *command: str,
    work: bytes = b"",
    seconds: float,
    servers: Sequence[Server] = (),
    env: Mapping[str, str] | None = None,
) -> bytes:
    """What a load finds that is given this work and measures for so many seconds: a line of JSON."""
    async with load(*command, servers=servers, env=env) as child:
        if work:
            await child.tell(work)
        return await child.line(GRACE + seconds, begins=b"{")
