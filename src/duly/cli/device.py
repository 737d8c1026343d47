"""`duly device`: a lock or a lamp without hardware, on `duly.Device` like any other.

The law: one line in the effects file is one thing that really happened, flushed to the disk before anybody
is told. Whoever doubts that an effect happened once counts lines; nothing else here is evidence.

    2026-11-15T22:01:47.123Z 1763244107120_7 phone lock_control {"open":true}
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

import typer

from duly.cli.common import (
    CommandFailed,
    Data,
    Exit,
    HubClient,
    HubUnreachable,
    Json,
    Token,
    Url,
    clock,
    need_hub,
    print_json,
    say,
    settings_of,
)
from duly.cli.keys import SignWith
from duly.cli.temporary_token import borrower, check_account
from duly.errors import DeviceError

if TYPE_CHECKING:
    from duly.clients.device import Command, Device

FIRST_SECONDS = 10.0


class DeviceKind(StrEnum):
    LOCK = "lock"
    LAMP = "lamp"


def device(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    kind: Annotated[
        DeviceKind, typer.Option("--kind", metavar="lock|lamp", help="What it is.")
    ] = DeviceKind.LOCK,
    effects: Annotated[
        Path | None,
        typer.Option("--effects", metavar="FILE", help="Write a line for everything it really does."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="FILE",
            help="Its memory of what it has done. [in the data folder; none with --url]",
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
    keys: SignWith = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Be a simulated lock or lamp.

    A lock understands lock_control {"open": true}, a lamp dev_control {"on": true} or {"toggle": true}; both
    understand query, and do everything else they are told by writing it down. It needs an account: 'duly add
    device NAME'. Without --token it uses the hub on this machine; with --url mqtt://HOST:PORT it is behind a
    broker, and with --keys signs what it says. Ctrl-C stops it.
    """
    thing = SimulatedThing(kind.value, Effects(effects), lambda what, more: _tell(json, what, more))
    if url is not None and url.startswith(("mqtt:", "mqtts:")):
        asyncio.run(_run(_through_broker(url, name, token, store, keys), _plain(url), thing, store, json))
        return
    hub = need_hub(data, url, token)
    if token is None:
        check_account(hub, name, "device")
    if store is None and hub.local:
        store = Path(settings_of(data).data) / f"device-{name}.db"
    asyncio.run(_run(_at_hub(hub, name, data, token, store), hub.url, thing, store, json))


class Effects:
    """What really happened, one line each, on the disk before it is told."""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._fd: int | None = None

    def read(self) -> list[tuple[str, str, str, Any]]:
        """(id, sender, type, data) of every whole line."""
        import msgspec

        if self._place is None or not self._place.exists():
            return []
        found = []
        for line in self._place.read_bytes().splitlines(keepends=True):
            parts = line.split(b" ", 4)
            if line.endswith(b"\n") and len(parts) == 5:
                _, id_, sender, type_, data = parts
                found.append(
                    (unquote(id_.decode()), sender.decode(), type_.decode(), msgspec.json.decode(data))
                )
        return found

    def add(self, command: Command) -> None:
        import msgspec

        if self._place is None:
            return
        if self._fd is None:
            self._fd = os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        id_ = quote(command.id, safe=":_-.~+=@,/")  # strangers' ids may hold blanks
        head = f"{at} {id_} {command.sender} {command.type} ".encode()
        os.write(self._fd, head + msgspec.json.encode(command.data) + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SimulatedThing:
    """The lock or lamp itself: what it is now, by everything that happened to it."""

    def __init__(self, kind: str, effects: Effects, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self.kind = kind
        self.effects = effects
        self.state: dict[str, Any] = {"open": False} if kind == "lock" else {"on": False}
        self._tell = tell
        for _, _, type_, data in effects.read():
            with contextlib.suppress(ValueError):
                self.state = self._after(type_, data)

    @property
    def main(self) -> str:
        return "lock_control" if self.kind == "lock" else "dev_control"

    def _after(self, type_: str, data: Any) -> dict[str, Any]:
        """The state after a command; a `ValueError` says what is wrong with it."""
        if type_ != self.main:
            return self.state
        (key,) = ("open",) if self.kind == "lock" else ("on",)
        if isinstance(data, dict) and isinstance(data.get(key), bool):
            return self.state | data
        if isinstance(data, dict) and data.get("toggle") is True:
            return self.state | {key: not self.state[key]}
        raise ValueError(f'say what to do: {{"{key}":true}}, {{"{key}":false}} or {{"toggle":true}}')

    def install(self, device: Device) -> None:
        from duly.wire.frames import DeviceCode

        other = "dev_control" if self.kind == "lock" else "lock_control"

        async def act(command: Command) -> dict[str, Any]:
            if command.type in (other, "media_download", "media_download_chunk"):
                raise DeviceError(DeviceCode.NOT_SUPPORTED, f"a {self.kind} does not know {command.type}")
            try:
                after = self._after(command.type, command.data)
            except ValueError as problem:
                raise DeviceError(DeviceCode.BAD_PARAMETERS, str(problem)) from None
            self.effects.add(command)
            self.state = after
            self.told("did", command)
            return after

        async def query(command: Command) -> dict[str, Any]:
            self.told("was asked", command)
            return self.state

        device.on("query", effect="at_least_once")(query)
        device.on()(act)

    def told(self, what: str, command: Command) -> None:
        self._tell(
            what,
            {
                "id": command.id,
                "from": command.sender,
                "type": command.type,
                "data": command.data,
                "attempt": command.attempt,
                "state": self.state,
            },
        )


def _tell(json: bool, what: str, more: dict[str, Any]) -> None:
    import msgspec

    now = time.time() * 1000
    if json:
        print_json({"what": what, "time": round(now), **more})
        return
    data = "" if more["data"] is None else " " + msgspec.json.encode(more["data"]).decode()
    state = msgspec.json.encode(more["state"]).decode()
    say(f"{clock(now)}  {what} {more['type']}{data} for {more['from']}  → {state}   [{more['id']}]")


Make = Callable[[Callable[[str], None]], "Device"]
"""Makes a device that says under which name it is online, every time it is."""


def _at_hub(hub: HubClient, name: str, data: str | None, token: str | None, store: Path | None) -> Make:
    """A device at this hub. Without a token of its own it borrows one."""
    from duly.clients.device import Device
    from duly.clients.websocket_link import Access

    access = Access(borrower(hub, name, data) if token is None else None, hub.tls)
    return lambda online: Device(
        hub.url, token or hub.token, data=_memory(store), online=online, access=access
    )


def _through_broker(url: str, name: str, token: str | None, store: Path | None, keys: str | None) -> Make:
    """A device behind an MQTT broker; its name and token are what it logs in with, if the address does not
    say otherwise."""
    from duly.clients.device import Device

    scheme, _, rest = url.partition("://")
    if "@" not in rest:
        login = ":".join(quote(part, safe="") for part in (name, token) if part)
        rest = f"{login}@{rest}"
    where, memory = f"{scheme}://{rest}", _memory(store)
    return lambda online: Device(where, data=memory, name=name, online=online, keys=keys)


def _plain(url: str) -> str:
    """An address without what nobody else need see."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _memory(store: Path | None) -> str | None:
    return None if store is None else str(store.absolute())


async def _run(make: Make, where: str, thing: SimulatedThing, store: Path | None, json: bool) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    impatience = loop.call_later(FIRST_SECONDS, told.set)
    connections = 0

    def online(known_as: str) -> None:
        nonlocal connections
        connections += 1
        impatience.cancel()
        _announce(json, thing, known_as, where, connections)

    device = make(online)
    thing.install(device)
    if store is None and not json:
        say("it has no --store: after a restart it will not know what it has done")
    life = loop.create_task(device.run())
    telling = loop.create_task(told.wait())
    try:
        await asyncio.wait({life, telling}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
            raise CommandFailed(Exit.FAILED, "the device has ended by itself")
        if not connections and loop.time() >= impatience.when():
            raise HubUnreachable(where, "no connection")
    finally:
        for task in (life, telling):
            task.cancel()
        await asyncio.gather(life, telling, return_exceptions=True)
        thing.effects.close()


def _announce(json: bool, thing: SimulatedThing, name: str, url: str, connections: int) -> None:
    import msgspec

    if json:
        print_json({"what": "online", "name": name, "kind": thing.kind, "url": url, "state": thing.state})
        return
    again = "" if connections == 1 else " again"
    state = msgspec.json.encode(thing.state).decode()
    say(f"{clock(time.time() * 1000)}  {name}, a {thing.kind}, is online{again} at {url}  → {state}")
