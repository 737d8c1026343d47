# MicroPython has no pathlib.
# ruff: noqa: PTH104, PTH123, ASYNC230
"""A device that counts, in MicroPython: LIBRARY URL TOKEN STORE."""

import asyncio
import os
import sys

library, url, token, store = sys.argv[1:]
sys.path.insert(0, library)
from duly_device import Device  # type: ignore[import-not-found]  # noqa: E402  # it lies in `library`

device = Device(url, token, file=store + "/flash.json", log=print)


@device.on("count")
async def count(command):  # type: ignore[no-untyped-def]
    name = store + "/count"
    try:
        with open(name) as file:
            n = int(file.read()) + 1
    except OSError:
        n = 1
    with open(name + ".new", "w") as file:
        file.write(str(n))
    os.rename(name + ".new", name)
    if (command.data or {}).get("push"):
        await device.push("event_report", {"count": n})
    return {"count": n}


asyncio.run(device.run())
