"""The files of the page: one HTML shell, modules, styles, icons. They come with the package, and are public.

They are read once. A browser revalidates each file, so that it never mixes old and new modules after an
upgrade.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from aiohttp import web

from duly.server.dashboard.requests import FRESH, HEADS

KINDS: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


class StaticFile(NamedTuple):
    """A file, its kind and its tag."""

    body: bytes
    kind: str
    tag: str


class StaticFiles:
    """The files of the page, by their path."""

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}
        self._read(files("duly").joinpath("server/dashboard/static"), "")

    def _read(self, folder: Traversable, lead: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                self._read(entry, f"{lead}{entry.name}/")
            else:
                kind = KINDS.get(f".{entry.name.rpartition('.')[2]}")
                if kind is not None:
                    body = entry.read_bytes()
                    tag = f'"{sha256(body).hexdigest()[:20]}"'
                    self._files[lead + entry.name] = StaticFile(body, kind, tag)

    async def shell(self, _: web.Request) -> web.Response:
        """Answer with the HTML of the page, which is the same for all its addresses."""
        shell = self._files["index.html"]
        return web.Response(body=shell.body, content_type=shell.kind, charset="utf-8", headers=FRESH)

    async def serve(self, request: web.Request) -> web.Response:
        """Answer with a file, or 304 if the browser has it."""
        found = self._files.get(request.match_info["path"])
        if found is None:
            raise web.HTTPNotFound
        heads = HEADS | {"ETag": found.tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == found.tag:
            return web.Response(status=304, headers=heads)
        return web.Response(body=found.body, content_type=found.kind, charset="utf-8", headers=heads)
