"""A device that counts, by `duly.Device`: URL TOKEN STORE."""

import asyncio
import sys
from pathlib import Path

import duly
from duly.clients.device import Command


async def main(url: str, token: str, store: str) -> None:
    number = Path(store, "count")
    device = duly.Device(url, token, store=str(Path(store, "device.db")))

    @device.on("count")
    async def count(command: Command) -> dict[str, int]:
        n = int(number.read_text()) + 1 if number.exists() else 1
        new = number.with_suffix(".new")
        new.write_text(str(n))
        new.replace(number)
        if command.data and command.data.get("push"):
            await device.push("event_report", {"count": n})
        return {"count": n}

    await device.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
