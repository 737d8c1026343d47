"""`duly up`: runs a hub until it is stopped.

The law: when every part serves, the verb prints one line, `ready …`; the lines after it are for people. The
hub ends cleanly at a signal; if it ends by itself, the verb says why and exits with 1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from duly.cli.common import CommandFailed, Exit, print_json, say
from duly.cli.options import DataFolder, Json, LedgerUrl, grouped
from duly.errors import LedgerInUse, Malformed

if TYPE_CHECKING:
    from duly.server.hub import Hub
    from duly.settings import Settings


@dataclass(frozen=True)
class UpOptions:
    """The settings of a hub that can be given on the command line, under their names in duly.toml."""

    data: DataFolder = None
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", help="The port of HTTP and WebSocket; 0 is any free port. [7800]"
        ),
    ] = None
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDR", help="The address to listen at. [127.0.0.1]")
    ] = None
    ledger: LedgerUrl = None
    notifier: Annotated[
        str | None,
        typer.Option(
            "--notifier",
            metavar="URL",
            help="How hubs on one ledger notify each other: redis://… [the ledger's PostgreSQL]",
        ),
    ] = None
    mqtt_port: Annotated[
        int | None,
        typer.Option("--mqtt-port", metavar="N", help="The port of the embedded MQTT broker. [7883]"),
    ] = None
    mqtt_ws_port: Annotated[
        int | None,
        typer.Option(
            "--mqtt-ws-port",
            metavar="N",
            help="A port where the embedded broker also serves MQTT over WebSocket, at /mqtt. [none]",
        ),
    ] = None
    mqtt: Annotated[
        str | None,
        typer.Option("--mqtt", metavar="URL", help="Use this MQTT broker. [the embedded one]"),
    ] = None
    no_mqtt: Annotated[bool | None, typer.Option("--no-mqtt", help="No MQTT at all.")] = None
    secret_key: Annotated[
        str | None,
        typer.Option(
            "--secret-key",
            metavar="FILE",
            help="The key of the ledger's secrets; hubs on one ledger need the same. [DIR/secret.key]",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option("--tls-cert", metavar="FILE", help="The certificate to serve TLS with. [no TLS]"),
    ] = None
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", metavar="FILE", help="The key of --tls-cert. [none]")
    ] = None
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Allow listening beyond this machine without TLS.")
    ] = None
    allow_private_webhooks: Annotated[
        bool | None,
        typer.Option("--allow-private-webhooks", help="Allow alerts to addresses inside this network."),
    ] = None
    public_url: Annotated[
        str | None,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="The address under which people reach this hub, for links. [its own]",
        ),
    ] = None
    log: Annotated[
        Literal["human", "json"] | None,
        typer.Option(
            "--log", metavar="human|json", help="Log lines for people, or one JSON object a line. [human]"
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(
            "--log-level",
            metavar="LEVEL",
            help="The lowest level to log: debug (retries, duplicates), info, warning or error. [info]",
        ),
    ] = None
    origins: Annotated[
        list[str] | None,
        typer.Option("--origin", metavar="URL", help="An origin whose pages may use this hub. [its own]"),
    ] = None
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="CIDR",
            help="A proxy in front of this hub, by address or network, whose X-Forwarded-For is believed. "
            "[none]",
        ),
    ] = None
    registration: Annotated[
        Literal["open", "closed"] | None,
        typer.Option(
            "--registration",
            metavar="open|closed",
            help="Whether new people may register to chat. [open, if only this machine can connect]",
        ),
    ] = None
    friends_only: Annotated[
        bool | None, typer.Option("--friends-only", help="Only friends may chat with each other.")
    ] = None


@grouped
def up(*, options: UpOptions, json: Json = False) -> None:
    """Run a hub: apps and devices connect to it.

    Everything it keeps is in the data folder (duly-data in this folder, unless --data names another). Ctrl-C
    stops it; nothing it has accepted is lost, however it ends.
    """
    from duly.settings import load

    settings = load({field.name: _given(getattr(options, field.name)) for field in fields(options)})
    try:
        import uvloop
    except ImportError:  # not available on this platform; the hub is only slower without it
        asyncio.run(_serve(settings, json))
    else:
        uvloop.run(_serve(settings, json))


def _given(value: object) -> object:
    """Return the value of an option, or None if it was not given."""
    return None if value == [] else value


async def _serve(settings: Settings, json: bool) -> None:
    from duly.runtime.log_format import set_up_logs
    from duly.server import runfile
    from duly.server.hub import Hub, tune

    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second signal ends the process at once

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    tune()
    hub = Hub(settings)
    set_up_logs(settings.log, settings.log_level, lambda: hub.name)
    try:
        await hub.start()
    except LedgerInUse:
        posted = runfile.read(Path(settings.data))
        if posted is None:
            raise
        raise CommandFailed(
            Exit.FAILED,
            f"a hub runs in {settings.data} already, at {posted.url} (pid {posted.pid}); use that one, "
            "stop it, or choose another folder with --data",
        ) from None
    except Malformed as problem:
        if isinstance(problem.__cause__, OSError):  # a port in use is not a mistake in the command line
            raise CommandFailed(Exit.FAILED, str(problem)) from None
        raise
    except OSError as problem:
        raise CommandFailed(
            Exit.FAILED, f"the data folder {settings.data} cannot be used: {problem}"
        ) from None
    link = f"{settings.public_url or hub.url}/login#{await hub.dashboard.access.make_link()}"
    with contextlib.suppress(BrokenPipeError):  # apps and devices connect all the same
        _announce(hub, settings, link, json)
    life = loop.create_task(hub.run())
    telling = loop.create_task(told.wait())
    try:
        await asyncio.wait({life, telling}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            raise CommandFailed(
                Exit.FAILED,
                f"the hub has ended by itself: {life.exception()!r}. "
                "What it accepted is stored; start it again with 'duly up'",
            )
    finally:
        died = life.done()
        for task in (life, telling):
            task.cancel()
        await asyncio.gather(life, telling, return_exceptions=True)
        with contextlib.suppress(*[Exception] if died else []):  # the reason of its end is reported already
            await hub.stop()


def _announce(hub: Hub, settings: Settings, link: str, json: bool) -> None:
    if json:
        process = {"data": settings.data, "pid": os.getpid(), "dashboard": link}
        mqtt = {"mqtt": hub.mqtt_url or None, "mqtt_ws": hub.mqtt_websocket_url or None}
        print_json({"url": hub.url} | mqtt | process)
        return
    setup: list[str] = []
    programs = Path(sys.executable).parent
    if shutil.which("duly") is None and (programs / "duly").exists():  # the hub was started by 'make up'
        setup.append(f"  export PATH={shlex.quote(str(programs))}:$PATH")
    if settings.data not in ("duly-data", os.environ.get("DULY_DATA")):
        setup.append(f"  export DULY_DATA={shlex.quote(str(Path(settings.data).absolute()))}")
    say(  # printed together: a program may read only the first line, and then close the pipe
        " ".join(filter(None, ("ready", hub.url, hub.mqtt_url, hub.mqtt_websocket_url))),
        "",
        "See it in a browser (the link works once; 'duly dashboard link' prints another):",
        f"  {link}",
        "",
        "Go on in another terminal:",
        *setup,
        "  duly add device lock && duly add app phone && duly grant phone lock",
        "  duly device lock",
        "and in a third:",
        *setup,
        "  duly send lock lock_control '{\"open\":true}'",
    )
