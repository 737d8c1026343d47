"""A sentinel that reports an event every 0.3 s, by `duly.Sentinel`: URL TOKEN STORE."""

import asyncio
import sys
import time
from itertools import count
from pathlib import Path

import duly


async def main(url: str, token: str, store: str) -> None:
    policy = duly.SentinelPolicy(countdown=0)
    file = str(Path(store, "sentinel.db"))
    async with duly.Sentinel(url, token, store=file, profile="home", policy=policy) as sentinel:
        run = str(time.time_ns())
        for n in count():
            sentinel.trigger("conform", f"{run}-{n}")
            sentinel.trigger("repeated", f"{run}-same")
            sentinel.trigger(f"busy-{n}", f"{run}-busy")
            await asyncio.sleep(0.3)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
