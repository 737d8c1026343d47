"""An app that tells how its commands end, by `duly.App`: URL TOKEN STORE."""

import asyncio
import sys
from pathlib import Path

import duly


async def main(url: str, token: str, store: str) -> None:
    ended: dict[str, object] | None = None
    async with duly.App(url, token, store=str(Path(store, "app.db"))) as app:
        while True:
            command = await app.post("lock", "conform", {"ended": ended})
            try:
                ack = await command.ended()
                ended = {"id": command.id, "state": ack.state, "code": ack.code}
            except duly.Refused as problem:
                ended = {"id": command.id, "state": "refused", "code": problem.code}


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
