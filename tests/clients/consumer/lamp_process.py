"""A consumer in a process of its own, which reads a queue as an example does. Its lamp is a file that only
its handler writes; after so many switches the process kills itself in the middle of one.

python lamp_process.py EXAMPLE URL LEDGER LAMP ORDER SWITCHES
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import duly

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(example: str) -> Any:
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(example: str, url: str, ledger: str, lamp: str, order: Any, switches: str) -> None:
    left = int(switches)
    file = os.open(lamp, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    async def switch(message: duly.QueueMessage) -> None:
        nonlocal left
        assert isinstance(message.body, bytes)
        line = f"{message.lane} {message.n} ".encode() + message.body + b"\n"
        if message.attempt > 1 and line in Path(lamp).read_bytes():
            return  # a crash cut the first run off, after it had switched the lamp
        os.write(file, line)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.001)

    consumer = duly.Consumer(ledger, switch, name="lamps", effect="at_least_once", order=order, window=40)
    asyncio.run(load(example).consume(url, consumer))


if __name__ == "__main__":
    main(*sys.argv[1:])
