"""The router: many frames of one client leave turns of the event loop to the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence

import pytest

from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.server.router import Router
from duly.storage.memory import MemoryLedger
from duly.transports.http.frame_batches import FrameBatch
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import OutgoingFrame, SeenFrame, ServerAck
from duly.wire.session import Session, UncongestedSession

PHONE = Principal("phone", Role.APP)


class CountingApp:
    """Accepts every frame, and counts how many begin in each turn of the event loop."""

    roles = frozenset({Role.APP})
    types = frozenset({"at_once", "later"})
    prompt = frozenset({"at_once"})
    open = False

    def __init__(self) -> None:
        self.turn = 0
        self.begun: Counter[int] = Counter()
        self.order: list[str | None] = []

    async def tick(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None: ...

    async def disconnected(self, session: Session, who: Principal) -> None: ...

    def refused(self, who: Principal, seq_id: str) -> None: ...

    def dismiss(self, name: str) -> None: ...

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        if frame.type == "later":
            return self._later(session, frame)
        self._accept(session, frame)
        return True

    async def _later(self, session: Session, frame: Frame) -> bool:
        self._accept(session, frame)
        return True

    def _accept(self, session: Session, frame: Frame) -> None:
        self.begun[self.turn] += 1
        self.order.append(frame.seq_id)
        session.push(ServerAck(frame.seq_id, ServerCode.ACCEPTED))


@pytest.mark.parametrize(
    "raw", [b'{"type":"at_once","seq_id":"%d"}', b'{"type":"later","seq_id":"%d"}', b'{"type":"at_once", "%d']
)
async def test_an_array_is_taken_in_several_turns(raw: bytes) -> None:
    app = CountingApp()
    router = Router(ActivityLog(MemoryLedger()), [app])
    batch = FrameBatch(1_000, single=False)
    ticking = asyncio.create_task(app.tick())
    raws: Sequence[bytes] = [raw % i for i in range(1_000)]
    await router.receive_all(batch.waiters, PHONE, raws)
    ticking.cancel()
    assert all(waiter.said is not None for waiter in batch.waiters)
    assert app.turn >= 10
    if app.order:
        assert max(app.begun.values()) <= 101
        assert app.order == [str(i) for i in range(1_000)]


async def test_an_array_of_large_frames_is_taken_in_more_turns() -> None:
    app = CountingApp()
    router = Router(ActivityLog(MemoryLedger()), [app])
    batch = FrameBatch(30, single=False)
    ticking = asyncio.create_task(app.tick())
    await router.receive_all(
        batch.waiters, PHONE, [b'{"type":"at_once","data":"%b"}' % (b"x" * 250_000)] * 30
    )
    ticking.cancel()
    assert max(app.begun.values()) <= 2


class Administrators(CountingApp):
    roles = frozenset({Role.ADMIN})


class WatchingScreen(UncongestedSession):
    """What an administrator is shown."""

    def __init__(self) -> None:
        self.listening = True
        self.shown: list[OutgoingFrame] = []

    def push(self, frame: OutgoingFrame) -> None:
        self.shown.append(frame)

    def close(self, reason: str) -> None: ...


async def test_a_session_that_asks_twice_to_watch_sees_an_event_once_until_it_is_gone() -> None:
    activity = ActivityLog(MemoryLedger())
    router, screen = Router(activity, [Administrators()]), WatchingScreen()
    receive = router.receiver(screen, Principal("root", Role.ADMIN))
    for _ in range(2):
        assert receive(b'{"type":"watch"}') is True
    activity.see("sent")
    assert [type(frame) for frame in screen.shown] == [ServerAck, ServerAck, SeenFrame]
    screen.listening = False  # as an HTTP request that has been answered
    activity.see("sent")
    assert (len(screen.shown), activity.watchers) == (3, [])
