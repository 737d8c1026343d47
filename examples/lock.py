"""A lock that does what it is told once, and remembers what it did in a file.

Run it: DULY_URL=http://127.0.0.1:7800 DULY_TOKEN=… python examples/lock.py
"""

import asyncio
import os

import duly
from duly.clients.device import Command

device = duly.Device(os.environ["DULY_URL"], os.environ["DULY_TOKEN"], store="lock.db")


@device.on("lock_control", effect="at_most_once")
async def lock_control(command: Command) -> dict[str, bool]:
    """Turns the motor. After a crash in the middle it is not turned again: its app is told `unknown`."""
    wanted = bool(command.data["open"])
    for step in range(3):
        command.working({"step": step})  # the hub repeats nothing meanwhile, and tells the app
        await asyncio.sleep(0.05)
    print(f"the lock is {'open' if wanted else 'closed'}", flush=True)
    device.push("event_report", {"open": wanted})
    return {"open": wanted}


asyncio.run(device.run())
