"""Plays the peer of an MQTT client: the hub of a device, or the other nodes of a node."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec

from duly.errors import Malformed
from duly.testing.conform import receiver
from duly.testing.conform.frame_server import CONNECTED, now_ms
from duly.testing.conform.heard_pushes import HeardPushes
from duly.testing.conform.mqtt_server import MqttClient, MqttMessage, MqttServer, matches
from duly.testing.conform.receiver import OWN_FIELDS, ConformTask, HeardAnswer
from duly.testing.conform.relayed_tasks import PEER, RelayedTasks
from duly.testing.conform.rules import BrokenRule, NotChecked
from duly.wire import fd
from duly.wire.fd import FdKind
from duly.wire.fd_content import content_of

HUB: Final = "hub"
STATUS_WITHIN: Final = 5.0
_OLD: Final = {
    "sender": "sender_client_id",
    "receiver": "receiver_client_id",
    "msg_id": "message_id",
    "time": "timestamp",
    "exp": "expiration",
}
_NONSENSE: Final = (
    b"this is not JSON",
    b"",
    b"{}",
    b"[1,2,3]",
    b"null",
    b"17",
    b"\xff\xfe\x00",
    b'{"sender":"phone","msg_id":17,"action":"count"}',
    b'{"sender":"a/b","receiver":"","msg_id":"x","action":"count","exp":9999999999}',
    b'{"sender":"phone","action":"count","exp":9999999999}',
    b'{"sender":"hub","msg_id":"phone:1_2:AAAAAAAAAAAAAAAAAAAAAAAA","action":"count","exp":1,'
    b'"order":{"key":"door","after":"first"}}',
    b'{"sender":"hub","msg_id":"phone:1_3:AAAAAAAAAAAAAAAAAAAAAAAA","action":"count","exp":"soon"}',
    b'{"sender":"hub","msg_id":"phone:1_4:AAAAAAAAAAAAAAAAAAAAAAAA","action":"count","exp":9999999999',
)


class FdPeer:
    """Publishes tasks for the receiver `name`, and reads its answers. A hub's tasks (`is_hub`) have a tag in
    their id, and are answered at the hub's topics."""

    def __init__(self, server: MqttServer, name: str, *, is_hub: bool) -> None:
        self._server = server
        self._name = name
        self._is_hub = is_hub
        self._received: set[tuple[str, str]] = set()
        """the tasks that were acknowledged as received"""
        self._published: dict[str, tuple[str, str]] = {}
        """the tasks by their msg_id"""
        self._first_said: dict[tuple[str, str], str] = {}
        self._pushes = HeardPushes(self.deliver, self.answer, self._acknowledge, self._cut_and_connect)
        self._relayed = RelayedTasks(server, name, self.deliver, self.answer)

    def _topic(self, user: str, kind: FdKind) -> str:
        return f"nodes/{user}/{kind}"

    async def _client(self) -> MqttClient:
        topic = self._topic(self._name, FdKind.PENDING)
        found = await self._server.subscriber(topic, CONNECTED)
        if found is None:
            raise BrokenRule("connects", f"no client subscribed to {topic} within {CONNECTED:g} s")
        return found

    async def connected(self) -> None:
        """Wait until the receiver is connected and subscribed."""
        await self._client()

    def deliver(self, task: ConformTask) -> None:
        """Publish a task."""
        content = content_of(task.data or None, fd.Form.JSON if task.plain_json else fd.Form.BASE64)
        message: dict[str, object] = {
            "sender": HUB if self._is_hub else task.sender,
            "receiver": task.receiver or self._name,
            "msg_id": self._msg_id(task),
            "action": task.type,
            "time": (task.time or now_ms()) // 1000,
            "exp": task.exp // 1000,
            "payload": msgspec.Raw(content.raw or b"null"),
        }
        if content.raw[:1] == b'"' and not task.plain_json:
            message["enc"] = "base64"
        if task.plain_json:
            message["payload"] = task.data
        if task.lane is not None:
            message["order"] = {"key": task.lane, "after": task.after}
        elif task.order is not None:
            message["order"] = task.order
        if task.own_fields:
            message |= OWN_FIELDS
        if task.old_names:
            message = {_OLD.get(name, name): value for name, value in message.items()}
        self._server.publish(self._topic(self._name, FdKind.PENDING), msgspec.json.encode(message))

    def _msg_id(self, task: ConformTask) -> str:
        if not self._is_hub:
            return task.id
        tag = blake2b(f"{task.sender} {task.id}".encode(), digest_size=18).digest()
        msg_id = f"{task.sender}:{task.id}:{base64.urlsafe_b64encode(tag).decode()}"
        self._published[msg_id] = task.key
        return msg_id

    async def answer(self, seconds: float) -> HeardAnswer | None:
        """Return the next answer to a task."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (message := await self._server.hear(max(0.0, until - loop.time()))) is not None:
            answer = self._read(message)
            if answer is not None:
                return answer
        return None

    def _read(self, message: MqttMessage) -> HeardAnswer | None:
        try:
            user, kind = fd.parse_topic(fd.PREFIX, message.topic)
        except Malformed:
            return None  # no topic of the protocol
        if kind is FdKind.STATUS:
            self._note_push(message)
            return None
        if kind is FdKind.PENDING:
            if user == PEER:
                self._relayed.take(message)
            return None
        if message.qos == 0:
            raise BrokenRule("answers", f"an answer is published with QoS 1, not 0: {message.topic}")
        try:
            said = fd.decode(kind, message.payload)
            fields = msgspec.json.decode(message.payload, type=dict[str, object])
        except (msgspec.DecodeError, Malformed, RecursionError) as problem:
            raise BrokenRule("answers", f"{message.topic} cannot be read: {problem}") from None
        if said is None or isinstance(said, fd.FdPending | fd.FdStatus):
            raise BrokenRule("answers", f"{message.topic} is empty")
        sender, id_ = self._addressed(user, said.msg_id)
        self._first_said.setdefault((sender, id_), kind.value)
        match said:
            case fd.FdAck():
                self._received.add((sender, id_))
                return HeardAnswer(sender, id_, None, said=fields)
            case fd.FdComplete():
                return HeardAnswer(sender, id_, 0, said.value.value, fields)
            case fd.FdFailed():
                why = said.error.value
                code = why.get("code") if isinstance(why, dict) else None
                return HeardAnswer(sender, id_, code if isinstance(code, int) and code else 3, why, fields)

    def _addressed(self, user: str, msg_id: str) -> tuple[str, str]:
        """Return the node that an answer is addressed to, and the id of its task."""
        if not self._is_hub:
            return user, msg_id
        if user == HUB and (known := self._published.get(msg_id)) is not None:
            return known
        if user != HUB or any(one.startswith(msg_id) for one in self._published):
            why = f"an answer goes to nodes/hub/… with the whole msg_id of its task, not {msg_id!r}"
            raise BrokenRule("answers", why)
        return "", msg_id  # an answer to a message that the client could not read

    def _note_push(self, message: MqttMessage) -> None:
        try:
            status = fd.decode_status(message.payload)
        except (Malformed, RecursionError) as problem:
            raise BrokenRule("reports-status", f"a status that cannot be read: {problem}") from None
        match None if status is None else status.data.value:
            case {"seq_id": str(seq_id)}:
                self._pushes.note(seq_id)
            case _:
                pass

    def cut(self) -> None:
        """Break the connection."""
        self._server.cut()

    async def _cut_and_connect(self) -> None:
        self._server.cut()
        await self.connected()

    def _acknowledge(self, seq_id: str) -> None:
        self._server.publish(self._topic(self._name, FdKind.ACK), msgspec.json.encode({"msg_id": seq_id}))

    def send_nonsense(self) -> None:
        """Publish messages that cannot be decoded; their ids are new: a receiver passes over old ones."""
        for text in _NONSENSE:
            fresh = text.replace(b":1_", b":%d_" % now_ms())
            self._server.publish(self._topic(self._name, FdKind.PENDING), fresh)

    def check_kind(self, task: ConformTask, answers: Sequence[HeardAnswer]) -> None:
        """Prove `answers-in-kind`."""
        rule = "answers-in-kind"
        for answer in answers:
            if task.old_names != ("message_id" in answer.said):
                field = "message_id" if task.old_names else "msg_id"
                raise BrokenRule(
                    rule, f"the task's id was in {field}, that of its answer is not: {answer.said}"
                )
            value = answer.said.get("value")
            if answer.code == 0 and task.plain_json == isinstance(value, str):
                form = "JSON" if task.plain_json else "base64"
                raise BrokenRule(
                    rule, f"the task's payload was {form}, the value of its answer is not: {value!r}"
                )

    # ── rules of MQTT ────────────────────────────────────────────────────────────────────────────

    async def inspect(self, rule: str) -> None:
        """Prove a rule of MQTT."""
        match rule:
            case "keeps-its-session":
                await self._check_session(rule)
            case "reports-status":
                await self._check_status(rule)
            case "confirms-receipt":
                await self._check_receipt(rule)
            case "keeps-pushes":
                if not self._is_hub:
                    raise NotChecked("nodes push nothing")
                await self._pushes.check(rule)
            case "resends":
                await self._relayed.check_resends(rule)
            case "takes-the-first-end":
                await self._relayed.check_first_end(rule)
            case _:
                raise NotChecked("it is a rule of WebSocket, and this client uses MQTT")

    async def _check_session(self, rule: str) -> None:
        client = await self._client()
        if client.clean:
            raise BrokenRule(
                rule,
                f"{client.client_id} connects with a clean session: messages that arrive while it is away "
                "are lost",
            )
        pending = self._topic(self._name, FdKind.PENDING)
        if not any(qos for filter_, qos in client.filters.items() if matches(filter_, pending)):
            raise BrokenRule(rule, f"{client.client_id} subscribes to {pending} with QoS 0")
        self._server.cut()
        back = await self._client()
        if back.client_id != client.client_id:
            raise BrokenRule(
                rule,
                f"it was {client.client_id}, and reconnects as {back.client_id}: the broker keeps messages "
                "for the old client id",
            )

    async def _check_status(self, rule: str) -> None:
        first = await self._session(rule)
        self._server.cut()
        if await self._session(rule) != first:
            return
        topic = self._topic(self._name, FdKind.STATUS)  # the will of the previous connection arrives late
        will = {"time": 0, "online": False, "session": first}
        self._server.publish(topic, msgspec.json.encode(will), retained=True)
        if not await self._online_within(STATUS_WITHIN, topic):
            raise BrokenRule(
                rule,
                f"it has the `session` {first} again after a cut, and does not correct a late will of the "
                "previous connection",
            )

    async def _online_within(self, seconds: float, topic: str) -> bool:
        """Return whether its retained status says within this time that it is online."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._server.until(lambda: self._is_online(topic))
        return self._is_online(topic)

    async def _session(self, rule: str) -> str:
        """Return the session that the status and the will of this connection name."""
        client, topic = await self._client(), self._topic(self._name, FdKind.STATUS)
        if not await self._online_within(STATUS_WITHIN, topic):
            raise BrokenRule(rule, f"there is no retained status with online:true at {topic}")
        will = next((one.will for one in self._server.clients.values() if one.will is not None), None)
        if client.will is not None:
            will = client.will
        if will is None or will.topic != topic or not will.retained:
            raise BrokenRule(rule, f"{client.client_id} has no retained will at {topic}")
        status, last = _status_of(self._server.retained[topic]), _status_of(will)
        if last is None or last.online is not False:
            raise BrokenRule(rule, f"the will does not say online:false: {will.payload!r}")
        if status is None or not status.session or status.session != last.session:
            raise BrokenRule(rule, "the status and the will do not have the same `session`")
        return status.session

    def _is_online(self, topic: str) -> bool:
        message = self._server.retained.get(topic)
        status = None if message is None else _status_of(message)
        return status is not None and status.online is True

    async def _check_receipt(self, rule: str) -> None:
        task = ConformTask("receipts", f"{now_ms()}_0", exp=now_ms() + 60_000)
        await self._deliver_and_hear(task)
        if task.key not in self._received or self._first_said.get(task.key) != FdKind.ACK:
            raise BrokenRule(rule, f"{task.id} was answered without an `ack` before the result")
        if self._is_hub:
            return  # the result that follows a repeat tells the hub all that it asks for
        self._received.discard(task.key)
        await self._deliver_and_hear(task)
        if task.key not in self._received:
            raise BrokenRule(rule, f"a repeat of {task.id} was not followed by another `ack`")

    async def _deliver_and_hear(self, task: ConformTask) -> None:
        """Publish a task, and take in answers until its result has come."""
        self.deliver(task)
        loop = asyncio.get_running_loop()
        until = loop.time() + receiver.ANSWER_WITHIN
        while (answer := await self.answer(max(0.0, until - loop.time()))) is not None:
            if answer.code is not None and (answer.sender, answer.id) == task.key:
                return


def _status_of(message: MqttMessage) -> fd.FdStatus | None:
    """Return the content of a status; None for one that was deleted or cannot be decoded."""
    try:
        return fd.decode_status(message.payload)
    except (Malformed, RecursionError):
        return None
