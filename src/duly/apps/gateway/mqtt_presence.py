"""Presence of MQTT devices: which are online, by their status messages and by their silence.

The laws. A will reports that a device is gone, unless the broker dies as well. So a device that announces how
often it reports is given up after three intervals of silence. A device that does not report again after the
broker lost its sessions, or was restarted by the hub, is given up after a while. About the others the hub
knows only what the broker reports. A will belongs to one connection: the will of an older connection says
nothing about a newer one.

The embedded broker reports which accounts connect. A message from an account that has not connected since the
broker started was sent before that: it waited in the hub's session while the broker was down, and is not
marked as old. It neither brings a device online nor keeps it online. A retained status counts once the device
connects.

A retained status is ignored for a device that has reported since the link connected: the embedded broker may
forward a status and then, in answer to the subscription, the one before it.
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
"""Seconds that a device has to reconnect after the broker was restarted."""

MISSED: Final = 3
"""How many heartbeats may be missed."""

SESSIONS: Final = 20
"""How many of a device's latest sessions are remembered."""


class _OnlineDevice(Struct):
    """A device that has reported that it is online. Times are the loop's."""

    session: str
    """the id of its connection"""
    silence: float
    """seconds of silence after which it is given up; infinite if it does not announce how often it reports"""
    heard: float
    until: float
    doubted: bool = False
    """its broker died, so that only a new connection of the device counts"""


class MqttPresence:
    """The MQTT devices that are online."""

    def __init__(self) -> None:
        self._online: dict[str, _OnlineDevice] = {}
        self._connected: set[str] | None = None
        """accounts connected to the embedded broker; None if the broker does not report them"""
        self._returned: set[str] = set()
        """accounts that have connected to the embedded broker since it started"""
        self._lives = 0
        """how often the broker was restarted"""
        self._sessions: dict[str, dict[str, int]] = {}
        """by device: its sessions, and the run of the broker in which each first appeared"""
        self._new = False
        """the broker is a new one: what it retains was sent since it started"""
        self._lost = -inf
        """when the connection to the broker was lost"""
        self.connection = 0
        """the number of the present connection of the link for reports"""
        self._reported: dict[str, int] = {}
        """by device: the connection on which it last reported, not counting retained reports"""

    @property
    def online(self) -> list[str]:
        """The devices that are online, by name."""
        return list(self._online)

    def session_of(self, name: str) -> str | None:
        """Return the session of an online device, or None."""
        device = self._online.get(name)
        return None if device is None else device.session

    # ── what devices say ─────────────────────────────────────────────────────────────────────────

    def heard(self, name: str) -> None:
        """Note that a device has sent something."""
        device = self._online.get(name)
        if device is not None and not device.doubted and self.has_returned(name):
            device.heard = asyncio.get_running_loop().time()
            device.until = self._silent_at(name, device.silence)

    def came_online(self, name: str, status: FdStatus, old: bool) -> None:
        """Note that a device reports that it is online; `old` if it may have been sent before the broker
        started."""
        now, before = asyncio.get_running_loop().time(), self._online.get(name)
        silence = MISSED * status.heartbeat / SECOND or inf
        if not old or self._new or (self._connected is not None and name in self._connected):
            until = self._silent_at(name, silence)
        elif before is None:  # it may be from before the death of the broker, and of the device
            until = now + GRACE
        else:
            until = before.until
        doubted = old and before is not None and before.doubted
        self._online[name] = _OnlineDevice(status.session, silence, now, until, doubted)

    def went_offline(self, name: str) -> None:
        """Note that a device is offline."""
        self._online.pop(name, None)

    def reported(self, name: str, connection: int) -> None:
        """Note that a device has reported its status on this connection; the report was not a retained
        one."""
        self._reported[name] = connection

    def is_overtaken(self, name: str, connection: int) -> bool:
        """Return whether a retained status that came on this connection is older than a report of the device
        on it."""
        return self._reported.get(name) == connection

    def ends(self, name: str, session: str) -> bool:
        """Return whether the end of this session means that the device is gone: the will of an older
        connection may arrive after the status of a newer one."""
        return self.session_of(name) in (None, session) or not session

    def note_session(self, name: str, session: str) -> None:
        """Remember a session of a device, and the broker's run in which it appeared."""
        sessions = self._sessions.setdefault(name, {})
        sessions.setdefault(session, self._lives)
        if len(sessions) > SESSIONS:
            del sessions[next(iter(sessions))]

    def is_repeat(self, name: str, session: str) -> bool:
        """Return whether a session is from before the broker died. Messages that the hub had not acknowledged
        are sent again, and the embedded broker does not always mark them as repeats."""
        return session != "" and self._sessions.get(name, {}).get(session, self._lives) < self._lives

    def is_former(self, name: str, session: str) -> bool:
        """Return whether a session is from before the broker died and is not even the device's last one."""
        return self.is_repeat(name, session) and self.session_of(name) != session

    # ── what the broker does ─────────────────────────────────────────────────────────────────────

    def watch_connections(self) -> None:
        """Note that the broker is the embedded one, so that `connections` is called for every account that
        connects."""
        self._connected = set()

    def has_returned(self, name: str) -> bool:
        """Return whether an account can have sent something since the broker started: it has connected since,
        or the broker does not report connections."""
        return self._connected is None or name in self._returned

    def broker_restarted(self) -> None:
        """Note that every connection to the broker is gone, together with the wills. A device that is alive
        reconnects and reports; until then all count as online."""
        if self._connected is not None:
            self._connected.clear()
        self._returned.clear()
        self._lives += 1
        self._new = False
        self._doubt(lambda _: True)
        for device in self._online.values():
            device.doubted = True

    async def link_connects(self) -> None:
        """Note that a connection of the link for reports begins."""
        self.connection += 1

    def link_lost(self) -> None:
        """Note that the link for reports has broken."""
        self._lost = asyncio.get_running_loop().time()

    def session_began(self) -> None:
        """Note that the broker did not know the hub's session, so that only retained statuses tell about
        devices that were online."""
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
        """Note that an account has connected to the broker or has no connection left. In the latter case a
        device that promises no heartbeat is given up unless it reconnects, since it may have no will either.
        A device with a heartbeat may be asleep."""
        assert self._connected is not None
        if connected:
            self._connected.add(name)
            self._returned.add(name)
        else:
            self._connected.discard(name)
        device = self._online.get(name)
        if device is not None and device.silence == inf and (connected or not device.doubted):
            device.doubted = False  # it is back: firmware may report that it is online only at its start
            device.until = self._silent_at(name, inf)

    # ── silence ──────────────────────────────────────────────────────────────────────────────────

    def waited_for(self, name: str) -> bool:
        """Return whether a device counts as online but is given up soon unless it sends something."""
        return name in self._online and self._online[name].until < inf

    def _silent_at(self, name: str, silence: float) -> float:
        """Return when a device that was just heard from is given up if it stays silent."""
        gone = self._connected is not None and name not in self._connected
        wait = GRACE if silence == inf and gone else silence
        return asyncio.get_running_loop().time() + wait

    def silent(self) -> list[str]:
        """Return the devices that have been silent for too long."""
        now = asyncio.get_running_loop().time()
        return [name for name, device in self._online.items() if device.until <= now]
