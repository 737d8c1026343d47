"""The heartbeat of a sentinel: promises the tower regular heartbeats, and reports how many signals were held
back.

The law: the tower expects heartbeats until it has stored that the promise was withdrawn. Held-back signals
are reported soon afterwards, many in one heartbeat.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from duly.clients.base import HubLink, fail, settle
from duly.clients.sentinel_alerts import SentinelAlerts
from duly.core.monitor.signals import HEARTBEAT
from duly.errors import ConnectionLost, ConnectionRefused
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.wire import frames
from duly.wire.frames import Frame

HELD_SECONDS: Final = 1.0
"""How soon held-back signals are reported to the tower, together with those that follow meanwhile."""
STAND_DOWN: Final = "stand-down"
"""The id of the heartbeat that withdraws the promise."""
NOT_TOLD: Final = "the tower cannot be reached; it expects the heartbeat until it is told"


class SentinelHeartbeat:
    """The heartbeats of one sentinel, one `every` so many milliseconds. `link` and `tasks` return those of
    the sentinel's last start."""

    def __init__(
        self,
        link: Callable[[], HubLink],
        tasks: Callable[[], Supervisor],
        alerts: SentinelAlerts,
        profile: str,
        every: int,
    ) -> None:
        self._link = link
        self._tasks = tasks
        self._alerts = alerts
        self._profile = profile
        self._every = every
        self._run = secrets.token_hex(8)
        self._telling: SupervisedTask | None = None
        self._stood_down: asyncio.Future[None] | None = None
        """done when the tower knows that the promise was withdrawn; None if it was not"""
        self._told: dict[str, int] = {}
        """the held-back counts that the tower was sent"""

    def beat(self) -> None:
        """Send a heartbeat that is due, unless the promise was withdrawn."""
        if self._stood_down is None:
            self._send(self._every)

    def stand_down(self) -> asyncio.Future[None]:
        """Withdraw the promise; the future is done when the tower has stored that."""
        if self._stood_down is None or self._stood_down.done():
            self._stood_down = asyncio.get_running_loop().create_future()
        self._send(0, STAND_DOWN)
        return self._stood_down

    def connected(self) -> None:
        """Tell a tower that may have forgotten it how many signals were held back."""
        self._told = {}
        self.report_held_back()

    def disconnected(self) -> None:
        """Fail a `stand_down` that the tower has not answered."""
        if self._stood_down is not None:
            fail(self._stood_down, ConnectionLost(NOT_TOLD))

    def report_held_back(self) -> None:
        """Report soon how many signals were held back, if the tower does not know yet."""
        if self._telling is None and self._link().connected and self._told != self._alerts.counts.held_back:
            self._telling = self._tasks().after(
                "telling what was held back", HELD_SECONDS, self._send_held_back
            )

    def answered(self, frame: Frame) -> bool:
        """Handle a `server_ack`; returns whether it answers a heartbeat."""
        if frame.seq_id is None:
            if frame.error:
                self._alerts.say("refused", detail=f"the heartbeat: {frame.error}: {frame.detail or ''}")
            return True
        if frame.seq_id != STAND_DOWN or self._stood_down is None:
            return False
        if frame.error:
            fail(self._stood_down, ConnectionRefused(f"the tower did not take it: {frame.detail}"))
        else:
            settle(self._stood_down, None)
            self._alerts.say("stood down", detail="the tower expects no heartbeat")
        return True

    async def _send_held_back(self) -> None:
        self._telling = None
        # To a profile that demands heartbeats, one without a promise is a sign of life: more are expected.
        self._send(None if self._stood_down is None else 0)

    def _send(self, every: int | None, id_: str | None = None) -> None:
        """Send a heartbeat, and promise the next one within `every` milliseconds; 0 withdraws the promise,
        None leaves it unchanged. A heartbeat with an id is answered."""
        held = self._told = self._alerts.counts.held_back
        reported = {"run": self._run, "held": held} if held else {}
        beat = frames.dump({"profile_id": self._profile, "every": every} | reported)
        self._link().send(frames.encode(Frame(HEARTBEAT, id_, data=frames.raw(beat))))
