"""An app that opens a lock, and learns how it ended.

Run it: DULY_URL=http://127.0.0.1:7800 DULY_TOKEN=… python examples/phone.py
"""

import asyncio
import os

import duly


async def main() -> None:
    async with duly.App(os.environ["DULY_URL"], os.environ["DULY_TOKEN"], store="phone.db") as app:
        try:
            ack = await app.send("lock-1", "lock_control", {"open": True}, progress=print)
        except duly.Refused as problem:
            print(f"nothing was done: {problem}")
            return
        print(ack.state, ack.data)
        async for push in app.pushes():
            print(push)
            break


asyncio.run(main())
