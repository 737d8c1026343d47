"""A lamp behind a Redis stream: each switch happens once and in order, however often the stream delivers it.

Run it: REDIS_URL=redis://127.0.0.1:6379 python examples/lamp_redis.py
Switch: redis-cli XADD lamps '*' id 1 sender remote lane kitchen n 0 body on
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

import duly

STREAM, GROUP, ME = "lamps", "duly", f"lamp-{os.getpid()}"


def switch(message: duly.QueueMessage) -> None:
    with Path("lamp.txt").open("a") as lamp:
        lamp.write(f"{message.lane} {message.body!r}\n")


def read(fields: dict[str, str]) -> duly.QueueMessage:
    try:
        return duly.QueueMessage(
            fields["id"], fields["body"], fields["sender"], fields["lane"], int(fields["n"])
        )
    except (KeyError, ValueError):
        return duly.QueueMessage("", str(fields))  # without an id it is refused, and does not come again


async def consume(url: str, consumer: duly.Consumer) -> None:
    async with Redis.from_url(url, decode_responses=True) as redis, consumer:
        with suppress(ResponseError):  # the group exists
            await redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        while True:
            # What a consumer took and did not acknowledge, because it died, comes to another one.
            lost: Any = await redis.xautoclaim(STREAM, GROUP, ME, min_idle_time=1_000, count=100)
            new: Any = await redis.xreadgroup(GROUP, ME, {STREAM: ">"}, count=100, block=200)
            entries = [*lost[1], *(entry for _, found in new for entry in found)]
            await asyncio.gather(*(consumer.accept(read(fields)) for _, fields in entries))
            if entries:  # they are stored: the stream need not keep them any longer
                await redis.xack(STREAM, GROUP, *(id_ for id_, _ in entries))


if __name__ == "__main__":
    lamp = duly.Consumer("sqlite:///lamp.db", switch, name="lamps")
    asyncio.run(consume(os.environ["REDIS_URL"], lamp))
