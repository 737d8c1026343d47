"""An alarm that is on the disk before it is sent, and one that a person cancels in time.

Run it: DULY_URL=http://127.0.0.1:7800 DULY_TOKEN=… python examples/sentinel.py
"""

import asyncio
import os

import duly


async def main() -> None:
    policy = duly.SentinelPolicy(countdown=1)
    url, token = os.environ["DULY_URL"], os.environ["DULY_TOKEN"]
    async with duly.Sentinel(url, token, store="sentinel.db", profile="home", policy=policy) as sentinel:
        fall = sentinel.trigger("fall", "watch-1", severity="critical")
        await fall.stored()  # from here on no crash loses it
        false_alarm = sentinel.disconnect("watch-2")
        sentinel.cancel("watch-2")  # a person says that all is well
        print("fall:", (await fall.sent).state)
        print("disconnect:", (await false_alarm.sent).state)


asyncio.run(main())
