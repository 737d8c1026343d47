"""Which MQTT devices are online, by their own word and by their silence.

The laws. A will tells when a device is gone, unless the broker dies with it. So a device that says how often
it reports is given up after three times that in silence; and one that is not heard of again after the broker
has forgotten its sessions, or was started anew by the hub, after a while. Of the others the hub knows only
what the broker says. A will belongs to its own connection: the will of an older one says nothing of a newer.

The embedded broker says who connects. What it hands out of an account that has not connected since the broker
was started was said before: it waited in the hub's session while the broker died, and it is not marked. It
does not bring a device online, and does not keep it online. What the broker retains of a device counts once
the device connects.

A retained status says nothing of a device that has reported since the link was connected: the embedded broker
may pass a status on and then, as the answer to the subscription, the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

from msgspec import Struct

from duly.core.units import SECOND
from duly.wire.fd import FdStatus

GRACE: Final = 30.0
"""Seconds that a device has to come back after the broker was started anew."""

MISSED: Final = 3
"""Heartbeats that may be missed."""

SESSIONS: Final = 20
"""The latest sessions of a device that are remembered."""


class _OnlineDevice(Struct):
    """A device that is online, by its own word. Times are the loop's."""

    session: str
    """which of its connections this is"""
    silence: float
    """seconds of silence after which it is given up; infinite, if it does not say how often it reports"""
    heard: float
    until: float
    doubted: bool = False
    """its broker died: only a new connection of the device is news of it"""


class MqttPresence:
    """The MQTT devices that are online."""

    def __init__(self) -> None:
        self._online: dict[str, _OnlineDevice] = {}
        self._connected: set[str] | None = None
        """accounts that have a connection to the embedded broker; None if there is none that tells"""
        self._returned: set[str] = set()
        """accounts that have connected to the embedded broker since it was started"""
        self._lives = 0
        """how often the broker was started anew"""
        self._sessions: dict[str, dict[str, int]] = {}
        """the sessions of each device, and in which life of the broker each was heard of first"""
        self._new = False
        """the broker is a new one: what it keeps was said since it started"""
        self._lost = -inf
        """when the broker was lost"""
        self.connection = 0
        """which connection of the link for reports this is"""
        self._reported: dict[str, int] = {}
        """the connection on which each device has last reported, as far as the broker had not kept that"""

    @property
    def online(self) -> list[str]:
        """The devices that are online, by name."""
        return list(self._online)

    def session_of(self, name: str) -> str | None:
        """The session of a device that is online; None if it is not."""
        device = self._online.get(name)
        return None if device is None else device.session

    # ── what devices say ─────────────────────────────────────────────────────────────────────────

    def heard(self, name: str) -> None:
        """A device has said something, whatever it was."""
        device = self._online.get(name)
        if device is not None and not device.doubted and self.has_returned(name):
            device.heard = asyncio.get_running_loop().time()
            device.until = self._silent_at(name, device.silence)

    def came(self, name: str, status: FdStatus, old: bool) -> None:
        """A device says that it is online; `old` if that may have been said before the broker started."""
        now, before = asyncio.get_running_loop().time(), self._online.get(name)
        silence = MISSED * status.heartbeat / SECOND or inf
        if not old or self._new or (self._connected is not None and name in self._connected):
            until = self._silent_at(name, silence)
        elif before is None:  # it may be from before the broker died, and the device with it
            until = now + GRACE
        else:
            until = before.until
        doubted = old and before is not None and before.doubted
        self._online[name] = _OnlineDevice(status.session, silence, now, until, doubted)

    def went(self, name: str) -> None:
        """A device is offline."""
        self._online.pop(name, None)

    def reported(self, name: str, connection: int) -> None:
        """A device has reported its status on this connection; the broker had not kept it."""
        self._reported[name] = connection

    def is_overtaken(self, name: str, connection: int) -> bool:
        """Whether a status that the broker had kept, and sent on this connection, is older than what the
        device has reported on it."""
        return self._reported.get(name) == connection

    def ends(self, name: str, session: str) -> bool:
        """Whether the end of this session means that the device is gone: the will of an older connection may
        land after the news of a newer one."""
        return self.session_of(name) in (None, session) or not session

    def note_session(self, name: str, session: str) -> None:
        """Remember a session of a device that was heard of, and in which life of the broker."""
        sessions = self._sessions.setdefault(name, {})
        sessions.setdefault(session, self._lives)
        if len(sessions) > SESSIONS:
            del sessions[next(iter(sessions))]

    def is_repeat(self, name: str, session: str) -> bool:
        """Whether a session is from before the broker died, and no news. What the hub had not acknowledged by
        then comes again, and the embedded broker does not always mark it as a repeat."""
        return session != "" and self._sessions.get(name, {}).get(session, self._lives) < self._lives

    def is_former(self, name: str, session: str) -> bool:
        """Whether a session is from before the broker died, and not even the device's last one."""
        return self.is_repeat(name, session) and self.session_of(name) != session

    # ── what the broker does ─────────────────────────────────────────────────────────────────────

    def watch_connections(self) -> None:
        """The broker is the embedded one: `connections` is called for every account that connects."""
        self._connected = set()

    def has_returned(self, name: str) -> bool:
        """Whether an account can have said something since the broker was started: it has connected since, or
        the broker does not tell."""
        return self._connected is None or name in self._returned

    def broker_restarted(self) -> None:
        """Note that every connection to the broker is gone, with the wills. A device that lives comes back
        and says so; until then all count as online."""
        if self._connected is not None:
            self._connected.clear()
        self._returned.clear()
        self._lives += 1
        self._new = False
        self._doubt(lambda _: True)
        for device in self._online.values():
            device.doubted = True

    async def link_connects(self) -> None:
        """A connection of the link for reports begins."""
        self.connection += 1

    def link_lost(self) -> None:
        """The link for reports has broken."""
        self._lost = asyncio.get_running_loop().time()

    def session_began(self) -> None:
        """The broker did not know the hub's session: a device that was here before is known only by what was
        kept of it."""
        self._new = True
        for device in self._online.values():
            if not device.doubted:
                device.until = device.heard + device.silence
        self._doubt(lambda device: device.heard < self._lost)

    def _doubt(self, which: Callable[[_OnlineDevice], bool]) -> None:
        until = asyncio.get_running_loop().time() + GRACE
        for device in filter(which, self._online.values()):
            device.until = min(device.until, until)

    def connections(self, name: str, connected: bool) -> None:
        """The broker says that an account has a connection, or none any more. A device that promises no
        heartbeat is then given up, unless it comes back: it may have no will either. One that does may
        sleep."""
        assert self._connected is not None
        if connected:
            self._connected.add(name)
            self._returned.add(name)
        else:
            self._connected.discard(name)
        device = self._online.get(name)
        if device is not None and device.silence == inf and (connected or not device.doubted):
            device.doubted = False  # it is back: firmware may say only at its start that it is online
            device.until = self._silent_at(name, inf)

    # ── silence ──────────────────────────────────────────────────────────────────────────────────

    def waited_for(self, name: str) -> bool:
        """Whether a device counts as online and is given up soon unless it is heard."""
        return name in self._online and self._online[name].until < inf

    def _silent_at(self, name: str, silence: float) -> float:
        """When a device that has just been heard is given up, if it says nothing more."""
        gone = self._connected is not None and name not in self._connected
        wait = GRACE if silence == inf and gone else silence
        return asyncio.get_running_loop().time() + wait

    def silent(self) -> list[str]:
        """The devices that have been silent for too long."""
        now = asyncio.get_running_loop().time()
        return [name for name, device in self._online.items() if device.until <= now]
