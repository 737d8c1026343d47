"""`duly.App`: sends commands to devices and returns the outcome of each.

The laws. A command is stored before it is sent (in memory, or in a file with `store=`), sent again with the
same id every three seconds, three times, and at once after a reconnect; every command ends. Ids never go
backwards, and with `store=` survive a restart, as do commands under way.

The app asks again for commands that ended as `unknown`, at every connection. A command that the hub has
accepted is sent again: the hub answers the repeat with what it knows. A command without any answer is not,
since that could run it long after its time: the app asks for its outcome (`outcome`), which runs nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

from msgspec import Struct

from duly.clients import media
from duly.clients.base import OutboxClient, fail, lowered, settle
from duly.clients.local_ledger import MINTED
from duly.clients.news_feed import NewsFeed
from duly.clients.websocket_link import Access
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Verdict, key_of, names_in
from duly.core.outbox import Outbox, OutboxPolicy
from duly.core.retry import COMMAND
from duly.core.steps import Answered, Arrived, Effect, Reachable, Received, Transmit
from duly.core.units import MS, SECOND, seconds
from duly.errors import DulyError, ProgramError, RateLimited, Refused, Stale, Stopped
from duly.runtime.engine import Engine
from duly.storage.restored_streams import GENERATION
from duly.wire import frames
from duly.wire.fields import load_fields, values_in
from duly.wire.frames import Frame, FrameOrder, ServerCode

PATIENCE: Final = 60 * SECOND
UNSETTLED: Final = 100
"""How many commands that ended as `unknown` are asked for again; the oldest are forgotten."""
PUSHES_KEPT: Final = 10_000
"""How many pushes wait for `pushes()`; beyond that the oldest are dropped."""


class Ack(Struct, frozen=True):
    """The outcome of a command.

    >>> Ack("done", 0, {"open": True}).done
    True
    """

    state: str
    code: int
    data: Any = None
    """the device's answer"""
    detail: str = ""
    fields: dict[str, Any] = {}
    """the further fields of the device's ack"""

    @property
    def done(self) -> bool:
        """Whether the device has carried it out."""
        return self.state == State.DONE.word


class Push(Struct, frozen=True):
    """A report from a device. `cursor` numbers a device's pushes."""

    device: str
    type: str
    data: Any
    cursor: int
    fields: dict[str, Any] = {}
    """its further fields"""


class Gap(Struct, frozen=True):
    """Pushes after number `after` and before `first` are lost because the app was offline for too long. If
    `first` is not above `after`, the hub was restored from a backup, and numbers pushes from there again.
    """

    device: str
    after: int
    first: int


class SendOptions(TypedDict, total=False):
    """The options of `App.send` and `App.post`."""

    id: str | None
    expires: float | None
    expires_at: float | None
    queue: bool
    order: str | Literal[False] | None
    latest: bool
    timeout: float | None
    progress: Callable[[Any], None] | None
    fields: Mapping[str, object] | None


class SentCommand:
    """A command under way. `await command.ended()` waits for its end."""

    def __init__(self, message: Message, progress: Callable[[Any], None] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.message = message
        self._progress = progress
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Ack] = loop.create_future()
        self._settled: asyncio.Future[Ack] = loop.create_future()
        self.refusal: Refused | None = None
        """why the hub refused it"""
        self._known = False
        self.was_sent = False
        """whether it has left on some connection"""
        self.is_in_doubt = False
        """whether a hub that has lost what it knew since may have accepted it"""

    @property
    def id(self) -> str:
        """The command's id."""
        return self.message.id

    @property
    def is_accepted(self) -> bool:
        """Whether the hub has stored it."""
        return self._accepted.done()

    @property
    def is_repeat(self) -> bool:
        """Whether it had already ended when it was sent, so that its outcome is not new."""
        return self._known or (self._ended.done() and not self._accepted.done())

    async def accepted(self) -> None:
        """Wait until the hub has stored it; raises `Refused` if the hub refuses it."""
        either: list[asyncio.Future[None] | asyncio.Future[Ack]] = [self._accepted, self._ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.refusal is not None:
            raise self.refusal

    async def ended(self) -> Ack:
        """Wait until it has ended; raises `Refused` if the hub refuses it."""
        ack = await asyncio.shield(self._ended)
        if self.refusal is not None:
            raise self.refusal
        return ack

    async def settled(self) -> Ack:
        """Wait until the outcome is certain. If `ended` returned `unknown`, this takes longer, possibly for
        ever."""
        ack = await self.ended()
        return ack if ack.state != State.UNKNOWN.word else await asyncio.shield(self._settled)

    # ── for the app ──────────────────────────────────────────────────────────────────────────────

    def accept(self, state: str | None = None) -> None:
        """Note that the hub has stored it, now or earlier; a repeat carries its state."""
        if state is not None:
            self._known |= _is_end(state)
        settle(self._accepted, None)

    def report_progress(self, value: object) -> None:
        """Note the progress that the device reports."""
        if self._progress is not None:
            self._progress(value)

    def end(self, ack: Ack) -> None:
        """Note the outcome; a later call settles one that was `unknown`."""
        if not self._ended.done():
            self._ended.set_result(ack)
        elif ack.state != State.UNKNOWN.word:
            settle(self._settled, ack)

    def abandon(self, problem: DulyError) -> None:
        """Note that the outcome will not be known here."""
        fail(self._ended, problem)
        fail(self._settled, problem)


class App(OutboxClient):
    """An app: sends commands to devices and receives their pushes.

    async with duly.App("http://127.0.0.1:7800", token) as app:
        ack = await app.send("lock-1", "lock_control", {"open": True})

    `url` may name several hubs, separated by commas; the app uses any of them. `store` is a file that keeps
    commands under way and the position in each device's pushes across restarts; without it both are lost with
    the process.
    """

    def __init__(
        self, url: str, token: str, *, store: str | None = None, access: Access | None = None
    ) -> None:
        super().__init__(url, token, store, access)
        self._commands: dict[bytes, SentCommand] = {}
        self._unsettled: OrderedDict[bytes, SentCommand | None] = OrderedDict()
        """commands that ended as unknown here so far; None if an earlier process of this app sent it"""
        self._earlier_in_doubt = False
        """whether the hub has lost what it knew of the commands of an earlier process"""
        self._pushes: NewsFeed[Push | Gap] = NewsFeed(PUSHES_KEPT)
        self._cursors: dict[str, int] = {}
        self.online: set[str] = set()
        """the devices that are online, according to the hub"""

    def _build_outbox(self) -> Outbox:
        policy = OutboxPolicy("hub", COMMAND, beyond_expiry=True, patience=PATIENCE)
        return Outbox(policy, self._ledger.worker, minted=MINTED, patience=_patience)

    async def _build_engine(self) -> Engine:
        self._cursors = await self._load_cursors()
        return await super()._build_engine()

    def _open_news(self) -> None:
        self._pushes.open()

    def _abandon(self) -> None:
        self._pushes.close()
        for command in (*self._commands.values(), *self._unsettled.values()):
            if command is not None:
                command.abandon(Stopped("the app was closed before the command ended"))

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    async def send(self, device: str, type: str, data: object = None, **options: Unpack[SendOptions]) -> Ack:
        """Send a command and wait for its outcome. Raises `Refused` if the hub refuses it.

        The options are those of `post`.
        """
        command = await self.post(device, type, data, **options)
        return await command.ended()

    async def post(
        self,
        device: str,
        type: str,
        data: object = None,
        *,
        id: str | None = None,
        expires: float | None = None,
        expires_at: float | None = None,
        queue: bool = False,
        order: str | Literal[False] | None = None,
        latest: bool = False,
        timeout: float | None = None,
        progress: Callable[[Any], None] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> SentCommand:
        """Send a command without waiting for its outcome.

        `expires` is in seconds; `expires_at` is a time in seconds since 1970, which stays the same when you
        retry under your own `id`. `queue` keeps the command for a device that is offline. `order` names its
        lane, in which with `latest` only the newest command counts; False means no order. `timeout` is how
        many seconds the device may take, and `progress` is called with its progress reports. `fields` are put
        beside `data` in the frame, for firmware that expects its own fields there. The same `id` is the same
        command.
        """
        self._check_running()
        now = self._ledger.clock.now()
        seq_id = id or str(self._ids.next(now))
        frame = frames.FullFrame(
            type,
            seq_id,
            device,
            data=frames.dump(data),
            exp=_expiry(now, expires, expires_at),
            queue=queue,
            order=_order(order, latest=latest),
            timeout=None if timeout is None else seconds(timeout) // MS,
            more=frames.own_fields(fields or {}),
        )
        # Decoded as the hub will decode it, so that a mistake raises an error here; the frame itself is the
        # body.
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
        command = self._commands.get(message.key) or self._unsettled.get(message.key)
        if command is None:
            command = self._commands[message.key] = SentCommand(message, progress)
            self._traces.begin(message.key, message.scope, seq_id, type, device)
            await self._engine.put(Arrived(message))
        return command

    async def download(
        self, device: str, name: str, to: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> Path:
        """Fetch a file that a device serves, and check its SHA-256. Waits up to two minutes for a device, hub
        or network that is down; after that, calling it again continues where this call stopped."""
        self._check_running()
        return await media.download(self, device, name, Path(to), progress)

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────

    async def pushes(self) -> AsyncIterator[Push | Gap]:
        """Yield the pushes of devices, each once, in each device's order, including those missed while
        offline, until the app is stopped."""
        async for news in self._pushes.read():
            yield news

    # ── answers of the outbox ────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Transmit) and self._link.connected:
            command = self._commands.get(effect.message.key)
            if command is not None:
                command.was_sent = True
        super()._perform(effect)

    def _not_stored(self, message: Message, verdict: Verdict) -> None:
        command = self._commands.pop(message.key, None)
        self._traces.end(message.key, verdict.named)
        if command is not None:
            command.refusal = Refused(ServerCode.BAD_PARAMETERS, verdict.named, verdict.reason)
            command.end(Ack(State.FAILED.word, ServerCode.BAD_PARAMETERS))

    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        command = self._commands.pop(key, None) or self._unsettled.pop(key, None)
        self._traces.end(key, state.word)
        if command is not None:
            data, fields = frames.load(answer.data), values_in(answer.data)
            command.end(Ack(state.word, answer.code, data, answer.reason, fields))
        if state is State.UNKNOWN:
            self._unsettled[key] = command
            if len(self._unsettled) > UNSETTLED:
                self._unsettled.popitem(last=False)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def _positions(self) -> dict[str, int]:
        return self._cursors

    def _up(self, welcome: Frame) -> None:
        super()._up(welcome)
        self._continue_at(welcome.cursors or {})
        self.online = set(welcome.online or ())
        self._offer(Reachable(""))
        for key, command in self._unsettled.items():
            confirmed = command is not None and command.is_accepted
            self._link.send(command.message.body if command and confirmed else _question(names_in(key)[1]))

    def _continue_at(self, told: Mapping[str, int]) -> None:
        """Note where the hub continues. If it was restored from a backup, that is before what was seen."""
        for device, head in lowered(self._cursors, told).items():
            if head is None:
                del self._cursors[device]
                continue
            self._tell(Gap(device, self._cursors[device], head + 1))
            self._cursors[device] = head
        if told.get(GENERATION, 0) != self._cursors.get(GENERATION, 0):
            self._cursors[GENERATION] = told.get(GENERATION, 0)
            self._earlier_in_doubt = True
            for command in self._commands.values():
                command.is_in_doubt = command.was_sent
        self._cursors = {**told, **self._cursors}

    def _heard(self, frame: Frame) -> None:
        match frame.type:
            case "server_ack" if frame.seq_id is not None:
                self._server_ack(key_of(self.name, frame.seq_id), frame)
            case "ack" if frame.seq_id is not None and frames.is_working(frame):
                self._worked(key_of(self.name, frame.seq_id), frame)
            case "ack" if (
                frame.seq_id is not None and frame.code is not None and _is_end(frame.state or "done")
            ):
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
        if command is None and key in self._unsettled:
            return  # the outcome was asked for again: only an `ack` says more
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                self._accepted(key, frame.state)
                self._offer(Received(key))
            case None:
                pass
            case ServerCode.INTERNAL if frame.error != RateLimited.word:
                pass  # the resend tries again
            case code if self._is_forgotten(command, frame.error):
                self._offer(Answered(key, State.UNKNOWN, Answer(code, b"", frame.detail or "")))
            case code:
                refusal = Refused(code, frame.error or "", frame.detail or "")
                refusal.wait = seconds(frame.retry_after or 0)
                if command is not None:
                    command.refusal = refusal
                self._offer(Answered(key, State.FAILED, Answer(code, b"", str(refusal)), burn=False))

    def _is_forgotten(self, command: SentCommand | None, error: str | None) -> bool:
        """Return whether the hub may have forgotten a command that it refuses now: it accepted it, or was
        restored from a backup since it was sent, perhaps by an earlier process of this app."""
        if command is None:
            return error == Stale.word or self._earlier_in_doubt
        return command.is_in_doubt or (error == Stale.word and command.is_accepted)

    def _worked(self, key: bytes, frame: Frame) -> None:
        """Note that the device is working on a command: its time limit starts again."""
        self._accepted(key)
        self._offer(Received(key))
        command = self._commands.get(key)
        if command is not None:
            command.report_progress(frames.load(frame.progress))

    def _accepted(self, key: bytes, state: str | None = None) -> None:
        command = self._commands.get(key)
        if command is not None:
            command.accept(state)

    def _pushed(self, device: str, frame: Frame) -> None:
        cursor = frame.cursor or 0
        known = self._cursors.get(device, 0)
        # A status that only this app gets, because a grant was added or revoked, has no number.
        if cursor < known or (cursor == known and frame.type != frames.DEVICE_STATUS):
            return
        self._cursors[device] = cursor
        data = frames.load(frame.data)
        if frame.type == frames.DEVICE_STATUS and isinstance(data, dict):
            (self.online.add if data.get("online") else self.online.discard)(device)
        self._tell(Push(device, frame.type, data, cursor, load_fields(frames.more_in_push(frame))))
        self._save_cursors(self._cursors)

    def _tell(self, news: Push | Gap) -> None:
        self._pushes.add(news)


def _is_end(word: str) -> bool:
    """Return whether a word names a state in which a command has ended; a word that is not known does not."""
    state = State.__members__.get(word.upper())
    return state is not None and state.terminal


def _question(seq_id: str) -> bytes:
    """Return the frame that asks for the outcome of a command without running it."""
    return frames.encode(Frame(frames.OUTCOME, seq_id))


def _patience(message: Message) -> int:
    """Return how long a command with its own `timeout` may take: that time at its device, plus the usual time
    on the way. 0 means that the policy decides."""
    timeout = frames.decode(message.body).timeout
    return 0 if timeout is None else PATIENCE + timeout * MS


def _expiry(now: int, expires: float | None, expires_at: float | None) -> int | None:
    """Return when a command expires, in milliseconds since 1970, or None."""
    if expires is None:
        return None if expires_at is None else seconds(expires_at) // MS
    if expires_at is not None:
        raise ProgramError("give either expires (seconds from now) or expires_at (a time), not both")
    return (now + seconds(expires)) // MS


def _order(lane: str | Literal[False] | None, *, latest: bool) -> FrameOrder | bool | None:
    if lane is False:
        return False
    if lane is None and not latest:
        return None
    return FrameOrder(lane or "", Mode.LATEST if latest else Mode.REPLAY)
