"""A node as a process of its own, that can be killed at any moment and started again.

It does what it is sent, and writes each task down, flushed to the disk, before it answers. It sends the other
node its own share of tasks, under ids that a restart finds again, and writes down how each ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.retry import RetryPolicy
from duly.core.units import SECOND
from duly.errors import DulyError, TaskFailed, Unknown

UNDER_WAY = 200


class Log:
    """Lines that survive kill -9 of whoever wrote them, and of nothing less."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, line: str) -> None:
        os.write(self._file, line.encode() + b"\n")
        os.fdatasync(self._file)


async def live(url: str, name: str, other: str, folder: Path, count: int) -> None:
    node = Node(
        url,
        name=name,
        store=str(folder / f"{name}.db"),
        resend=RetryPolicy.fixed(2 * SECOND, tries=None),
        concurrency=10,
    )
    did, ended = Log(folder / f"{name}.did"), Log(folder / f"{name}.ended")

    @node.task("work")
    async def work(task: Task) -> str:
        did.add(task.id)
        return f"{task.payload} by {name}"

    known = {line.split()[0] for line in (folder / f"{name}.ended").read_text().splitlines()}
    left = iter([n for n in range(count) if f"{name}.{n}" not in known])

    async def send() -> None:
        for n in left:
            id_ = f"{name}.{n}"
            task = await node.send(other, "work", n, id=id_, expires=3600)
            try:
                state = "done" if await task.result == f"{n} by {other}" else "wrong"
            except (Unknown, TaskFailed):
                state = task.state
            ended.add(f"{id_} {state}")

    life = asyncio.create_task(node.run())
    while True:
        try:
            node._running()
            break
        except DulyError:
            await asyncio.sleep(0.01)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, life.cancel)
    await asyncio.gather(*(send() for _ in range(UNDER_WAY)))
    with suppress(asyncio.CancelledError):
        await life


def main() -> None:
    import uvloop

    url, name, other, folder, count = sys.argv[1:]
    uvloop.run(live(url, name, other, Path(folder), int(count)))


if __name__ == "__main__":
    main()
