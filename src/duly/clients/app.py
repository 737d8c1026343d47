"""`duly.App`: send a command to a device, and know how it ended.

The laws. A command is stored before it is sent (in memory, or in a file with `data=`), sent again with the
same id every three seconds, three times, and at once after a reconnect; it ends, one way or another. Ids
never go backwards, and with `data=` survive a restart, as do commands under way.

What the hub has taken and we call `unknown` is asked for again at every connection: the hub answers a repeat
with what it knows. What it never confirmed is not, since that might run a command long after its time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from msgspec import Struct

from duly.clients import media
from duly.clients.local_ledger import MINTED, minted_ids, open_memory
from duly.clients.websocket_link import WebSocketLink
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Word, key_of
from duly.core.operations import PutItem
from duly.core.outbox import Outbox, OutboxPolicy
from duly.core.retry import COMMAND
from duly.core.steps import Answered, Arrived, Effect, Reachable, Received, Reply, ReportOutcome, Transmit
from duly.core.units import MS, SECOND, seconds
from duly.errors import DulyError, RateLimited, Refused, Stale, Stopped
from duly.runtime.engine import Engine
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.fields import load_fields, values_in
from duly.wire.frames import Frame, FrameOrder, ServerCode

PATIENCE: Final = 60 * SECOND
CURSORS: Final = "cursors"
DOUBTS: Final = 100
"""Commands whose end nobody knows that are asked for again; the oldest are let go."""


class Ack(Struct, frozen=True):
    """How a command ended."""

    state: str
    code: int
    data: Any = None
    detail: str = ""
    fields: dict[str, Any] = {}
    """what the device's ack carried beside that"""

    @property
    def done(self) -> bool:
        return self.state == State.DONE.word


class Push(Struct, frozen=True):
    """Something a device told. `cursor` numbers a device's pushes."""

    device: str
    type: str
    data: Any
    cursor: int
    fields: dict[str, Any] = {}
    """what it carried beside that"""


class Gap(Struct, frozen=True):
    """Pushes after `after` and before `first` are gone: we were away too long."""

    device: str
    after: int
    first: int


class SentCommand:
    """A command under way."""

    def __init__(self, message: Message, progress: Callable[[Any], None] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.message = message
        self._progress = progress
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Ack] = loop.create_future()
        self._settled: asyncio.Future[Ack] = loop.create_future()
        self.refusal: Refused | None = None

    @property
    def id(self) -> str:
        return self.message.id

    async def accepted(self) -> None:
        """Until the hub has stored it; raises `Refused` if it did not take it."""
        either: list[asyncio.Future[Any]] = [self._accepted, self._ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.refusal is not None:
            raise self.refusal

    async def ended(self) -> Ack:
        """Until it has ended; raises `Refused` if the hub did not take it."""
        ack = await asyncio.shield(self._ended)
        if self.refusal is not None:
            raise self.refusal
        return ack

    async def settled(self) -> Ack:
        """Until it is certain how it ended: longer than `ended`, if that says `unknown`, maybe for ever."""
        ack = await self.ended()
        return ack if ack.state != State.UNKNOWN.word else await asyncio.shield(self._settled)

    def _end(self, ack: Ack) -> None:
        if not self._ended.done():
            self._ended.set_result(ack)
        elif ack.state != State.UNKNOWN.word and not self._settled.done():
            self._settled.set_result(ack)

    def _abandon(self, problem: DulyError) -> None:
        for future in (self._ended, self._settled):
            if not future.done():
                future.set_exception(problem)
                future.exception()  # whoever waits hears it; nobody need


class App:
    """An app's side of the wire.

    async with duly.App("http://127.0.0.1:7800", token) as app:
        ack = await app.send("lock-1", "lock_control", {"open": True})

    Where there are several hubs, name them all, with commas between: any of them will do.
    """

    def __init__(self, url: str, token: str, *, data: str | None = None) -> None:
        self._url, self._token, self._data = url, token, data
        self._commands: dict[bytes, SentCommand] = {}
        self._doubts: OrderedDict[bytes, SentCommand] = OrderedDict()
        """ended as unknown here, so far"""
        self._pushes: asyncio.Queue[Push | Gap] = asyncio.Queue(maxsize=10_000)
        self._cursors: dict[str, int] = {}
        self.tasks = Supervisor()
        self._saving: asyncio.Task[None] | None = None
        self.name = ""
        self.online: set[str] = set()
        """our devices that are online, as far as the hub has told"""

    async def __aenter__(self) -> Self:
        self.tasks = Supervisor()
        self._link = self._open_link()
        self._ledger = await self._open_ledger()
        self._ids = await minted_ids(self._ledger)
        self._cursors = {device: int(n) for device, n in (await self._ledger.bucket(CURSORS)).items()}
        policy = OutboxPolicy("hub", COMMAND, beyond_expiry=True, patience=PATIENCE)
        outbox = Outbox(policy, self._ledger.worker, minted=MINTED, patience=_patience)
        self._engine = Engine(outbox, self._ledger, self._perform)
        try:
            await self._link.start()
            welcome = await self._link.ready()
            self.name = welcome.you or ""
            await self._engine.start()
            self.tasks.spawn("engine", self._engine.live, tries=ENGINE_TRIES)
        except BaseException:
            await self._close()
            raise
        return self

    async def _open_ledger(self) -> Ledger:
        return await open_memory(self._data)

    def _open_link(self) -> WebSocketLink:
        return WebSocketLink(
            self._url, self._token, up=self._up, heard=self._heard, cursors=lambda: self._cursors
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await self._engine.stop()
        await self._link.stop()
        await self.tasks.finish()
        await self.tasks.stop()
        await self._ledger.close()
        for command in (*self._commands.values(), *self._doubts.values()):
            command._abandon(Stopped("the app was closed before the command ended"))

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    async def send(self, device: str, type: str, data: object = None, **more: Any) -> Ack:
        """Send a command and wait for its end. Raises `Refused` if the hub does not take it.

        Options as for `post`.
        """
        command = await self.post(device, type, data, **more)
        return await command.ended()

    async def post(
        self,
        device: str,
        type: str,
        data: object = None,
        *,
        id: str | None = None,
        expires: float | None = None,
        queue: bool = False,
        order: str | Literal[False] | None = None,
        latest: bool = False,
        timeout: float | None = None,
        progress: Callable[[Any], None] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> SentCommand:
        """Send a command without waiting. `expires` in seconds; `queue` keeps it for a device that is
        away; `order` names the lane, in which with `latest` only the newest counts; False wants no order.
        `timeout` is how many seconds the device may take, and `progress` hears how far it is, if it says so.
        `fields` stand beside `data`, for devices that look for their own there."""
        now = self._ledger.clock.now()
        seq_id = id or str(self._ids.next(now))
        frame = frames.FullFrame(
            type,
            seq_id,
            device,
            data=frames.dump(data),
            exp=None if expires is None else (now + seconds(expires)) // MS,
            queue=queue,
            order=_order(order, latest=latest),
            timeout=None if timeout is None else seconds(timeout) // MS,
            more=frames.own_fields(fields or {}),
        )
        # What the hub will take it for, so that a mistake is noticed here; the frame itself is the body.
        meant = frames.message_of(frame, self.name)
        frames.check(frames.encode(frame))
        message = Message(
            self.name,
            seq_id,
            type,
            device,
            frames.encode(frame),
            expires=meant.expires,
            order=Order("", Mode.ANY),
        )
        command = self._commands.get(message.key) or self._doubts.get(message.key)
        if command is None:
            command = self._commands[message.key] = SentCommand(message, progress)
            await self._engine.put(Arrived(message))
        return command

    async def download(
        self, device: str, name: str, to: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> Path:
        """Fetch a file that a device serves; it is checked by its SHA-256. A device, a hub or a network that
        is away for less than two minutes is waited for; later, the same call goes on where it was."""
        return await media.download(self, device, name, Path(to), progress)

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────

    async def pushes(self) -> AsyncIterator[Push | Gap]:
        """What devices tell, each once, in each device's order, also what was missed while away."""
        while True:
            yield await self._pushes.get()

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                self._link.send(message.body)
            case ReportOutcome(key=key, state=state, answer=answer):
                self._end(key, state, answer)
            case Reply(message=message, verdict=verdict):
                if verdict.state is not None and verdict.state.terminal:
                    self._end(message.key, verdict.state, verdict.answer or Answer())
                elif verdict.word not in (Word.FRESH, Word.DUPLICATE):
                    command = self._commands.pop(message.key, None)
                    if command is not None and not command._ended.done():
                        command.refusal = Refused(ServerCode.BAD_PARAMETERS, verdict.named, verdict.reason)
                        command._end(Ack(State.FAILED.word, ServerCode.BAD_PARAMETERS))

    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        command = self._commands.pop(key, None) or self._doubts.pop(key, None)
        if command is None:
            return
        data, fields = frames.load(answer.data), values_in(answer.data)
        command._end(Ack(state.word, answer.code, data, answer.reason, fields))
        if state is State.UNKNOWN:
            self._doubts[key] = command
            if len(self._doubts) > DOUBTS:
                self._doubts.popitem(last=False)

    def _offer(self, *events: Any) -> None:
        for event in events:
            try:
                self._engine.offer(event)
            except (Stopped, DulyError):
                return

    def _up(self, welcome: Frame) -> None:
        for device, head in (welcome.cursors or {}).items():
            self._cursors.setdefault(device, head)
        self.name = welcome.you or self.name
        self.online = set(welcome.online or ())
        self._offer(Reachable(""))
        for command in self._doubts.values():
            if command._accepted.done():
                self._link.send(command.message.body)

    def _heard(self, frame: Frame) -> None:
        match frame.type:
            case "server_ack" if frame.seq_id is not None:
                self._server_ack(key_of(self.name, frame.seq_id), frame)
            case "ack" if frame.seq_id is not None and frames.is_working(frame):
                self._worked(key_of(self.name, frame.seq_id), frame)
            case "ack" if frame.seq_id is not None and frame.code is not None:
                state = State[(frame.state or "done").upper()]
                answer = Answer(frame.code, frames.answer_of(frame)[1].data, frame.detail or "")
                key = key_of(self.name, frame.seq_id)
                self._accepted(key)
                self._offer(Answered(key, state, answer))
            case "gap" if frame.from_ is not None:
                self._tell(Gap(frame.from_, frame.after or 0, frame.first or 0))
            case _ if frame.from_ is not None and frame.cursor is not None:
                self._pushed(frame.from_, frame)

    def _server_ack(self, key: bytes, frame: Frame) -> None:
        command = self._commands.get(key)
        if command is None and key in self._doubts:
            return  # asked again: only an `ack` tells more
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                self._accepted(key)
                self._offer(Received(key))
            case None:
                pass
            case ServerCode.INTERNAL if frame.error != RateLimited.word:
                pass  # try again: the resend does
            case code if frame.error == Stale.word and (command is None or command._accepted.done()):
                # The hub has forgotten what it took, or an earlier process of ours sent.
                self._offer(Answered(key, State.UNKNOWN, Answer(code, b"", frame.detail or "")))
            case code:
                refusal = Refused(code, frame.error or "", frame.detail or "")
                refusal.wait = seconds(frame.retry_after or 0)
                if command is not None:
                    command.refusal = refusal
                self._offer(Answered(key, State.FAILED, Answer(code, b"", str(refusal)), burn=False))

    def _worked(self, key: bytes, frame: Frame) -> None:
        """The device is at work, and has its time anew."""
        self._accepted(key)
        self._offer(Received(key))
        command = self._commands.get(key)
        if command is not None and command._progress is not None:
            command._progress(frames.load(frame.progress))

    def _accepted(self, key: bytes) -> None:
        command = self._commands.get(key)
        if command is not None and not command._accepted.done():
            command._accepted.set_result(None)

    def _pushed(self, device: str, frame: Frame) -> None:
        cursor = frame.cursor or 0
        if cursor <= self._cursors.get(device, 0):
            return
        self._cursors[device] = cursor
        data = frames.load(frame.data)
        if frame.type == frames.DEVICE_STATUS and isinstance(data, dict):
            (self.online.add if data.get("online") else self.online.discard)(device)
        self._tell(Push(device, frame.type, data, cursor, load_fields(frames.more_in_push(frame))))
        if self._saving is None:
            self._saving = self.tasks.do("saving cursors", self._save_cursors())

    def _tell(self, news: Push | Gap) -> None:
        if self._pushes.full():
            self._pushes.get_nowait()  # nobody listens: keep the newest
        self._pushes.put_nowait(news)

    async def _save_cursors(self) -> None:
        """How far we have heard; a cursor that is not saved costs a repeat, never a push."""
        try:
            puts = [PutItem(CURSORS, device, b"%d" % n) for device, n in self._cursors.items()]
            await self._ledger.write(*puts)
        except DulyError:
            return
        finally:
            self._saving = None


def _patience(message: Message) -> int:
    """How long a command that says so itself may take: as long at its device, and on the way as any other."""
    timeout = frames.decode(message.body).timeout
    return 0 if timeout is None else PATIENCE + timeout * MS


def _order(lane: str | Literal[False] | None, *, latest: bool) -> FrameOrder | bool | None:
    if lane is False:
        return False
    if lane is None and not latest:
        return None
    return FrameOrder(lane or "", Mode.LATEST if latest else Mode.REPLAY)
