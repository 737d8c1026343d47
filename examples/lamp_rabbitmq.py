"""A lamp behind a RabbitMQ queue: each switch happens once and in order, however often the queue delivers it.

Run it: AMQP_URL=amqp://guest:guest@127.0.0.1/ python examples/lamp_rabbitmq.py
A switch is a message with a message id, an app id (its sender), and the headers `lane` and `n`.
"""

import asyncio
import os
from pathlib import Path

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

import duly

QUEUE = "lamps"


def switch(message: duly.QueueMessage) -> None:
    with Path("lamp.txt").open("a") as lamp:
        lamp.write(f"{message.lane} {message.body!r}\n")


def read(delivery: AbstractIncomingMessage) -> duly.QueueMessage:
    try:
        return duly.QueueMessage(
            delivery.message_id or "",
            delivery.body,
            str(delivery.app_id),
            lane=str(delivery.headers["lane"]),
            n=int(str(delivery.headers["n"])),
            time=delivery.timestamp or 0,
        )
    except (KeyError, ValueError):
        return duly.QueueMessage("", delivery.body)  # without an id it is refused, and does not come again


async def consume(url: str, consumer: duly.Consumer) -> None:
    async with await aio_pika.connect(url) as broker, consumer, asyncio.TaskGroup() as tasks:

        async def take(delivery: AbstractIncomingMessage) -> None:
            await consumer.accept(read(delivery))  # it is stored: the queue need not keep it any longer
            await delivery.ack()

        channel = await broker.channel()
        await channel.set_qos(prefetch_count=100)
        queue = await channel.declare_queue(QUEUE, durable=True)
        async with queue.iterator() as deliveries:
            async for delivery in deliveries:
                tasks.create_task(take(delivery))


if __name__ == "__main__":
    lamp = duly.Consumer("sqlite:///lamp.db", switch, name="lamps")
    asyncio.run(consume(os.environ["AMQP_URL"], lamp))
