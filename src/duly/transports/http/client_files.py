"""The clients that are not Python packages, served by the hub they talk to: a page imports `/duly.js`, a
device fetches `/duly_device.py`, and for MQTT `/duly_mqtt.py`.

The law: they are public, do not change while the hub runs, and match the version of this hub.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web


def routes() -> list[web.RouteDef]:
    """Return the routes of the client libraries that the hub serves as files."""
    return [
        web.get("/duly.js", _file("clients/js/duly.js", "text/javascript")),
        web.get("/duly_device.py", _file("clients/micropython/duly_device.py", "text/x-python")),
        web.get("/duly_mqtt.py", _file("clients/micropython/duly_mqtt.py", "text/x-python")),
    ]


def _file(path: str, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    body = files("duly").joinpath(path).read_bytes()
    # A page of another origin may import it as well, and after an upgrade no browser keeps the old one.
    headers = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-cache"}

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return serve
