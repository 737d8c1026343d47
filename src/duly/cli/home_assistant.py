"""`duly ha`: devices of a hub in Home Assistant.

The law: the verb prints how each command of Home Assistant ended, and stores nothing; a new run gets
everything it needs from the hub and from Home Assistant's broker."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from duly.cli.common import CommandFailed, Exit, clock, note, print_json, say, tint
from duly.cli.options import HubOptions, Json, grouped, length
from duly.cli.temporary_token import access_source, check_account
from duly.integrations.home_assistant.entities import DISCOVERY, EXPIRES, PREFIX, EntityDeclaration, Topics

if TYPE_CHECKING:
    from duly.integrations.home_assistant.bridge import CommandReport, HomeAssistantBridge

PATIENCE = 10.0
"""Seconds without the broker after which stderr says so."""


class HomeAssistantSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[home_assistant]` of duly.toml."""

    mqtt: str = ""
    app: str = "home-assistant"
    prefix: str = PREFIX
    discovery: str = DISCOVERY
    expires: float = EXPIRES
    entities: list[EntityDeclaration] = []


@dataclass(frozen=True)
class HomeAssistantOptions:
    """The options of the bridge: its devices, and the broker of Home Assistant."""

    mqtt: Annotated[
        str | None,
        typer.Option(
            "--mqtt", metavar="URL", help="Home Assistant's MQTT broker: mqtt://NAME:PASSWORD@HOST. [none]"
        ),
    ] = None
    locks: Annotated[
        list[str] | None, typer.Option("--lock", metavar="DEVICE", help="Show this device as a lock. [none]")
    ] = None
    lights: Annotated[
        list[str] | None,
        typer.Option("--light", metavar="DEVICE", help="Show this device as a light. [none]"),
    ] = None
    switches: Annotated[
        list[str] | None,
        typer.Option("--switch", metavar="DEVICE", help="Show this device as a switch. [none]"),
    ] = None
    as_: Annotated[
        str | None, typer.Option("--as", metavar="APP", help="Command as this app. [home-assistant]")
    ] = None
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="WORD", help="The first level of its topics. [duly]")
    ] = None
    discovery: Annotated[
        str | None,
        typer.Option("--discovery", metavar="WORD", help="The prefix of discovery. [homeassistant]"),
    ] = None
    expires: Annotated[
        float | None, length("--expires", "A command is not carried out after this time. [30s]")
    ] = None

    def settings(self) -> HomeAssistantSettings:
        """Return the settings of `duly.toml` and the environment, overridden by these options."""
        from duly.settings import section

        flags: dict[str, object] = {
            "mqtt": self.mqtt,
            "app": self.as_,
            "prefix": self.prefix,
            "discovery": self.discovery,
            "expires": self.expires,
        }
        named = [("lock", self.locks), ("light", self.lights), ("switch", self.switches)]
        entities = [{"device": device, "kind": kind} for kind, given in named for device in given or ()]
        if entities:
            flags["entities"] = entities
        return section("home_assistant", HomeAssistantSettings, flags)


@grouped
def ha(*, options: HomeAssistantOptions, at: HubOptions, json: Json = False) -> None:
    """Show devices in Home Assistant, by MQTT discovery, and pass its commands on to them.

    Home Assistant needs its MQTT integration; --mqtt is the broker that it uses. The bridge is an app of the
    hub: 'duly add app home-assistant', and 'duly grant home-assistant DEVICE' for each device. Names, sensors
    and other fields are declared in duly.toml, under [home_assistant]. Ctrl-C stops it.
    """
    from duly.clients.websocket_link import Access
    from duly.integrations.home_assistant.bridge import HomeAssistantBridge, HubApp
    from duly.integrations.home_assistant.entities import check_entities

    wanted = options.settings()
    if not wanted.mqtt:
        raise CommandFailed(
            Exit.USAGE,
            "the broker of Home Assistant is missing; name it with --mqtt mqtt://NAME:PASSWORD@HOST",
        )
    if wanted.expires <= 0:
        raise CommandFailed(Exit.USAGE, "expires must be a number of seconds greater than 0")
    entities, topics = check_entities(wanted.entities), Topics(wanted.prefix, wanted.discovery)
    hub = at.need()
    if at.token is None:
        check_account(hub, wanted.app, "app")

    async def run() -> None:
        access = Access(access_source(hub, wanted.app, at.folder) if at.token is None else None, hub.tls)
        bridge = HomeAssistantBridge(
            HubApp(hub.url, at.token or hub.token, access=access),
            wanted.mqtt,
            entities,
            topics=topics,
            expires=wanted.expires,
            reported=lambda report: _tell(report, json),
            online=lambda: _announce(bridge, json),
        )
        await _serve(bridge)

    hub.knock()
    asyncio.run(run())


async def _serve(bridge: HomeAssistantBridge) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await bridge.start()
    complaining = loop.call_later(PATIENCE, _complain, bridge)
    try:
        await told.wait()
    finally:
        complaining.cancel()
        await bridge.stop()


def _announce(bridge: HomeAssistantBridge, json: bool) -> None:
    where = repr(bridge.link.address)
    print_json({"what": "online", "mqtt": where}) if json else say(f"online {where}")


def _complain(bridge: HomeAssistantBridge) -> None:
    if not bridge.link.up:
        note(f"duly: {bridge.link.lost()}; trying again")


def _tell(report: CommandReport, json: bool) -> None:
    now = time.time() * 1000
    if json:
        print_json(
            {
                "what": "command",
                "time": round(now),
                "device": report.entity.device,
                "command": report.command,
                "id": report.id,
                "outcome": report.outcome,
                "reason": report.reason,
            }
        )
        return
    why = f" ({report.reason})" if report.reason else ""
    named = f"{report.entity.device} {report.command}".rstrip()
    say(f"{clock(now)}  {named}: {tint(report.outcome)}{why}   [{report.id}]")
