"""A task from node to node over any MQTT broker, without a hub. Both nodes are in one program here.

Run it: A_URL=mqtt://A:…@127.0.0.1:7883 B_URL=mqtt://B:…@127.0.0.1:7883 python examples/two_nodes.py
"""

import asyncio
import os

import duly

lamp = duly.Node(os.environ["B_URL"], store="lamp.db")


@lamp.task("turn_on", effect="at_least_once")
async def turn_on(task: duly.Task) -> dict[str, object]:
    if task.payload["lamp"] > 8:
        raise duly.TaskFailed("there is no such lamp")
    return {"lamp": task.payload["lamp"], "on": True}


async def main() -> None:
    async with lamp, duly.Node(os.environ["A_URL"]) as switch:
        print(await switch.call("B", "turn_on", {"lamp": 1}, expires=30))
        try:
            await switch.call("B", "turn_on", {"lamp": 9}, expires=30)
        except duly.TaskFailed as problem:
            print(f"failed: {problem}")


asyncio.run(main())
