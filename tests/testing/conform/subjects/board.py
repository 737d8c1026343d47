# MicroPython has no pathlib, and no typing.
# ruff: noqa: PTH104, PTH123, ASYNC230, SIM105
"""A device that counts, in MicroPython: LIBRARY URL TOKEN STORE [NAME]."""

import asyncio
import os
import sys

try:
    from typing import Any
except ImportError:
    pass

library, url, token, store = sys.argv[1:5]
sys.path.insert(0, library)
name = sys.argv[5] if len(sys.argv) > 5 else ""
device = __import__("duly_device").Device(url, token, file=store + "/flash.json", name=name, log=print)


async def count(command: "Any") -> "dict[str, int]":
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


device.on("count")(count)
asyncio.run(device.run())
