"""A lamp behind NSQ: each switch happens once and in order, however often NSQ delivers it.

Run it: NSQD=127.0.0.1:4150 python examples/lamp_nsq.py
Switch: curl 127.0.0.1:4151/pub?topic=lamps
  -d '{"id":"1","sender":"remote","lane":"kitchen","n":0,"body":"on"}'
"""

import asyncio
import json
import os
from pathlib import Path

import nsq

import duly

TOPIC, CHANNEL = "lamps", "duly"


def switch(message: duly.QueueMessage) -> None:
    with Path("lamp.txt").open("a") as lamp:
        lamp.write(f"{message.lane} {message.body!r}\n")


def read(delivery: nsq.Message) -> duly.QueueMessage:
    try:
        said = json.loads(delivery.body)
        return duly.QueueMessage(
            str(said["id"]),
            str(said["body"]),
            str(said["sender"]),
            str(said["lane"]),
            int(said["n"]),
            float(said.get("time", 0)),  # the sender's; NSQ's own time says in which order it got them
        )
    except (KeyError, TypeError, ValueError):
        return duly.QueueMessage("", delivery.body)  # without an id it is refused, and does not come again


async def consume(address: str, consumer: duly.Consumer) -> None:
    async with consumer, asyncio.TaskGroup() as tasks:

        async def take(delivery: nsq.Message) -> None:
            await consumer.accept(read(delivery))  # it is stored: NSQ need not keep it any longer
            delivery.finish()

        def taken(delivery: nsq.Message) -> None:
            delivery.enable_async()
            tasks.create_task(take(delivery))

        nsq.Reader(TOPIC, CHANNEL, taken, nsqd_tcp_addresses=[address], max_in_flight=100)
        await asyncio.Event().wait()


if __name__ == "__main__":
    lamp = duly.Consumer("sqlite:///lamp.db", switch, name="lamps")
    asyncio.run(consume(os.environ["NSQD"], lamp))
