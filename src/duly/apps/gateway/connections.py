"""Connections of the gateway: greets apps and devices, says goodbye, and informs apps whose grants change.

The laws. A device has one connection, its newest, at whichever hub: an older one is closed. The commands that
wait for a device begin once the hub is registered as the one that has it.
"""

from __future__ import annotations

from typing import Final

from duly.apps.gateway.device_list import DeviceList
from duly.apps.gateway.pushes import PushService, stream_of
from duly.apps.gateway.remote_hubs import GatewayRemote
from duly.apps.gateway.revoked_commands import RevokedCommands
from duly.apps.gateway.sessions import GatewaySessions
from duly.apps.gateway.shared_tokens import SharedTokens
from duly.core.steps import Reachable, Unreachable
from duly.core.units import MS
from duly.errors import LedgerError
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger
from duly.storage.restored_streams import RestoredStreams
from duly.wire.outgoing import WelcomeFrame
from duly.wire.session import Session

REPLACED: Final = "replaced by a newer connection of the same device"


class GatewayConnections:
    """Connects and disconnects the apps and devices of one gateway."""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        engine: Engine,
        sessions: GatewaySessions,
        devices: DeviceList,
        pushes: PushService,
        remote: GatewayRemote,
        revoked: RevokedCommands,
        shared_tokens: SharedTokens,
    ) -> None:
        self._ledger = ledger
        self._restored = RestoredStreams(ledger)
        self._accounts = accounts
        self._engine = engine
        self._sessions = sessions
        self._devices = devices
        self._pushes = pushes
        self._remote = remote
        self._revoked = revoked
        self._shared_tokens = shared_tokens

    async def connect(
        self, session: Session, who: Principal, cursors: dict[str, int] | None, *, heard: bool
    ) -> None:
        """Welcome an app or a device that has authenticated, and send what it missed. With `heard` off, only
        a retained message at the broker says that the device is online."""
        if who.role is Role.DEVICE:
            await self._connect_device(session, who, heard=heard)
            return
        granted = sorted(self._accounts.granted(who.name))
        streams = {device: stream_of(device) for device in granted}
        seen, generation = await self._restored.valid(cursors or {}, streams)
        lasts = await self._ledger.lasts(list(streams.values()))
        heads = {device: lasts.get(stream, 0) for device, stream in streams.items()}
        told = {d: min(max(seen.get(d, head), 0), head) for d, head in heads.items()}
        begins = heads | {d: told[d] for d in seen if told[d] < (cursors or {})[d]} | generation
        session.push(self._welcome(who, begins, self._devices.online_of(who.name, self._remote.is_awaited)))
        self._sessions.add_app(who.name, session)
        self._pushes.enter(session, told)

    async def _connect_device(self, session: Session, who: Principal, *, heard: bool) -> None:
        name, devices = who.name, self._sessions.devices
        if heard:
            self._devices.heard(name)
        new = await self._remote.register(name)
        before = devices.get(name)
        devices[name] = session
        if before is not None:
            new = False
            before.close(REPLACED)
            if heard:  # the hub itself renews the session of an MQTT device
                self._shared_tokens.note(name)
        session.push(self._welcome(who, {}))
        try:
            await self._remote.fetch_for(name)
        except LedgerError:
            if devices.get(name) is session:
                del devices[name]  # the device was never reachable here
            raise
        if devices.get(name) is not session:
            return  # the device has left meanwhile, or reconnected
        await self._revoked.end_predecessors(name)
        await self._engine.put(Reachable(name))
        if devices.get(name) is session:
            await self._remote.tell_online(name, new=new)

    def _welcome(
        self, who: Principal, cursors: dict[str, int], online: list[str] | None = None
    ) -> WelcomeFrame:
        return WelcomeFrame(who.name, self._ledger.clock.now() // MS, cursors, online)

    async def disconnect(self, session: Session, who: Principal) -> None:
        """Remove a session that has ended."""
        self._pushes.leave(session)
        self._sessions.remove_app(who.name, session)
        devices = self._sessions.devices
        if devices.get(who.name) is session:
            del devices[who.name]
            await self._engine.put(Unreachable(who.name))
            if who.name in devices:  # the device has reconnected meanwhile, and is registered
                await self._engine.put(Reachable(who.name))
            else:
                await self._remote.unregister(who.name, *self._devices.left(who.name))

    async def replace(self, device: str) -> None:
        """Close the session of a device that has connected to another hub."""
        session = self._sessions.devices.pop(device, None)
        if session is not None:
            session.close(REPLACED)
            await self._engine.put(Unreachable(device))
            self._shared_tokens.note(device)

    async def tell_grants(self) -> None:
        """Inform connected apps of devices that they lost or were granted."""
        for app, sessions in self._sessions.apps.items():
            for session in sessions:
                self._pushes.withdraw(session, self._accounts.granted(app), self._exists)
        for session, device in self._sessions.grants():
            if not self._pushes.knows(session, device):
                await self._pushes.introduce(session, device, self._believed_online)

    def _exists(self, device: str) -> bool:
        return self._accounts.stored_role(device) is not None

    def _believed_online(self, device: str) -> bool:
        here = device in self._sessions.devices
        return here or self._remote.holds(device) or self._remote.is_awaited(device)

    def conflicts(self) -> list[str]:
        """Return a sentence about each device whose token two clients use at the same time."""
        return self._shared_tokens.conflicts()
