"""`duly.Device`: a device that does what it is told once.

The laws. A command is stored before it is run, and its answer before it is sent; a repeat, or a restart,
never repeats an effect. Each handler declares what a crash in the middle means: `at_most_once` (then
nobody can tell, and it is not run again) or `at_least_once` (it is). Commands of one sender run in its
order, one at a time per order key. What a device pushes is kept until the hub has stored it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from msgspec import Struct

from duly.clients.local_ledger import open_memory
from duly.clients.media import MediaStore
from duly.clients.pushes import PushOutbox, PushUnderWay
from duly.clients.websocket_link import WebSocketLink
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Word, names_in
from duly.core.ordering import LanePolicy
from duly.core.outbox import OutboxPolicy
from duly.core.signing import Keyring
from duly.core.steps import Answered, Arrived, Effect, Reply, ReportOutcome, Transmit
from duly.core.units import DAY, FOREVER, MINUTE
from duly.errors import DeviceError, DulyError, Malformed, ProgramError, SenderError, Stopped
from duly.identity.keyring import load
from duly.runtime.engine import Engine
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.fields import values_in
from duly.wire.frames import DeviceCode, Frame

if TYPE_CHECKING:
    from duly.clients.mqtt_link import MqttDeviceLink

LOG: Final = logging.getLogger("duly.device")

HORIZON: Final = Horizon(keep=DAY, skew=30 * MINUTE)
ANY: Final = ""
"""Stands for every type that has no handler of its own."""
CHUNK: Final = "media_download_chunk"
CHUNK_HORIZON: Final = Horizon(keep=10 * MINUTE, skew=30 * MINUTE)


class Command(Struct, frozen=True):
    """What a handler gets."""

    type: str
    data: Any
    sender: str
    id: str
    attempt: int
    fields: dict[str, Any] = {}
    """what the command carried beside its data"""
    tell: Callable[[object], None] = lambda _: None

    def working(self, progress: object = None) -> None:
        """Say that this is being worked on, and how far it is: the hub then repeats nothing, waits its whole
        patience anew, and tells the app."""
        self.tell(progress)


Handler = Callable[[Command], Awaitable[Any]]


class Device:
    """A device's side of the wire.

    device = duly.Device("http://127.0.0.1:7800", token, data="lock.db")

    @device.on("lock_control", effect="at_most_once")
    async def lock_control(command):
        await motor.turn()
        return {"open": True}

    await device.run()

    With a URL like mqtt://lock-1:token@host it talks to its hub through an MQTT broker; `name` is for brokers
    where it logs in under another name than its own. `online` hears its name at every connection. `keys` is a
    keyring, or the file of one ('duly keys new'): what it says over MQTT is signed, as the hub demands from a
    device that was added with --key.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        data: str | None = None,
        name: str = "",
        online: Callable[[str], None] | None = None,
        keys: str | Keyring | None = None,
    ) -> None:
        self._keys = load(keys) if isinstance(keys, str) else keys
        self._url, self._token, self._data, self._node = url, token, data, name
        self._online = online
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        self.tasks = Supervisor()
        self._media: MediaStore | None = None
        self.name = ""

    def on(
        self, *types: str, effect: Literal["at_most_once", "at_least_once"] = "at_most_once"
    ) -> Callable[[Handler], Handler]:
        """Handle these types of commands; without any, all that have no handler of their own. Return the
        answer's data, or raise `DeviceError`."""
        if effect not in ("at_most_once", "at_least_once"):
            raise Malformed(f"effect={effect!r} is not known; use 'at_most_once' or 'at_least_once'")

        def decorate(handler: Handler) -> Handler:
            if not inspect.iscoroutinefunction(handler):
                raise ProgramError(f"the handler of {', '.join(types)} must be an async function")
            for type_ in types or (ANY,):
                self._handlers[type_] = (handler, effect == "at_least_once")
            return handler

        return decorate

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        self.tasks = Supervisor()
        self._link = self._open_link()
        self._ledger = await self._open_ledger()
        self._inbox = Inbox(
            OutboxPolicy("run", None, patience=FOREVER),
            self._ledger.worker,
            lanes=LanePolicy(serial=True),
            horizon=lambda kind: CHUNK_HORIZON if kind == CHUNK else HORIZON,
            repeatable=lambda message: self._handler(message.kind)[1],
        )
        self._engine = Engine(self._inbox, self._ledger, self._perform)
        self._pushes = PushOutbox(self._ledger, self._send)
        try:
            await self._engine.start()
            self.tasks.spawn("engine", self._engine.live, tries=ENGINE_TRIES)
            await self._pushes.start()
            self.tasks.spawn("engine of pushes", self._pushes.engine.live, tries=ENGINE_TRIES)
            await self._link.start()
            self.name = (await self._link.ready()).you or ""
        except BaseException:
            await self._close()
            raise
        return self

    async def _open_ledger(self) -> Ledger:
        return await open_memory(self._data)

    def _open_link(self) -> WebSocketLink | MqttDeviceLink:
        if self._url.startswith("mqtt"):
            from duly.clients.mqtt_link import MqttDeviceLink

            link = MqttDeviceLink(self._url, up=self._up, heard=self._heard, name=self._node, keys=self._keys)
            self.name = link.name  # tasks of a session that was kept come before its welcome
            return link
        return WebSocketLink(self._url, self._token, up=self._up, heard=self._heard, down=self._down)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await self._link.stop()
        await self.tasks.finish(0)
        await self._engine.stop()
        await self._pushes.stop()
        await self.tasks.stop()
        await self._ledger.close()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self:
            await self.tasks.ended()

    def serve(self, name: str, path: str | Path) -> None:
        """Give a file out under this name, to apps that `download` it."""
        if self._media is None:
            self._media = MediaStore(DeviceError)
            self.on("media_download", effect="at_least_once")(self._media.describe)
            self.on(CHUNK, effect="at_least_once")(self._media.chunk)
        self._media.put(name, Path(path))

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def push(self, type: str, data: object = None) -> PushUnderWay:
        """Tell the apps something: `status_report`, `event_report`, `log_report`, `visit_notification`, or a
        type of your own.

        It is kept until the hub has stored it, over disconnects and, with `data=`, restarts. Await what is
        returned to wait for that. Raises `RateLimited` if too much is waiting already.
        """
        return self._pushes.push(type, data)

    def _send(self, frame: bytes) -> None:
        self._link.send(frame)

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────

    def _up(self, welcome: Frame) -> None:
        self.name = welcome.you or self.name
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
            self._engine.offer(Arrived(message), stored)
        except SenderError as problem:
            self._say(frame.from_, frame.seq_id, Answer(DeviceCode.BAD_PARAMETERS, b"", str(problem)))
        except DulyError:
            return  # we are stopping, or full: the hub repeats

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message, attempt=attempt):
                self.tasks.do(f"handler of {message.kind}", self._run(message, attempt), expected=(Stopped,))
            case ReportOutcome(key=key, state=state, answer=answer):
                self._report(key, state, answer)
            case Reply(message=message, verdict=verdict):
                if verdict.state is not None and verdict.state.terminal and verdict.answer is not None:
                    self._report(message.key, verdict.state, verdict.answer)
                elif verdict.word in (Word.CONFLICT, Word.EXPIRED, Word.REFUSED) and not verdict.retry:
                    late = verdict.word is Word.EXPIRED
                    code = DeviceCode.TIMEOUT if late else DeviceCode.BAD_PARAMETERS
                    state = State.EXPIRED if late else State.FAILED
                    self._say(message.scope, message.id, Answer(code, b"", verdict.reason), state)

    def _report(self, key: bytes, state: State, answer: Answer) -> None:
        if state is State.UNKNOWN:
            return  # nobody can tell; the hub finds that out by our silence
        scope, id_ = names_in(key)
        self._say(scope, id_, answer, state)

    def _say(self, app: str, seq_id: str, answer: Answer, state: State = State.FAILED) -> None:
        self._link.send(_ack(app, seq_id, answer, state))

    def _handler(self, kind: str) -> tuple[Handler | None, bool]:
        """What handles this type, and whether it may be run again after a crash."""
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
            state, answer = State.DONE, _done(message, await handler(command))
        except DeviceError as problem:
            state, answer = State.FAILED, Answer(problem.code, b"", problem.detail)
        except Exception as problem:
            LOG.exception("the handler of %s has failed", message.kind)
            state, answer = State.FAILED, Answer(DeviceCode.HARDWARE_FAULT, b"", repr(problem)[:500])
        keep = message.kind != CHUNK
        await self._engine.put(Answered(message.key, state, answer, attempt, keep=keep))


def _done(message: Message, returned: object) -> Answer:
    """What is done is done, also if the wire cannot carry what came of it."""
    try:
        answer = Answer(DeviceCode.DONE, bytes(frames.dump(returned)))
        frames.check(_ack(message.scope, message.id, answer, State.DONE))
    except (TypeError, ValueError, SenderError) as problem:
        LOG.error("what the handler of %s returned cannot be told: %s", message.kind, problem)
        return Answer(DeviceCode.DONE, b"", f"done, but what came of it cannot be told: {problem}")
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
