"""Calls a function once, in a process of its own that can be killed in the middle of it.

    python -m tests.once_process LEDGER EFFECT LOG LEASE

It says "begun" inside the function and what the function returned after it, and waits for a line both times.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

import duly
from duly.idempotency.runs import DeclaredEffect
from duly.storage.ledger import Transaction


async def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


def note(log: str, order: str) -> None:
    with Path(log).open("a") as file:
        file.write(f"{order}\n")


async def main(url: str, effect: str, log: str, lease: str) -> None:
    ledger, seconds = await duly.open_ledger(url), float(lease)
    wanted = msgspec.convert(effect, DeclaredEffect)
    if wanted == "exactly_once":

        @duly.once(ledger, scope="shop", key=str, effect=wanted, lease=seconds)
        async def inside(tx: Transaction, order: str, amount: int = 1) -> str:
            await tx.execute(f"INSERT INTO paid VALUES ('{order}')")
            await say("begun")
            return f"paid {order}"

        await say(await inside("o-1"))
    else:

        @duly.once(ledger, scope="shop", key=str, effect=wanted, lease=seconds)
        async def outside(order: str, amount: int = 1) -> str:
            note(log, order)
            await say("begun")
            return f"paid {order}"

        await say(await outside("o-1"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
