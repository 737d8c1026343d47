"""`duly up`: run a hub until somebody stops it.

The law: one line, `ready …`, once everything serves; a person reads how to go on behind it, a program reads
no further. It ends when it is told to, cleanly; or by itself, and then says why and exits with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from duly.cli.common import CommandFailed, Data, Exit, Json, LedgerUrl, note, print_json, say
from duly.errors import LedgerInUse, Malformed

if TYPE_CHECKING:
    from duly.server.hub import Hub
    from duly.settings import Settings

BROKER_SECONDS: Final = 2.0
"""How long a broker may take before a person is told."""


def up(
    data: Data = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="HTTP and WebSocket; 0 is any free one. [7800]")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDR", help="Where to listen. [127.0.0.1]")
    ] = None,
    ledger: LedgerUrl = None,
    notifier: Annotated[
        str | None,
        typer.Option(
            "--notifier", metavar="URL", help="How hubs on one ledger wake each other: redis://… [postgres]"
        ),
    ] = None,
    mqtt_port: Annotated[
        int | None, typer.Option("--mqtt-port", metavar="N", help="The embedded MQTT broker's. [7883]")
    ] = None,
    mqtt: Annotated[
        str | None,
        typer.Option("--mqtt", metavar="URL", help="Another MQTT broker instead of the embedded one."),
    ] = None,
    no_mqtt: Annotated[bool | None, typer.Option("--no-mqtt", help="No MQTT at all.")] = None,
    secret_key: Annotated[
        str | None,
        typer.Option(
            "--secret-key",
            metavar="FILE",
            help="Seals the ledger's secrets; hubs on one ledger need the same. [DIR/secret.key]",
        ),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option("--tls-cert", metavar="FILE", help="Serve TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its key.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond this machine without TLS all the same.")
    ] = None,
    allow_private_webhooks: Annotated[
        bool | None,
        typer.Option("--allow-private-webhooks", help="Send alerts to addresses inside this network, too."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option("--origin", metavar="URL", help="A page of another origin that may use this hub."),
    ] = None,
    registration: Annotated[
        Literal["open", "closed"] | None,
        typer.Option("--registration", metavar="open|closed", help="Whether strangers may register to chat."),
    ] = None,
    friends_only: Annotated[
        bool | None, typer.Option("--friends-only", help="Only friends may chat with each other.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a hub: apps and devices connect to it.

    Everything it keeps is in the data folder (duly-data here, if you do not say). Ctrl-C stops it; nothing
    it has accepted is lost, however it ends.
    """
    from duly.settings import load

    settings = load(
        {
            "data": data,
            "port": port,
            "listen": listen,
            "ledger": ledger,
            "notifier": notifier,
            "mqtt_port": mqtt_port,
            "mqtt": mqtt,
            "no_mqtt": no_mqtt,
            "secret_key": secret_key,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "insecure": insecure,
            "allow_private_webhooks": allow_private_webhooks,
            "origins": origin or None,
            "registration": registration,
            "friends_only": friends_only,
        }
    )
    try:
        import uvloop
    except ImportError:  # not made for this platform: slower, not different
        asyncio.run(_serve(settings, json))
    else:
        uvloop.run(_serve(settings, json))


async def _serve(settings: Settings, json: bool) -> None:
    from duly.server import runfile
    from duly.server.hub import Hub, tune

    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # whoever insists need not wait

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    tune()
    hub = Hub(settings)
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
        if isinstance(
            problem.__cause__, OSError
        ):  # a port that is taken: nothing is wrong with what was typed
            raise CommandFailed(Exit.FAILED, str(problem)) from None
        raise
    except OSError as problem:
        raise CommandFailed(
            Exit.FAILED, f"the data folder {settings.data} cannot be used: {problem}"
        ) from None
    with contextlib.suppress(BrokenPipeError):  # nobody listens; apps and devices do
        _announce(hub, settings, json)
    loop.call_later(BROKER_SECONDS, _warn, hub)
    life = loop.create_task(hub.run())
    telling = loop.create_task(told.wait())
    try:
        await asyncio.wait({life, telling}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            raise CommandFailed(
                Exit.FAILED, f"the hub has ended by itself: {life.exception()!r}. What it accepted is stored"
            )
    finally:
        died = life.done()
        for task in (life, telling):
            task.cancel()
        await asyncio.gather(life, telling, return_exceptions=True)
        with contextlib.suppress(*[Exception] if died else []):  # what it died of is being told already
            await hub.stop()


def _warn(hub: Hub) -> None:
    """A mistyped broker would look like devices that never come."""
    mqtt = None if hub.mqtt is None else hub.mqtt.state()
    if mqtt is not None and mqtt["problem"] is not None:
        note(f"{mqtt['problem']}; it is tried again, and 'duly doctor' says when it is there")


def _announce(hub: Hub, settings: Settings, json: bool) -> None:
    if json:
        place = {"data": settings.data, "pid": os.getpid()}
        print_json({"url": hub.url, "mqtt": hub.mqtt_url or None} | place)
        return
    remote: list[str] = []
    programs = Path(sys.executable).parent
    if shutil.which("duly") is None and (programs / "duly").exists():  # as after 'make up'
        remote.append(f"  export PATH={shlex.quote(str(programs))}:$PATH")
    if settings.data not in ("duly-data", os.environ.get("DULY_DATA")):
        remote.append(f"  export DULY_DATA={shlex.quote(str(Path(settings.data).absolute()))}")
    say(  # at once: a program reads one line, and may be gone before there is another
        f"ready {hub.url} {hub.mqtt_url}".rstrip(),
        "",
        "Go on in another terminal:",
        *remote,
        "  duly add device lock && duly add app phone && duly grant phone lock",
        "  duly device lock",
        "and in a third:",
        *remote,
        "  duly send lock lock_control '{\"open\":true}'",
    )
