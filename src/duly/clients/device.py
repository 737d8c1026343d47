"""`duly.Device`: a device that carries out each command once.

The laws. A command is stored before it is run, and its answer before it is sent; neither a repeat nor a
restart causes an effect twice. Each handler declares what a crash in the middle means: `at_most_once` (the
outcome is unknown, and the command is not run again) or `at_least_once` (it is run again). Commands of one
sender run in its order, one at a time per order key. A push is kept until the hub has stored it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from duly.clients.base import Client, HubLink
from duly.clients.media import MediaStore
from duly.clients.push_outbox import PushOutbox, PushUnderWay
from duly.clients.websocket_link import Access
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, VerdictKind, names_in
from duly.core.ordering import LanePolicy
from duly.core.outbox import OutboxPolicy
from duly.core.signing import Keyring
from duly.core.steps import Answered, Arrived, Effect, Reply, ReportOutcome, Transmit
from duly.core.units import DAY, FOREVER, MINUTE
from duly.errors import DeviceError, DulyError, Malformed, ProgramError, SenderError, Stopped
from duly.identity.keyring import load
from duly.runtime.engine import Engine
from duly.runtime.tasks import ENGINE_TRIES
from duly.wire import frames
from duly.wire.fields import values_in
from duly.wire.frames import DeviceCode, Frame

LOG: Final = logging.getLogger("duly.device")

HORIZON: Final = Horizon(keep=DAY, skew=30 * MINUTE)
ANY: Final = ""
"""The handler of every type that has no handler of its own."""
CHUNK: Final = "media_download_chunk"
CHUNK_HORIZON: Final = Horizon(keep=10 * MINUTE, skew=30 * MINUTE)


class Command(Struct, frozen=True):
    """A command, as its handler gets it."""

    type: str
    data: Any
    sender: str
    id: str
    attempt: int
    fields: dict[str, Any] = {}
    """the command's further fields"""
    tell: Callable[[object], None] = lambda _: None

    def working(self, progress: object = None) -> None:
        """Report that the command is being worked on, and its progress. The hub then sends no repeat,
        restarts the command's deadline, and tells the app."""
        self.tell(progress)


Handler = Callable[[Command], Awaitable[Any]]


class Device(Client):
    """A device: carries out commands and pushes reports.

    device = duly.Device("http://127.0.0.1:7800", token, store="lock.db")

    @device.on("lock_control", effect="at_most_once")
    async def lock_control(command):
        await motor.turn()
        return {"open": True}

    await device.run()

    `store` is a file that keeps the commands carried out and the unsent pushes across restarts; without it
    both are lost with the process. `online` is called with the device's name at every connection.

    With a URL like mqtt://lock-1:token@host the device reaches its hub through an MQTT broker. There `name`
    is for devices that log in under another name than their own, and `keys` is a keyring, or the file of one
    ('duly keys new'): everything the device sends is then signed, as the hub demands from a device that was
    added with --key.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        store: str | None = None,
        name: str = "",
        online: Callable[[str], None] | None = None,
        keys: str | Keyring | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(url, token, store, access)
        self._keys = load(keys) if isinstance(keys, str) else keys
        self._mqtt_name = name
        self._online = online
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        self._media: MediaStore | None = None

    def on(
        self, *types: str, effect: Literal["at_most_once", "at_least_once"] = "at_most_once"
    ) -> Callable[[Handler], Handler]:
        """Declare a handler of these command types; without any, of all types that have no handler of their
        own. It returns the answer's data, or raises `DeviceError`. `effect` says what a crash in the middle
        means."""
        if effect not in ("at_most_once", "at_least_once"):
            raise Malformed(f"effect={effect!r} is not known; use 'at_most_once' or 'at_least_once'")

        def decorate(handler: Handler) -> Handler:
            if not inspect.iscoroutinefunction(handler):
                raise ProgramError(f"the handler of {', '.join(types)} must be an async function")
            for type_ in types or (ANY,):
                self._handlers[type_] = (handler, effect == "at_least_once")
            return handler

        return decorate

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def _build_engine(self) -> Engine:
        self._inbox = Inbox(
            OutboxPolicy("run", None, patience=FOREVER),
            self._ledger.worker,
            lanes=LanePolicy(serial=True),
            horizon=lambda kind: CHUNK_HORIZON if kind == CHUNK else HORIZON,
            repeatable=lambda message: self._handler(message.kind)[1],
        )
        self._pushes = PushOutbox(self._ledger, self._send)
        return Engine(self._inbox, self._ledger, self._perform)

    async def _begin(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._pushes.stop)
        await super()._begin(stack)
        await self._pushes.start()
        self.tasks.spawn("engine of pushes", self._pushes.engine.live, tries=ENGINE_TRIES)
        stack.push_async_callback(self._end_handlers)

    async def _end_handlers(self) -> None:
        await self.tasks.finish(0)

    def _open_link(self) -> HubLink:
        if not self._url.startswith("mqtt"):
            return super()._open_link()
        from duly.clients.mqtt_link import MqttDeviceLink

        link = MqttDeviceLink(
            self._url,
            up=self._up,
            heard=self._heard,
            now=self._ledger.clock.now,
            name=self._mqtt_name,
            keys=self._keys,
        )
        self.name = link.name  # tasks of a session that the broker kept arrive before the welcome
        return link

    def serve(self, name: str, path: str | Path) -> None:
        """Serve a file under this name to apps that `download` it."""
        if self._media is None:
            self._media = MediaStore(DeviceError)
            self.on("media_download", effect="at_least_once")(self._media.describe)
            self.on(CHUNK, effect="at_least_once")(self._media.chunk)
        self._media.put(name, Path(path))

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────

    def push(self, type: str, data: object = None) -> PushUnderWay:
        """Push something to the apps: `status_report`, `event_report`, `log_report`, `visit_notification`, or
        a type of your own.

        The push is kept until the hub has stored it, across disconnects and, with `store=`, restarts. Await
        the returned object to wait for that. Raises `RateLimited` if too many are waiting.
        """
        self._check_running()
        return self._pushes.push(type, data)

    def _send(self, frame: bytes) -> None:
        self._link.send(frame)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def _up(self, welcome: Frame) -> None:
        super()._up(welcome)
        self._pushes.up()
        if self._online is not None:
            self._online(self.name)

    def _down(self) -> None:
        self._pushes.down()

    def _heard(self, frame: Frame, stored: Callable[[], None] | None = None) -> None:
        if frame.type == "server_ack" and frame.seq_id is not None:
            self._pushes.answered(frame)
        if frame.from_ is None or frame.seq_id is None:
            return
        try:
            message = frames.received_command(frame, self.name)
            self._traces.heard(message.key, frame.traceparent)
            self._engine.offer(Arrived(message), stored)
        except SenderError as problem:
            self._answer(frame.from_, frame.seq_id, Answer(DeviceCode.BAD_PARAMETERS, b"", str(problem)))
        except DulyError:
            return  # the engine is stopping, or full: the hub repeats it

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message, attempt=attempt):
                self.tasks.do(f"handler of {message.kind}", self._run(message, attempt), expected=(Stopped,))
            case ReportOutcome(key=key, state=state, answer=answer):
                self._report(key, state, answer)
            case Reply(message=message, verdict=verdict):
                if verdict.state is not None and verdict.state.terminal and verdict.answer is not None:
                    self._report(message.key, verdict.state, verdict.answer)
                elif (
                    verdict.kind in (VerdictKind.CONFLICT, VerdictKind.EXPIRED, VerdictKind.REFUSED)
                    and not verdict.retry
                ):
                    late = verdict.kind is VerdictKind.EXPIRED
                    code = DeviceCode.TIMEOUT if late else DeviceCode.BAD_PARAMETERS
                    state = State.EXPIRED if late else State.FAILED
                    self._answer(message.scope, message.id, Answer(code, b"", verdict.reason), state)

    def _report(self, key: bytes, state: State, answer: Answer) -> None:
        if state is State.UNKNOWN:
            return  # the hub ends it as unknown itself, when no answer comes
        scope, id_ = names_in(key)
        self._answer(scope, id_, answer, state)

    def _answer(self, app: str, seq_id: str, answer: Answer, state: State = State.FAILED) -> None:
        self._link.send(_ack(app, seq_id, answer, state))

    def _handler(self, kind: str) -> tuple[Handler | None, bool]:
        """Return the handler of this type, and whether it may run again after a crash."""
        return self._handlers.get(kind) or self._handlers.get(ANY) or (None, False)

    async def _run(self, message: Message, attempt: int) -> None:
        handler, _ = self._handler(message.kind)
        try:
            if handler is None:
                raise DeviceError(DeviceCode.NOT_SUPPORTED, f"{self.name} does not know {message.kind}")
            body = message.body
            command = Command(
                message.kind, frames.load(body), message.scope, message.id, attempt, values_in(body),
                lambda progress: self._link.send(_working(message, progress)),
            )  # fmt: skip
            with self._traces.running(message.key, message.scope, message.id, message.kind, self.name):
                returned = await handler(command)
            state, answer = State.DONE, _done(message, returned)
        except DeviceError as problem:
            state, answer = State.FAILED, Answer(problem.code, b"", problem.detail)
        except Exception as problem:
            LOG.exception("the handler of %s has failed", message.kind)
            state, answer = State.FAILED, Answer(DeviceCode.HARDWARE_FAULT, b"", repr(problem)[:500])
        keep = message.kind != CHUNK
        await self._engine.put(Answered(message.key, state, answer, attempt, keep=keep))


def _done(message: Message, returned: object) -> Answer:
    """Return the answer of a handler that returned. A value that cannot be sent is not a failure."""
    try:
        answer = Answer(DeviceCode.DONE, bytes(frames.dump(returned)))
        frames.check(_ack(message.scope, message.id, answer, State.DONE))
    except (TypeError, ValueError, SenderError) as problem:
        LOG.error("what the handler of %s returned cannot be sent: %s", message.kind, problem)
        return Answer(DeviceCode.DONE, b"", f"done, but what it returned cannot be sent: {problem}")
    return answer


def _working(message: Message, progress: object) -> bytes:
    said = frames.dump(progress)
    return frames.encode(Frame("ack", message.id, message.scope, state=State.DELIVERED.word, progress=said))


def _ack(app: str, seq_id: str, answer: Answer, state: State) -> bytes:
    ack = Frame(
        "ack", seq_id, app, code=answer.code, data=frames.raw(answer.data), state=state.word,
        detail=answer.reason or None,
    )  # fmt: skip
    return frames.encode(ack)
