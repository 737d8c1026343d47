"""The frames of one HTTP request, and the answers to them until the request is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from duly.errors import DulyError, Overloaded, ProgramError
from duly.identity.accounts import Principal
from duly.wire import outgoing
from duly.wire.frames import ServerCode
from duly.wire.outgoing import OutgoingFrame, ServerAck
from duly.wire.session import UncongestedSession

if TYPE_CHECKING:
    from duly.transports.http.messages import MessagesBackend

LOG: Final = logging.getLogger("duly.http")

A = TypeVar("A")

ANSWER_SECONDS: Final = 30.0


class FrameBatch:
    """The frames of one request, each with its session; a `single` one is not in an array."""

    __slots__ = ("_news", "_silent", "_told", "single", "waiters")

    def __init__(self, size: int, *, single: bool = True) -> None:
        self.single = single
        self.waiters = [WaitingRequest(self) for _ in range(size)]
        self._silent = size
        self._told: Callable[[FrameBatch], None] | None = None
        self._news: asyncio.Future[None] | None = None

    def heard(self) -> None:
        """Note that one of the frames got its first answer; the last of them wakes the request."""
        self._silent -= 1
        if not self._silent:
            if self._told is not None:
                self._told(self)
            self.news()

    def when_told(self, told: Callable[[FrameBatch], None]) -> None:
        """Call this when each of the frames has its `server_ack`; at once, if each has it."""
        if self._silent:
            self._told = told
        else:
            told(self)

    def news(self) -> None:
        """Wake the request, which then checks whether it still has to wait."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def said(self) -> None:
        """Wait until all frames have their `server_ack`."""
        if self._silent:
            await self._wait(ANSWER_SECONDS, lambda: not self._silent)
            if self._silent:
                raise too_busy()

    async def ended(self, seconds: float) -> None:
        """Wait until all accepted frames have ended, or for this time."""
        waiting = [w for w in self.waiters if _taken(w.said)]
        try:
            await self._wait(seconds, lambda: all(w.ended is not None for w in waiting))
        finally:
            self.leave()

    def leave(self) -> None:
        """Note that the request is answered or given up."""
        for waiter in self.waiters:
            waiter.listening = False

    async def _wait(self, seconds: float, enough: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        over = loop.time() + seconds
        while not enough() and loop.time() < over:
            self._news = loop.create_future()
            timer = loop.call_at(over, self.news)
            await self._news
            timer.cancel()


class PendingRequests(Generic[A]):
    """The requests that wait for their answers without a task each.

    A request whose frames all have their `server_ack` is answered in the next turn of the loop, so that an
    `ack` that follows at once is part of the answer. One timer watches all requests: those without answers in
    time are told that the hub is busy. `answer` makes an answer, `trouble` an error.
    """

    def __init__(self, answer: Callable[[FrameBatch], A], trouble: Callable[[DulyError], A]) -> None:
        self._answer = answer
        self._trouble = trouble
        self._replies: dict[FrameBatch, tuple[Callable[[A], None], float]] = {}
        """the receivers of the answers, and their deadlines; the oldest first"""
        self._told: list[FrameBatch] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, batch: FrameBatch, reply: Callable[[A], None]) -> None:
        """Add a request whose frames were handed over; `reply` gets the answer."""
        loop = self._loop
        over = loop.time() + ANSWER_SECONDS
        self._replies[batch] = (reply, over)
        if self._timer is None:
            self._watch(over)
        batch.when_told(self._note)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # kept, since asking for it is a call to the system

    def _note(self, batch: FrameBatch) -> None:
        """Note that all frames of a request have their `server_ack`; it is answered in the next turn of the
        loop."""
        if not self._told:
            self._loop.call_soon(self._answer_all)
        self._told.append(batch)

    def _answer_all(self) -> None:
        told, self._told = self._told, []
        for batch in told:
            reply = self._drop(batch)
            if reply is None:
                continue
            try:
                said = self._answer(batch)
            except Exception:  # a bug in one request must not affect the others
                LOG.exception("a bug in answering a request")
                said = self._trouble(ProgramError("no answer could be made; the hub's log says why"))
            reply(said)

    def _drop(self, batch: FrameBatch) -> Callable[[A], None] | None:
        """Forget a request; return its reply function, or None if it was answered."""
        batch.leave()
        found = self._replies.pop(batch, None)
        return None if found is None else found[0]

    def _watch(self, over: float) -> None:
        """Look at the oldest request when its time is over."""
        self._timer = self._loop.call_at(over, self._expire)

    def _expire(self) -> None:
        """Answer requests that have waited too long, and wait for the next."""
        self._timer = None
        loop = self._loop
        for batch, (_, over) in list(self._replies.items()):
            if over > loop.time():
                self._watch(over)
                break
            reply = self._drop(batch)
            if reply is not None:
                reply(self._trouble(too_busy()))


class WaitingRequest(UncongestedSession):
    """The session of one frame over HTTP: it keeps the `server_ack`, and the `ack` that may follow."""

    __slots__ = ("__weakref__", "_batch", "ended", "listening", "said")

    def __init__(self, batch: FrameBatch) -> None:
        self._batch = batch
        self.listening = True  # until the request is answered, or given up
        self.said: ServerAck | None = None
        self.ended: OutgoingFrame | None = None

    def push(self, frame: OutgoingFrame) -> None:
        """Keep the `server_ack`, then the `ack`; other frames are ignored."""
        if self.said is None:
            if type(frame) is ServerAck:
                self.said = frame
                self._batch.heard()
        elif self.ended is None:
            self.ended = frame
            self._batch.news()

    def close(self, reason: str) -> None:
        """Do nothing: the request ends when it is answered."""

    @property
    def answer(self) -> ServerAck:
        """Return the `server_ack`, with the `ack` in it if there is one."""
        assert self.said is not None, "`FrameBatch.said` waits until every request has been told"
        return self.said if self.ended is None else outgoing.with_ack(self.said, self.ended)


async def hand_over(
    server: MessagesBackend, who: Principal, raws: Sequence[bytes], wait: float = 0.0, *, single: bool = True
) -> FrameBatch:
    """Hand frames to the hub; returns when each has its `server_ack`. With `wait`, `ended` follows."""
    batch = FrameBatch(len(raws), single=single)
    told = False
    try:
        await server.receive_all(batch.waiters, who, raws)
        await batch.said()
        told = True
    finally:
        if not (told and wait):
            batch.leave()
    return batch


def too_busy() -> Overloaded:
    """Return the error of a request whose frames got no answer in time."""
    return Overloaded("the hub is too busy to answer; ask again with the same ids")


def _taken(frame: ServerAck | None) -> bool:
    """Return whether a frame was accepted and has yet to end."""
    return (
        frame is not None and frame.code in (ServerCode.ACCEPTED, ServerCode.DUPLICATE) and not is_all(frame)
    )


def is_all(frame: ServerAck) -> bool:
    """Return whether nothing more will follow: a line has its number, or a question its answer."""
    return frame.n is not None or bool(frame.data)
