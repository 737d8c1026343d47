"""The HTTP and WebSocket port of a hub."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from aiohttp import web

from duly.core.acl import HUB
from duly.core.trusted_proxies import TrustedProxies
from duly.errors import Malformed, NotAllowed
from duly.runtime.refusal_tally import RefusalTally
from duly.server import wire_documents
from duly.settings import LOOPBACK, Settings
from duly.transports import connections, websocket
from duly.transports.http import (
    alertmanager,
    alerts,
    client_files,
    cloud_events,
    devices,
    logins,
    messages,
    metrics,
)
from duly.transports.http.fast_path import FastPath
from duly.transports.http.gate import RequestGate
from duly.transports.read_memory import MEMORY, ReadMemory

if TYPE_CHECKING:
    from duly.server.hub import Hub

IDLE_SECONDS: Final = 75.0
"""How long a connection may take for its first request, and between requests."""
PORT_TRIES: Final = 10
"""How many free ports are tried until one is free at every address."""

RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Listener:
    """Serves one hub over HTTP and WebSocket on one port."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tls = server_tls(settings)
        self._closing = contextlib.AsyncExitStack()
        self.url = ""
        room = connections.raise_descriptor_limit() - connections.RESERVE
        self.connections = connections.ClientConnections(
            room,
            settings.connections_per_address,
            IDLE_SECONDS,
            TrustedProxies(settings.trusted_proxies),
        )

    async def start(self, hub: Hub, administer: RequestHandler) -> None:
        """Accept connections; `administer` answers the requests of the command line."""
        settings = self._settings
        names = frozenset({settings.listen}) if settings.listen in LOOPBACK else None
        pages = RefusalTally(hub.activity, hub.tasks)
        refused = partial(pages.note, HUB, "page", NotAllowed.word)
        self._closing.push_async_callback(pages.stop)
        gate = RequestGate(settings.origins, names, hub.tasks.count, refused)
        post = messages.MessagesEndpoint(hub)
        server = await self._serve(self._application(hub, gate, post, administer))
        fast_path = FastPath(
            post.serve_fast_path,
            lambda connection: connections.VisitorHandler(server, connection),
            self.connections,
            gate.answers_to,
            hub.tasks.count,
            post.begin_fast_path,
        )
        self._closing.push_async_callback(fast_path.close)
        port = await self._accept(fast_path)
        host = f"[{settings.listen}]" if ":" in settings.listen else settings.listen
        self.url = f"{'https' if self._tls else 'http'}://{host}:{port}"

    @property
    def _addresses(self) -> list[str]:
        """The addresses to listen on. `::` means every address of the machine, so IPv4's as well: they get a
        socket of their own, on which clients keep their IPv4 address in limits and logs."""
        listen = self._settings.listen
        return [listen, "0.0.0.0"] if is_any_ipv6(listen) and has_ipv4() else [listen]

    async def _accept(self, fast_path: FastPath) -> int:
        """Accept connections to every address; return the port. Any free port means one that is free at the
        first address: if it is taken at the next, another one is tried."""
        tries = 1 if self._settings.port else PORT_TRIES
        while True:
            tries -= 1
            with contextlib.ExitStack() as opened:
                try:
                    port = await self._bind(fast_path, opened)
                except OSError as problem:
                    if tries and problem.errno == errno.EADDRINUSE:
                        continue
                    raise self._cannot_listen(problem) from problem
                self._closing.callback(opened.pop_all().close)
                return port

    async def _bind(self, fast_path: FastPath, opened: contextlib.ExitStack) -> int:
        """Accept connections to every address on one port, until `opened` is closed; return the port."""
        port = self._settings.port
        for address in self._addresses:
            listener = await asyncio.get_running_loop().create_server(
                fast_path, address, port, ssl=self._tls, backlog=1024,
                ssl_handshake_timeout=connections.GUEST_SECONDS if self._tls else None,
            )  # fmt: skip
            opened.callback(listener.close)
            port = int(listener.sockets[0].getsockname()[1])
        return port

    def _application(
        self, hub: Hub, gate: RequestGate, post: messages.MessagesEndpoint, administer: RequestHandler
    ) -> web.Application:
        app = web.Application(middlewares=[gate.middleware])
        app[MEMORY] = ReadMemory()
        sockets = websocket.WebSockets(hub)
        app.on_shutdown.append(sockets.close)
        app.on_shutdown.append(hub.dashboard.live.close)
        app.add_routes(
            [
                web.get("/v1/ws", sockets.serve),
                *messages.routes(post),
                *devices.routes(hub),
                *logins.routes(hub),
                *alerts.routes(hub),
                *alertmanager.routes(hub),
                *cloud_events.routes(hub),
                *metrics.routes(hub),
                *client_files.routes(),
                *wire_documents.routes(),
                web.post("/v1/admin/{verb}", administer),
                *hub.dashboard.routes(),
            ]
        )
        return app

    async def _serve(self, app: web.Application) -> web.Server:
        runner = web.AppRunner(
            app, access_log=None, logger=messages.LOG, shutdown_timeout=0.5, keepalive_timeout=IDLE_SECONDS,
            lingering_time=1.0, read_bufsize=16 * 1024,
        )  # fmt: skip
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        server = runner.server
        assert server is not None
        return server

    async def stop(self) -> None:
        """Accept no more connections, and close those that are open."""
        await self._closing.aclose()

    def check_port(self) -> None:
        """Raise `Malformed` if the port cannot be used."""
        try:
            for address in self._addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                socket.create_server((address, self._settings.port), family=family).close()
        except OSError as problem:
            raise self._cannot_listen(problem) from problem

    def _cannot_listen(self, problem: OSError) -> Malformed:
        listen, port = self._settings.listen, self._settings.port
        if problem.errno != errno.EADDRINUSE:
            return Malformed(f"cannot listen on {listen} port {port}: {problem.strerror}")
        return Malformed(
            f"port {port} on {listen} is taken; stop the other program, or use another port, "
            f"--port {port % 65_535 + 1} or --port 0 for any free one"
        )


def is_any_ipv6(listen: str) -> bool:
    """Return whether this address means every IPv6 address of the machine.

    >>> is_any_ipv6("::"), is_any_ipv6("::1"), is_any_ipv6("0.0.0.0"), is_any_ipv6("hub.lan")
    (True, False, False, False)
    """
    try:
        return ":" in listen and ipaddress.ip_address(listen).is_unspecified
    except ValueError:
        return False


def has_ipv4() -> bool:
    """Return whether this machine has IPv4."""
    try:
        socket.create_server(("0.0.0.0", 0)).close()
    except OSError:
        return False
    return True


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of a hub with a certificate; None for a hub without one."""
    if not settings.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as problem:
        files = f"{settings.tls_cert} with {settings.tls_key}"
        raise Malformed(f"the TLS certificate {files} cannot be used: {problem}") from None
    return context
