"""The base of all clients: a connection, an engine over a local ledger, a lifecycle, and waiting for answers.

The laws. A client stops its parts in the reverse order of their start, even if the start failed halfway.
Everything it has accepted is stored before it stops, and every caller that still waits for an answer gets
`Stopped`. A failed background job is logged. A client that does not run answers every call with `Stopped`,
which says what to do.

`Lifecycle` is `start`, `ready`, `stop` and `async with`; `Client` adds the connection to a hub and the local
ledger (`Device`, `Sentinel`); `OutboxClient` adds an outbox for the client's messages (`App`, `Chat`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import ClassVar, Final, Protocol, Self, TypeVar

from duly.clients.local_ledger import minted_ids, open_store
from duly.clients.websocket_link import Access, WebSocketLink
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import DropItem, PutItem
from duly.core.outbox import Outbox
from duly.core.steps import Effect, Event, Reply, ReportOutcome, Transmit
from duly.errors import DulyError, NotAuthenticated, ProgramError, Stopped
from duly.runtime.engine import Engine
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.runtime.tracing import ClientTraces
from duly.storage.ledger import Ledger
from duly.storage.restored_streams import GENERATION
from duly.wire.frames import Frame, with_traceparent

CURSORS: Final = "cursors"
"""The bucket of the local ledger with the number of the last item read from each stream."""

T = TypeVar("T")


class HubLink(Protocol):
    """A connection to a hub: it carries frames while it is up; frames sent while it is down are lost."""

    @property
    def connected(self) -> bool:
        """Whether frames can be sent now."""
        ...

    @property
    def denial(self) -> NotAuthenticated | None:
        """Why the last login was refused; None if it was not."""
        ...

    async def start(self) -> None:
        """Begin to connect."""
        ...

    async def ready(self) -> Frame:
        """Wait for the first connection, and return its welcome."""
        ...

    async def stop(self) -> None:
        """Disconnect for good."""
        ...

    def send(self, frame: bytes) -> None:
        """Send a frame. While the link is down it is lost."""
        ...


class BackgroundJobs:
    """Short background jobs of one kind, run by their owner's supervisor. A ledger or a connection that fails
    or is closed is not a bug: what was not stored is received again."""

    def __init__(self, name: str, tasks: Supervisor) -> None:
        self._name, self._tasks = name, tasks

    def do(self, work: Coroutine[object, None, None]) -> asyncio.Task[None] | None:
        """Start a job; returns None after the owner has stopped."""
        return self._tasks.do(self._name, work, expected=(DulyError,))


def lowered(own: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int | None]:
    """Return which own cursors the hub lowers in a welcome, and to what: it was restored from a backup, and
    gives later numbers out again. A stream that it does not name afterwards is forgotten (None).

    >>> lowered({"lock": 9, "lamp": 4, "fan": 2}, {"lock": 7, "lamp": 4, "": 1})
    {'lock': 7, 'fan': None}
    """
    new = told.get(GENERATION, 0) != own.get(GENERATION, 0)
    changed: dict[str, int | None] = {}
    for stream, n in own.items():
        to = told.get(stream)
        if stream != GENERATION and (new if to is None else to < n):
            changed[stream] = to
    return changed


def settle(future: asyncio.Future[T], value: T) -> None:
    """Set a future's result, unless it has one."""
    if not future.done():
        future.set_result(value)


def fail(future: asyncio.Future[T], problem: Exception) -> None:
    """Set a future's exception, unless it has a result. No warning follows if no caller awaits it."""
    if not future.done():
        future.set_exception(problem)
        future.exception()


def offer(engine: Engine, event: Event) -> None:
    """Hand an incoming event to an engine. An engine that is stopping or full drops it; the other side
    repeats it."""
    try:
        engine.offer(event)
    except DulyError:
        return


class Lifecycle(ABC):
    """Something that is started, becomes ready, and is stopped; `async with` does all three."""

    @abstractmethod
    async def start(self) -> None:
        """Begin, without waiting for the other side."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until the other side has answered."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop in good order. Stopping twice is harmless."""

    async def __aenter__(self) -> Self:
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class Client(Lifecycle):
    """A client of a hub: one connection, one engine, one local ledger.

    A subclass builds its engine (`_build_engine`), handles the hub's frames (`_heard`) and connections
    (`_up`, `_down`), and fails whatever still waits when it stops (`_abandon`).
    """

    works_offline: ClassVar[bool] = True
    """Whether the engine starts before the hub has answered; otherwise it starts in `ready`."""

    # They exist since the first start; see `_check_running`.
    _ledger: Ledger
    _engine: Engine
    _link: HubLink

    def __init__(self, url: str, token: str, store: str | None, access: Access | None) -> None:
        self._url, self._token, self._store = url, token, store
        self._access = access or Access()
        self.tasks = Supervisor()
        """the background jobs since the last start"""
        self._traces = ClientTraces()
        self._saving: asyncio.Task[None] | None = None
        self._saved: set[str] = set()
        """the streams whose read positions are stored"""
        self._running: AsyncExitStack | None = None
        """the started parts, in order"""
        self._begun = False
        self.name = ""
        """the account's name, known after the first welcome"""

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open the local ledger and begin to connect, without waiting for the hub."""
        if self._running is not None:
            raise ProgramError("this client is running already")
        self.tasks = Supervisor()
        async with AsyncExitStack() as stack:
            stack.callback(self._abandon)
            stack.callback(self._not_begun)
            self._open_news()
            self._ledger = await self._open_ledger()
            stack.push_async_callback(self._ledger.close)
            stack.push_async_callback(self._end_tasks)
            self._engine = await self._build_engine()
            self._link = self._open_link()
            if self.works_offline:
                await self._begin(stack)
            stack.push_async_callback(self._link.stop)
            await self._link.start()
            self._running = stack.pop_all()

    async def ready(self) -> None:
        """Wait for the hub's first welcome. Raises `NotAuthenticated` if the hub refuses the token."""
        if self._running is None:
            raise Stopped("this client is not running; use 'async with'")
        self._name_from(await self._link.ready())
        if not self._begun:
            await self._begin(self._running)

    async def stop(self) -> None:
        """Store what was accepted, and disconnect. Every caller that still waits for an answer gets
        `Stopped`. Stopping twice is harmless."""
        running, self._running = self._running, None
        self._not_begun()
        if running is not None:
            await running.aclose()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self:
            await self.tasks.ended()

    @property
    def connected(self) -> bool:
        """Whether the connection to the hub is up."""
        return self._running is not None and self._link.connected

    async def _begin(self, stack: AsyncExitStack) -> None:
        """Start the engine. Parts that are pushed on the stack are stopped in reverse order."""
        self._begun = True
        stack.push_async_callback(self._engine.stop)
        await self._engine.start()
        self.tasks.spawn("engine", self._engine.live, tries=ENGINE_TRIES)

    def _not_begun(self) -> None:
        self._begun = False

    def _check_running(self) -> None:
        """Raise `Stopped` unless the client runs. Every public method that needs the ledger, the engine or
        the connection begins with this."""
        if self._begun:
            return
        name = type(self).__name__
        if self._running is None:
            raise Stopped(f"this {name} is not running; use 'async with', or call start() and ready() first")
        raise Stopped(f"this {name} has not reached its hub yet; call ready() first")

    async def _end_tasks(self) -> None:
        await self.tasks.finish()
        await self.tasks.stop()

    def _open_news(self) -> None:
        """Let readers wait for news."""

    def _abandon(self) -> None:
        """Fail every caller that still waits for an answer, and end the news; everything else has stopped."""

    async def _open_ledger(self) -> Ledger:
        return await open_store(self._store)

    @abstractmethod
    async def _build_engine(self) -> Engine:
        """Return the engine, with what it needs from the ledger."""

    # ── connection ───────────────────────────────────────────────────────────────────────────────

    def _open_link(self) -> HubLink:
        return WebSocketLink(
            self._url, self._token, up=self._up, heard=self._heard, down=self._down,
            cursors=self._positions, access=self._access,
        )  # fmt: skip

    def _positions(self) -> dict[str, int] | None:
        """Return the read positions of the streams, where the hub continues; None if the client reads
        none."""
        return None

    def _name_from(self, welcome: Frame) -> None:
        self.name = welcome.you or self.name

    def _up(self, welcome: Frame) -> None:
        """Handle a new connection."""
        self._name_from(welcome)

    def _down(self) -> None:
        """Handle the end of a connection."""

    @abstractmethod
    def _heard(self, frame: Frame) -> None:
        """Handle a frame."""

    def _offer(self, event: Event) -> None:
        offer(self._engine, event)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    async def _load_cursors(self) -> dict[str, int]:
        found = {stream: int(n) for stream, n in (await self._ledger.bucket(CURSORS)).items()}
        self._saved = set(found)
        return found

    def _save_cursors(self, cursors: Mapping[str, int]) -> None:
        """Store the read positions in the background, one write at a time. A position that is not stored
        costs a repeat, never a loss."""
        if self._store is not None and self._saving is None:
            self._saving = self.tasks.do("saving cursors", self._write_cursors(cursors))

    async def _write_cursors(self, cursors: Mapping[str, int]) -> None:
        now, dropped = dict(cursors), self._saved - cursors.keys()
        try:
            await self._ledger.write(
                *(PutItem(CURSORS, stream, b"%d" % n) for stream, n in now.items()),
                *(DropItem(CURSORS, stream) for stream in dropped),
            )
            self._saved = set(now)
        except DulyError:
            return
        finally:
            self._saving = None


class OutboxClient(Client):
    """A client whose messages wait in an outbox until the hub has answered them.

    The engine starts after the hub's first welcome, since the account's name is part of every key.
    """

    works_offline = False

    async def _build_engine(self) -> Engine:
        self._ids = await minted_ids(self._ledger)
        return Engine(self._build_outbox(), self._ledger, self._perform)

    @abstractmethod
    def _build_outbox(self) -> Outbox:
        """Return the outbox; `minted=MINTED` keeps ids unique across restarts."""

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                trace, body = self._traces.traceparent(message.key), message.body
                self._link.send(with_traceparent(body, trace) if trace else body)
            case ReportOutcome(key=key, state=state, answer=answer):
                self._end(key, state, answer)
            case Reply(message=message, verdict=verdict):
                if verdict.state is not None and verdict.state.terminal:
                    self._end(message.key, verdict.state, verdict.answer or Answer())
                elif verdict.kind not in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
                    self._not_stored(message, verdict)

    @abstractmethod
    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        """Handle the end of a message."""

    @abstractmethod
    def _not_stored(self, message: Message, verdict: Verdict) -> None:
        """Handle a message that the local outbox did not accept."""
