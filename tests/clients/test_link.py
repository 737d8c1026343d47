"""A client that knows several hubs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from duly.clients.app import App
from duly.clients.device import Command, Device
from tests.places import Place
from tests.servers import Postgres, quiet_port
from tests.wire.many import Town


async def test_a_hub_that_is_not_there_is_passed_over(place: Place) -> None:
    nobody = f"http://127.0.0.1:{quiet_port()}"
    async with asyncio.timeout(5), App(f"{nobody}, {place.url}", place.tokens["phone"]) as app:
        assert app.name == "phone"


async def test_when_a_hub_goes_its_clients_go_on_at_the_next(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    town = Town(tmp_path, postgres_server)
    await town.start(2)
    urls = ",".join(hub.url for hub in town.hubs)
    device = Device(urls, town.tokens["lock"])
    done: list[int] = []

    @device.on("lock_control")
    async def lock_control(command: Command) -> int:
        done.append(command.data)
        return int(command.data)

    try:
        async with device, App(urls, town.tokens["phone"]) as app:
            for n in range(6):
                if n == 3:
                    await town.hubs.pop(0).stop()
                command = await app.post("lock", "lock_control", n, queue=True, expires=60)
                assert (await asyncio.wait_for(command.ended(), 20)).data == n
        assert done == list(range(6))
    finally:
        await town.stop()
