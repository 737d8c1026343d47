"""A device's connection through an MQTT broker: to its hub it is an FD node (seed 001).

The law is that of `duly.clients.link`, with one thing more: a task is acknowledged, to the broker (PUBACK)
and to the hub (`ack`), when it is stored here, not before. What a device pushes rides on its own status
topic, the only one that nobody else may write. It says how often it says that it is there: a broker that
dies takes the wills with it, and then only silence tells.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from duly.core.units import MS, SECOND, seconds
from duly.dialects import fd, frames
from duly.dialects.fd import Kind
from duly.dialects.frames import Frame
from duly.errors import ConnectionRefused, DulyError, NotAuthenticated, SenderError
from duly.transports.address import Address
from duly.transports.mqtt import MqttLink, Will

HEARTBEAT: Final = 60


class FdLink:
    """The same as `Link`, for a URL like mqtt://lock-1:token@host."""

    def __init__(
        self,
        url: str,
        *,
        up: Callable[[Frame], None],
        heard: Callable[[Frame, Callable[[], None]], None],
        name: str = "",
        prefix: str = fd.PREFIX,
    ) -> None:
        address = Address.parse(url)
        self.name = fd.check_username(name or address.username)
        self._up = up
        self._heard = heard
        self._prefix = prefix
        self._session = ""
        self._beating: asyncio.TimerHandle | None = None
        self._senders: dict[str, str] = {}
        self._link = MqttLink(
            address,
            self._arrived,
            subscriptions=[fd.topic_of(prefix, self.name, Kind.PENDING)],
            will=self._will,
            on_connect=self._connected,
            on_disconnect=lambda _: self._still(),
        )

    @property
    def connected(self) -> bool:
        return self._link.up

    async def start(self) -> None:
        await self._link.start()

    async def ready(self) -> Frame:
        try:
            await self._link.connected(within=30)
        except ConnectionRefused as problem:
            raise NotAuthenticated(str(problem)) from None
        return Frame("welcome", you=self.name)

    async def stop(self) -> None:
        """Say goodbye properly: the will is for those who cannot."""
        self._still()
        if self._link.up:
            with suppress(DulyError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._link.publish(
                        self._topic(self.name, Kind.STATUS), self._status(online=False), retain=True
                    )
        await self._link.stop()

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _will(self) -> Will:
        """For the connection that is about to be made: its will and its news are of one session."""
        self._session = secrets.token_hex(8)
        return Will(self._topic(self.name, Kind.STATUS), self._status(online=False))

    def _connected(self, session_present: bool) -> None:
        self._beat()
        self._up(Frame("welcome", you=self.name))

    def _beat(self) -> None:
        self._link.post(self._topic(self.name, Kind.STATUS), self._status(online=True), retain=True)
        self._beating = asyncio.get_running_loop().call_later(HEARTBEAT, self._beat)

    def _still(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    def _arrived(self, topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
        try:
            task = fd.decode_pending(payload)
            app, colon, seq_id = task.msg_id.partition(":")
            if not colon or (task.receiver and task.receiver != self.name):
                ack()  # not a command of a hub, or not for us: nothing to run and nothing to say
                return
        except SenderError:
            ack()
            return
        value = task.payload.value
        frame = Frame(
            task.action,
            seq_id,
            from_=app,
            data=frames.dump(value),
            exp=task.exp // MS if task.exp else None,
            order=frames.load_order(task.order),
        )
        self._senders[task.msg_id] = task.sender

        def stored() -> None:
            self._link.post(self._topic(task.sender, Kind.ACK), fd.encode(fd.Ack(task.msg_id)))
            ack()

        self._heard(frame, stored)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, frame: bytes) -> None:
        said = frames.decode(frame)
        if said.type != "ack":
            push = msgspec.json.encode({"type": said.type, "data": frames.load(said.data)})
            self._link.post(self._topic(self.name, Kind.STATUS), self._status(online=True, data=push))
            return
        msg_id = f"{said.to}:{said.seq_id}"
        if frames.is_working(said):
            hub = self._senders.get(msg_id, "hub")
            progress = fd.Content(bytes(said.progress) or b"true")
            self._link.post(self._topic(hub, Kind.ACK), fd.encode(fd.Ack(msg_id, progress=progress)))
            return
        hub = self._senders.pop(msg_id, "hub")
        if said.code == 0:
            self._link.post(
                self._topic(hub, Kind.COMPLETE), fd.encode(fd.Complete(msg_id, fd.Content(bytes(said.data))))
            )
            return
        why = {"code": said.code, "detail": said.detail or "", "state": said.state}
        self._link.post(
            self._topic(hub, Kind.FAILED), fd.encode(fd.Failed(msg_id, fd.Content(msgspec.json.encode(why))))
        )

    def _topic(self, username: str, kind: Kind) -> str:
        return fd.topic_of(self._prefix, username, kind)

    def _status(self, *, online: bool, data: bytes = b"") -> bytes:
        now = round(time.time()) * SECOND
        status = fd.Status(
            now,
            online,
            session=self._session,
            data=fd.Content(data),
            heartbeat=seconds(HEARTBEAT) if online else 0,
        )
        return fd.encode(status)
