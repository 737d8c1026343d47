"""A task from both ends: as its handler gets it, and as its sender sees it.

The law: every task ends, once. Only `unknown` may still be settled by a late result, which `result` and
`state` then show.
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
_ACCEPTED: Final = State.ACCEPTED.word
_SENT: Final = State.SENT.word


class Task:
    """A task, as its handler gets it. `payload` is the value, `raw` the JSON text as it was on the wire."""

    __slots__ = ("_progress", "action", "attempt", "expires", "id", "payload", "raw", "sender")

    def __init__(
        self,
        message: Message,
        content: Content,
        sender: str,
        attempt: int,
        progress: Callable[[object], None],
    ) -> None:
        self.action = message.kind
        self.payload = content.value
        self.raw = content.raw
        self.sender = sender
        self.id = message.id
        self.attempt = attempt
        self.expires = message.expires / SECOND if message.expires else None
        """the time after which it must not be done, in seconds since 1970; None if it has none"""
        self._progress = progress

    def progress(self, value: object) -> None:
        """Report progress to the sender. A report may be lost; the result is not."""
        self._progress(value)


class SharedFuture(Generic[T]):
    """A value that will be known later. Any number of callers may await it, any number of times."""

    __slots__ = ("_problem", "_value", "_waiting", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._problem: Exception | None = None
        self._waiting: list[asyncio.Future[None]] | None = None

    def __await__(self) -> Generator[asyncio.Future[None], None, T]:
        if not self.done:
            yield from self._wait()
        if self._problem is not None:
            raise self._problem
        return cast("T", self._value)

    async def within(self, seconds: float) -> T:
        """Wait for the value; raises `TimeoutError` if it is not known in time."""
        if not self.done:
            told = self._wait()
            timer = told.get_loop().call_later(seconds, _lapse, told)
            try:
                await told
            finally:
                timer.cancel()
        return await self

    def _wait(self) -> asyncio.Future[None]:
        # Each caller has its own future, so that cancelling one does not cancel the others.
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = [told]
        else:
            self._waiting.append(told)
        return told

    def tell(self, value: T) -> None:
        """Set the value, unless it is known."""
        if not self.done:
            self._value = value
            self._settle()

    def fail(self, problem: Exception) -> None:
        """Set an error instead of the value, unless it is known."""
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
    """A task that this node sent. `await task.delivered` waits until its receiver has stored it, and `await
    task.result` until its end: it returns the result, or raises `TaskFailed`, `Expired` or `Unknown`."""

    __slots__ = (
        "_delivered", "_heard", "_news", "_problem", "_stored", "_updates", "action", "id", "progress",
        "result", "state", "to",
    )  # fmt: skip

    def __init__(self, message: Message, state: State = State.ACCEPTED) -> None:
        self.id = message.id
        self.to = message.recipient
        self.action = message.kind
        self.state = _ACCEPTED
        self._stored: SharedFuture[None] | None = None
        self._delivered: SharedFuture[None] | None = None
        self._problem: Exception | None = None
        self.result: SharedFuture[Any] = SharedFuture()
        self.progress: Any = None
        """the last progress that its handler reported"""
        self._updates: deque[Any] | None = None
        self._heard: tuple[Answer, Content] | None = None
        self._news: asyncio.Event | None = None
        if state is not State.ACCEPTED:
            self.reach(state)

    @property
    def stored(self) -> SharedFuture[None]:
        """When it is stored here."""
        if self._stored is None:
            self._stored = self._future(self.is_stored)
        return self._stored

    @property
    def delivered(self) -> SharedFuture[None]:
        """When its receiver has stored it."""
        if self._delivered is None:
            self._delivered = self._future(self.is_delivered)
        return self._delivered

    def _future(self, is_past: bool) -> SharedFuture[None]:
        """Return a future, which is made when it is first asked for: most never are."""
        future: SharedFuture[None] = SharedFuture()
        if is_past:
            future.tell(None)
        elif self._problem is not None:
            future.fail(self._problem)
        return future

    @property
    def is_stored(self) -> bool:
        """Whether it is stored here."""
        return self.state != _ACCEPTED

    @property
    def is_delivered(self) -> bool:
        """Whether its receiver has it."""
        return self.state not in (_ACCEPTED, _SENT)

    @property
    def ended(self) -> bool:
        """Whether it is in a final state."""
        return State[self.state.upper()].terminal

    async def updates(self) -> AsyncIterator[Any]:
        """Yield the progress that its handler reports, until it has ended."""
        self._news = self._news or asyncio.Event()
        while True:
            while self._updates:
                yield self._updates.popleft()
            if self.result.done:
                return
            self._news.clear()
            await self._news.wait()

    # ── for the node ─────────────────────────────────────────────────────────────────────────────

    def report_progress(self, value: object) -> None:
        """Note the progress that its handler reports."""
        self.progress = value
        if self._updates is None:
            self._updates = deque(maxlen=UPDATES_KEPT)
        self._updates.append(value)
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def reach(self, state: State) -> None:
        """Note its new state."""
        self.state = state.word
        if self._stored is not None:
            self._stored.tell(None)
        if self._delivered is not None and state is not State.SENT:
            self._delivered.tell(None)

    def hear(self, answer: Answer, content: Content) -> None:
        """Note an answer with this content; it counts once it is stored."""
        self._heard = (answer, content)

    def end(self, state: State, answer: Answer) -> None:
        """Note its outcome; a second one settles an unknown outcome."""
        if self.result.done:
            self.result = SharedFuture()
        heard = self._heard
        try:
            if state is State.DONE and heard is not None and heard[0] is answer:
                self.result.tell(heard[1].value)  # already decoded
            else:
                self.result.tell(outcome(state, answer))
        except (OutcomeError, Expired) as problem:
            self.result.fail(problem)
        self.reach(state)
        self._wake()

    def fail(self, problem: Exception) -> None:
        """Note that it was not stored, or that its outcome will not be known here."""
        self._problem = problem
        for future in (self._stored, self._delivered, self.result):
            if future is not None:
                future.fail(problem)


def outcome(state: State, answer: Answer) -> Any:
    """Return what a task returned, or raise the error that says how else it ended."""
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
_MARKS: Final = tuple(bytes((flags,)) for flags in range(16))


def pack(content: Content, form: Form | None, *, old_names: bool = False, guessed: bool = False) -> bytes:
    """Return a content as the ledger stores it: one byte for the peer's form, then the bytes of the wire.
    `guessed`: the form was guessed from the bytes, and may be corrected by what is known of the peer."""
    flags = _FORMS.index(form) | _OLD * old_names | _GUESSED * guessed
    return _MARKS[flags] + content.raw


def pack_task(task: fd.FdPending) -> bytes:
    """Return a task as the ledger stores it. It depends only on the task's own bytes: the same bytes are the
    same task, whatever was learned about its sender in between."""
    content = task.payload
    guessed = content.raw[:1] == b'"' and content.form is not None and not content.sure
    return pack(content, content.form, old_names=task.old_names, guessed=guessed)


def unpack(kept: bytes) -> Content:
    """Decode a content that `pack` encoded.

    >>> unpack(pack(fd.content_of("test", Form.JSON), Form.JSON)).value
    'test'
    """
    guessed = bool(kept and kept[0] & _GUESSED)
    return fd.read_content(kept[1:], form_of(kept), sure=not guessed)


def as_kept(kept: bytes) -> Content:
    """Return the same content to be sent unchanged, without decoding it."""
    return Content(kept[1:], form_of(kept), kept[1:])


def form_of(kept: bytes) -> Form | None:
    """Return the peer's form."""
    return _FORMS[kept[0] & 3] if kept else None


def has_old_names(kept: bytes) -> bool:
    """Return whether the peer uses the older field names."""
    return bool(kept) and kept[0] & _OLD != 0
