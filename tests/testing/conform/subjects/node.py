"""A node that counts, by `duly.Node`: HOST PORT NAME TOKEN STORE."""

import asyncio
import sys
from pathlib import Path

import duly
from duly.clients.node.tasks import Task


async def main(host: str, port: str, name: str, token: str, store: str) -> None:
    number = Path(store, "count")
    node = duly.Node(f"mqtt://{name}:{token}@{host}:{port}", store=str(Path(store, "node.db")))

    @node.task("count", effect="at_most_once")
    async def count(task: Task) -> dict[str, int]:
        n = int(number.read_text()) + 1 if number.exists() else 1
        new = number.with_suffix(".new")
        new.write_text(str(n))
        new.replace(number)
        return {"count": n}

    @node.task("relay", effect="at_most_once")
    async def relay(task: Task) -> dict[str, object]:
        try:
            value = await node.call(task.payload["to"], "count", {}, expires=60)
        except duly.TaskFailed as problem:
            return {"state": "failed", "error": str(problem)}
        return {"state": "done", "value": value}

    await node.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
