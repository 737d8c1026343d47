"""A device's connection through an MQTT broker: to its hub it is a node of FD, the task protocol over MQTT.

The law is that of `duly.clients.websocket_link`, with one addition: a task is acknowledged, to the broker
(PUBACK) and to the hub (`ack`), when it is stored here, not before. Pushes go out on the device's own status
topic, since no other account may write there. The status contains how often it is renewed: a broker that dies
publishes no wills, and then only a missing status shows that the device is gone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from duly.core.signing import Keyring
from duly.core.units import MS, seconds
from duly.errors import ConnectionRefused, DulyError, Malformed, NotAuthenticated, SenderError
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink, Will
from duly.wire import fd, frames
from duly.wire.fd import FdKind
from duly.wire.fd_signatures import FdSignatures
from duly.wire.frames import Frame, ServerCode
from duly.wire.task_ids import read_task_id

HEARTBEAT: Final = 60
"""Seconds between two reports of the device's status."""

TASKS_KEPT: Final = 4_096
"""How many unanswered commands have their msg_id remembered."""
SUBSCRIBED: Final = (FdKind.PENDING, FdKind.ACK, FdKind.FAILED)
"""The topics of commands and of the hub's answers to pushes."""


class MqttDeviceLink:
    """A link for URLs like mqtt://lock-1:token@host. With `keys` everything it sends is signed."""

    denial = None

    def __init__(
        self,
        url: str,
        *,
        up: Callable[[Frame], None],
        heard: Callable[[Frame, Callable[[], None]], None],
        now: Callable[[], int],
        name: str = "",
        keys: Keyring | None = None,
    ) -> None:
        address = BrokerAddress.parse(url)
        self.name = fd.check_username(name or address.username)
        self._up = up
        self._heard = heard
        self._now = now
        self._session = ""
        self.tasks = Supervisor()
        self._beating: SupervisedTask | None = None
        self._signatures = None if keys is None else FdSignatures(keys)
        self._tasks: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()
        """the sender and msg_id of each unanswered command; after a restart the hub sends them again"""
        self._link = MqttLink(
            address,
            self._arrived,
            subscriptions=[fd.topic_of(fd.PREFIX, self.name, kind) for kind in SUBSCRIBED],
            will=self._will,
            on_connect=self._connected,
            on_disconnect=lambda _: self._stop_beating(),
        )

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection."""
        return self._link.up

    async def start(self) -> None:
        """Begin to connect."""
        await self._link.start()

    async def ready(self) -> Frame:
        """Wait until the broker has accepted the connection. Raises `NotAuthenticated` if it does not."""
        try:
            await self._link.connected(within=30)
        except ConnectionRefused as problem:
            raise NotAuthenticated(str(problem)) from None
        return Frame("welcome", you=self.name)

    async def stop(self) -> None:
        """Report offline and disconnect: the will is only for connections that break."""
        await self.tasks.stop()
        if self._link.up:
            with suppress(DulyError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._link.publish(
                        self._topic(self.name, FdKind.STATUS), self._status(online=False), retain=True
                    )
        await self._link.stop()

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _will(self) -> Will:
        """Return the will of the next connection: it names the same session as that connection's status."""
        self._session = secrets.token_hex(8)
        return Will(self._topic(self.name, FdKind.STATUS), self._status(online=False))

    def _connected(self, session_present: bool) -> None:
        self._stop_beating()
        self._say_online()
        self._beating = self.tasks.every("heartbeat", HEARTBEAT, self._beat)
        self._up(Frame("welcome", you=self.name))

    async def _beat(self) -> None:
        self._say_online()

    def _say_online(self) -> None:
        self._link.post(self._topic(self.name, FdKind.STATUS), self._status(online=True), retain=True)

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.kill()
            self._beating = None

    def _arrived(self, topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
        try:
            _, kind = fd.parse_topic(fd.PREFIX, topic)
            if kind is not FdKind.PENDING:
                ack()
                self._heard(_push_ack(kind, payload), ack)
                return
            task = fd.decode_pending(payload)
            id_ = read_task_id(task.msg_id)
            if task.receiver and task.receiver != self.name:
                ack()  # it is for another node: it is not run and not answered
                return
        except SenderError:
            ack()
            return
        frame = Frame(
            task.action,
            id_.seq_id,
            from_=id_.app,
            data=frames.raw(task.payload.json),
            exp=task.exp // MS if task.exp else None,
            order=frames.load_order(task.order),
            traceparent=task.traceparent or None,
        )
        self._tasks[id_.app, id_.seq_id] = (task.sender, task.msg_id)
        if len(self._tasks) > TASKS_KEPT:
            self._tasks.popitem(last=False)

        def stored() -> None:
            self._answer(task.sender, FdKind.ACK, fd.FdAck(task.msg_id))
            ack()

        self._heard(frame, stored)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, frame: bytes) -> None:
        """Send an ack or a push; without a connection it is lost. A push is also dropped until the link is
        up: one that its timer repeats would overtake those that are sent again then."""
        said = frames.decode(frame)
        if said.type != "ack":
            if not self.connected:
                return
            push = msgspec.json.encode({"type": said.type, "data": said.data or None, "seq_id": said.seq_id})
            self._link.post(self._topic(self.name, FdKind.STATUS), self._status(online=True, data=push))
            return
        command = (said.to or "", said.seq_id or "")
        hub, msg_id = self._tasks.get(command, ("", ""))
        if not msg_id:
            return  # the msg_id is not known any more; the hub sends the command again
        if frames.is_working(said):
            progress = fd.Content(bytes(said.progress) or b"true")
            self._answer(hub, FdKind.ACK, fd.FdAck(msg_id, progress=progress))
            return
        del self._tasks[command]
        if said.code == 0:
            self._answer(hub, FdKind.COMPLETE, fd.FdComplete(msg_id, fd.Content(bytes(said.data))))
            return
        why = {"code": said.code, "detail": said.detail or "", "state": said.state}
        self._answer(hub, FdKind.FAILED, fd.FdFailed(msg_id, fd.Content(msgspec.json.encode(why))))

    def _answer(self, to: str, kind: FdKind, answer: fd.FdAck | fd.FdComplete | fd.FdFailed) -> None:
        signed = answer if self._signatures is None else self._signed(self._signatures, answer, to)
        self._link.post(self._topic(to, kind), fd.encode(signed))

    def _signed(
        self, signatures: FdSignatures, answer: fd.FdAck | fd.FdComplete | fd.FdFailed, to: str
    ) -> fd.Fd:
        match answer:
            case fd.FdAck():
                return signatures.sign(answer, to)
            case fd.FdComplete():
                return signatures.sign(answer, to)
            case fd.FdFailed():
                return signatures.sign(answer, to)

    def _topic(self, username: str, kind: FdKind) -> str:
        return fd.topic_of(fd.PREFIX, username, kind)

    def _status(self, *, online: bool, data: bytes = b"") -> bytes:
        status = fd.FdStatus(
            self._now(),
            online,
            session=self._session,
            data=fd.Content(data),
            heartbeat=seconds(HEARTBEAT) if online else 0,
        )
        return fd.encode(status) if self._signatures is None else self._signatures.encode(status)


def _push_ack(kind: FdKind, payload: bytes) -> Frame:
    """Return the hub's answer to a push as a `server_ack`."""
    match fd.decode(kind, payload):
        case fd.FdAck(msg_id=seq_id):
            return Frame("server_ack", seq_id, code=ServerCode.ACCEPTED)
        case fd.FdFailed(msg_id=seq_id, error=error):
            why = error.value if isinstance(error.value, dict) else {}
            code = why.get("code")
            return Frame(
                "server_ack",
                seq_id,
                code=code if isinstance(code, int) else ServerCode.BAD_PARAMETERS,
                error=str(why.get("error", "")),
                detail=str(why.get("detail", "")),
            )
        case other:
            raise Malformed(f"{type(other).__name__} does not answer a push")
