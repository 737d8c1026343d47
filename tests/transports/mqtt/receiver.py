"""A process of its own that receives: python receiver.py URL TOPIC LOG die|ack.

It writes each payload to its log. With `die` it hangs inside the handler, before the ack, to be killed there.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from duly.transports.mqtt.link import MqttLink
from duly.wire.session import Acknowledge


async def main(url: str, topic: str, log: str, what: str) -> None:
    def note(line: bytes) -> None:
        with Path(log).open("ab") as file:
            file.write(line + b"\n")

    def on_message(topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        note(payload)
        if what == "die":
            time.sleep(60)
        ack()

    link = MqttLink(url, on_message, subscriptions=[topic])
    await link.start()
    await link.connected()
    note(b"listening")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
