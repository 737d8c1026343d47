"""A task, from both ends: what a handler gets, and what its sender holds while it is under way.

The law: a task ends once for whoever waits for it, and whatever happens it ends. Only `unknown` may still be
settled, by a late result: then `result` and `state` say that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Final, Generic, TypeVar, cast

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.units import SECOND
from duly.errors import Expired, OutcomeError, TaskFailed, Unknown
from duly.wire import fd
from duly.wire.fd import Content, Form

T = TypeVar("T")

UPDATES_KEPT: Final = 100


class Task:
    """What a handler gets. `payload` is the value sent, `raw` the JSON text as it stood on the wire."""

    __slots__ = ("_progress", "action", "attempt", "expires", "id", "payload", "raw", "sender")

    def __init__(
        self, message: Message, content: Content, sender: str, attempt: int, progress: Callable[[Any], None]
    ) -> None:
        self.action = message.kind
        self.payload = content.value
        self.raw = content.raw
        self.sender = sender
        self.id = message.id
        self.attempt = attempt
        self.expires = message.expires / SECOND if message.expires else None
        """when it should be done by, in seconds since 1970; None if its sender does not say"""
        self._progress = progress

    def progress(self, value: Any) -> None:
        """Tell the sender how far it is. This may get lost; the end does not."""
        self._progress(value)


class Moment(Generic[T]):
    """Something that will be known: await it, as often and by as many as you like."""

    __slots__ = ("_problem", "_value", "_waiting", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._problem: Exception | None = None
        self._waiting: list[asyncio.Future[None]] | None = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            yield from self._wait()
        if self._problem is not None:
            raise self._problem
        return cast("T", self._value)

    async def within(self, seconds: float) -> T:
        """The same; `TimeoutError` if it is not known in so many seconds."""
        if not self.done:
            told = self._wait()
            timer = told.get_loop().call_later(seconds, _lapse, told)
            try:
                await told
            finally:
                timer.cancel()
        return await self

    def _wait(self) -> asyncio.Future[None]:
        # One of its own for each who waits: whoever is cancelled takes nobody with him.
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = [told]
        else:
            self._waiting.append(told)
        return told

    def tell(self, value: T) -> None:
        if not self.done:
            self._value = value
            self._settle()

    def fail(self, problem: Exception) -> None:
        if not self.done:
            self._problem = problem
            self._settle()

    def _settle(self) -> None:
        self.done = True
        if self._waiting is not None:
            for told in self._waiting:
                if not told.done():
                    told.set_result(None)
            self._waiting = None


def _lapse(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_exception(TimeoutError())


class SentTask:
    """A task that this node sent. `await task.delivered`: the other side has stored it. `await task.result`:
    what it returned, or `TaskFailed`, `Expired`, `Unknown`."""

    __slots__ = (
        "_news", "_updates", "action", "delivered", "id", "progress", "result", "state", "stored", "to"
    )  # fmt: skip

    def __init__(self, message: Message, state: State = State.ACCEPTED) -> None:
        self.id = message.id
        self.to = message.recipient
        self.action = message.kind
        self.state = State.ACCEPTED.word
        self.stored: Moment[None] = Moment()
        self.delivered: Moment[None] = Moment()
        self.result: Moment[Any] = Moment()
        self.progress: Any = None
        """what its handler last told"""
        self._updates: deque[Any] | None = None
        self._news: asyncio.Event | None = None
        if state is not State.ACCEPTED:
            self._move(state)

    @property
    def ended(self) -> bool:
        return State[self.state.upper()].terminal

    async def updates(self) -> AsyncIterator[Any]:
        """What its handler tells on the way, until it has ended."""
        self._news = self._news or asyncio.Event()
        while True:
            while self._updates:
                yield self._updates.popleft()
            if self.result.done:
                return
            self._news.clear()
            await self._news.wait()

    def _tell(self, value: Any) -> None:
        self.progress = value
        if self._updates is None:
            self._updates = deque(maxlen=UPDATES_KEPT)
        self._updates.append(value)
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def _move(self, state: State) -> None:
        self.state = state.word
        if not self.stored.done:
            self.stored.tell(None)
        if state is not State.SENT and not self.delivered.done:
            self.delivered.tell(None)

    def _end(self, state: State, answer: Answer) -> None:
        if self.result.done:
            self.result = Moment()  # it was unknown
        try:
            self.result.tell(outcome(state, answer))
        except (OutcomeError, Expired) as problem:
            self.result.fail(problem)
        self._move(state)
        self._wake()

    def _refuse(self, problem: Exception) -> None:
        self.stored.fail(problem)
        self.delivered.fail(problem)
        self.result.fail(problem)


def outcome(state: State, answer: Answer) -> Any:
    """What a task returned, or the error that says how else it ended."""
    match state:
        case State.DONE:
            return unpack(answer.data).value
        case State.EXPIRED:
            raise Expired(answer.reason)
        case State.UNKNOWN:
            raise Unknown(answer.reason)
        case _:
            raise TaskFailed(unpack(answer.data).value if answer.data else answer.reason, state.word)


# ── a content at rest ────────────────────────────────────────────────────────────────────────────

_FORMS: Final = (None, Form.BASE64, Form.JSON)
_OLD: Final = 4
_GUESSED: Final = 8


def pack(content: Content, form: Form | None, *, old_names: bool = False, guessed: bool = False) -> bytes:
    """As the ledger keeps it: how the peer writes, in one byte, and what stood on the wire. `guessed`: only
    the bytes themselves say in which form they are, and what is known of the peer says more."""
    return bytes((_FORMS.index(form) | _OLD * old_names | _GUESSED * guessed,)) + content.raw


def pack_task(task: fd.FdPending) -> bytes:
    """A task as the ledger keeps it. It follows from the task's own bytes: the same bytes are the same task,
    whatever was learned about its sender in between."""
    content = task.payload
    guessed = content.raw[:1] == b'"' and content.form is not None and not content.sure
    return pack(content, content.form, old_names=task.old_names, guessed=guessed)


def unpack(kept: bytes) -> Content:
    """
    >>> unpack(pack(fd.content_of("test", Form.JSON), Form.JSON)).value
    'test'
    """
    guessed = bool(kept and kept[0] & _GUESSED)
    return fd.read_content(kept[1:], asked_as(kept)[0], sure=not guessed)


def as_kept(kept: bytes) -> Content:
    """The same, to be sent as it stands: nobody reads what is in it."""
    return Content(kept[1:], asked_as(kept)[0], kept[1:])


def asked_as(kept: bytes) -> tuple[Form | None, bool]:
    """How the peer writes, and whether it uses the older field names."""
    flags = kept[0] if kept else 0
    return _FORMS[flags & 3], bool(flags & _OLD)
