"""An app in Python that presses a button so many times, four at once, and writes down how each press ended.

Its ids are given: a press that has no end in the file is sent again, under its id, by the next process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from duly.clients.app import App


def note(path: Path, end: dict[str, str]) -> None:
    with path.open("a") as ends:
        ends.write(json.dumps(end) + "\n")
        ends.flush()
        os.fsync(ends.fileno())


async def main(url: str, token: str, file: str, first: int, presses: int) -> None:
    path = Path(file)
    known = path.read_text().splitlines() if path.exists() else []
    ended = {json.loads(line)["id"] for line in known}
    left = iter([n for n in range(presses) if f"{first}_{n}" not in ended])
    async with App(url, token) as app:

        async def press() -> None:
            for n in left:
                id_ = f"{first}_{n}"
                ack = await app.send("lock", "lock_control", {"open": n % 2 == 0}, id=id_, queue=True)
                note(path, {"id": id_, "state": ack.state})

        await asyncio.gather(press(), press(), press(), press())


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    asyncio.run(main(job["url"], job["token"], job["file"], job["first"], job["presses"]))
