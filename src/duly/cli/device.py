"""`duly device`: a simulated lock or lamp, built on `duly.Device` like any other.

The law: one line in the effects file is one effect, flushed to the disk before it is reported. To check that
an effect happened once, count the lines; nothing else here is evidence.

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
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, unquote

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    HubClient,
    HubUnreachable,
    JsonObject,
    clock,
    print_json,
    say,
    settings_of,
)
from duly.cli.options import HubOptions, Json, SignWith, grouped
from duly.cli.temporary_token import access_source, check_account
from duly.errors import DeviceError

if TYPE_CHECKING:
    from duly.clients.device import Command, Device

FIRST_SECONDS = 10.0


class DeviceKind(StrEnum):
    """The kinds of devices that can be simulated."""

    LOCK = "lock"
    LAMP = "lamp"


@grouped
def device(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    kind: Annotated[
        DeviceKind, typer.Option("--kind", metavar="lock|lamp", help="What it simulates.")
    ] = DeviceKind.LOCK,
    effects: Annotated[
        Path | None,
        typer.Option("--effects", metavar="FILE", help="A file that gets a line for each effect. [none]"),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="FILE",
            help="The file that remembers what it did. [in the data folder; with --url none]",
        ),
    ] = None,
    keys: SignWith = None,
    *,
    at: HubOptions,
    json: Json = False,
) -> None:
    """Simulate a lock or a lamp.

    A lock understands lock_control {"open": true}, a lamp dev_control {"on": true} or {"toggle": true}; both
    understand query, and any other command only writes its line. It needs an account: 'duly add device NAME'.
    Without --token it uses the hub on this machine; with --url mqtt://HOST:PORT (over WebSocket:
    mqtt+ws://HOST:PORT) it goes through a broker, and with --keys it signs what it sends. Ctrl-C stops it.
    """
    thing = SimulatedThing(kind.value, Effects(effects), lambda what, more: _tell(json, what, more))
    if at.url is not None and at.url.startswith("mqtt"):
        make = _through_broker(at.url, name, at.token, store, keys)
        asyncio.run(_run(make, _plain(at.url), thing, store, json))
        return
    hub = at.need()
    if at.token is None:
        check_account(hub, name, "device")
    if store is None and hub.local:
        store = Path(settings_of(at.folder).data) / f"device-{name}.db"
    asyncio.run(_run(_at_hub(hub, name, at, store), hub.url, thing, store, json))


class Effects:
    """The effects file: one line for each effect, on the disk before it is reported."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd: int | None = None

    def read(self) -> list[tuple[str, str, str, object]]:
        """Return (id, sender, type, data) of every whole line."""
        from duly.wire import any_json

        if self._path is None or not self._path.exists():
            return []
        found = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            parts = line.split(b" ", 4)
            if line.endswith(b"\n") and len(parts) == 5:
                _, id_, sender, type_, data = parts
                found.append((unquote(id_.decode()), sender.decode(), type_.decode(), any_json.read(data)))
        return found

    def add(self, command: Command) -> None:
        """Append a line, and flush it to the disk."""
        from duly.wire import any_json

        if self._path is None:
            return
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        id_ = quote(command.id, safe=":_-.~+=@,/")  # ids of other programs may hold blanks
        head = f"{at} {id_} {command.sender} {command.type} ".encode()
        os.write(self._fd, head + any_json.write(command.data) + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SimulatedThing:
    """The lock or lamp itself; its state follows from all effects so far."""

    def __init__(self, kind: str, effects: Effects, tell: Callable[[str, JsonObject], None]) -> None:
        self.kind = kind
        self.effects = effects
        self.state: JsonObject = {"open": False} if kind == "lock" else {"on": False}
        self._tell = tell
        for _, _, type_, data in effects.read():
            with contextlib.suppress(ValueError):
                self.state = self._after(type_, data)

    @property
    def main(self) -> str:
        """The command type that changes it."""
        return "lock_control" if self.kind == "lock" else "dev_control"

    def _after(self, type_: str, data: object) -> JsonObject:
        """Return the state after a command. Raises `ValueError` if the command makes no sense."""
        if type_ != self.main:
            return self.state
        (key,) = ("open",) if self.kind == "lock" else ("on",)
        if isinstance(data, dict) and isinstance(data.get(key), bool):
            return self.state | data
        if isinstance(data, dict) and data.get("toggle") is True:
            return self.state | {key: not self.state[key]}
        raise ValueError(f'say what to do: {{"{key}":true}}, {{"{key}":false}} or {{"toggle":true}}')

    def install(self, device: Device) -> None:
        """Handle a device's commands."""
        from duly.wire.frames import DeviceCode

        other = "dev_control" if self.kind == "lock" else "lock_control"

        async def act(command: Command) -> JsonObject:
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

        async def query(command: Command) -> JsonObject:
            self.told("was asked", command)
            return self.state

        device.on("query", effect="at_least_once")(query)
        device.on()(act)

    def told(self, what: str, command: Command) -> None:
        """Print what a command did."""
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


def _tell(json: bool, what: str, more: JsonObject) -> None:
    import msgspec

    now = time.time() * 1000
    if json:
        print_json({"what": what, "time": round(now), **more})
        return
    data = "" if more["data"] is None else " " + msgspec.json.encode(more["data"]).decode()
    state = msgspec.json.encode(more["state"]).decode()
    say(f"{clock(now)}  {what} {more['type']}{data} for {more['from']}  → {state}   [{more['id']}]")


Make = Callable[[Callable[[str], None]], "Device"]
"""Makes a device; the callback gets its name at every connection."""


def _at_hub(hub: HubClient, name: str, at: HubOptions, store: Path | None) -> Make:
    """Make a device at this hub. Without a token of its own it uses a temporary one."""
    from duly.clients.device import Device
    from duly.clients.websocket_link import Access

    access = Access(access_source(hub, name, at.folder) if at.token is None else None, hub.tls)
    return lambda online: Device(
        hub.url, at.token or hub.token, store=_memory(store), online=online, access=access
    )


def _through_broker(url: str, name: str, token: str | None, store: Path | None, keys: str | None) -> Make:
    """Make a device behind an MQTT broker. It logs in with its name and token, unless the address has a
    login."""
    from duly.clients.device import Device

    scheme, _, rest = url.partition("://")
    if "@" not in rest:
        login = ":".join(quote(part, safe="") for part in (name, token) if part)
        rest = f"{login}@{rest}"
    where, memory = f"{scheme}://{rest}", _memory(store)
    return lambda online: Device(where, store=memory, name=name, online=online, keys=keys)


def _plain(url: str) -> str:
    """Return an address without its login."""
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
