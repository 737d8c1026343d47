"""Requests that wait for their answers without a task each."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from duly.apps.alerts.profiles import ProfileDraft
from duly.identity.accounts import Role
from duly.transports.http import frame_batches
from duly.transports.http.frame_batches import FrameBatch, PendingRequests
from duly.wire.outgoing import AckFrame, ServerAck
from tests.guard import GUARD
from tests.local_hub import LocalHub


class Answers:
    """What was answered to whom, in order."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []
        self.pending = PendingRequests(self._answer, str)

    def _answer(self, batch: FrameBatch) -> str:
        if not batch.waiters:
            raise ZeroDivisionError
        return " ".join(f"{w.answer.seq_id}{'+' if w.ended else ''}" for w in batch.waiters)

    def add(self, name: str, size: int) -> FrameBatch:
        batch = FrameBatch(size)
        self.pending.add(batch, lambda said: self.given.append((name, said)))
        return batch

    async def until(self, count: int) -> list[tuple[str, str]]:
        async with asyncio.timeout(GUARD):
            while len(self.given) < count:
                await asyncio.sleep(0)
        return self.given


async def test_those_who_are_told_in_one_turn_are_answered_together_with_what_follows_at_once() -> None:
    answers = Answers()
    first, second, third = answers.add("a", 1), answers.add("b", 2), answers.add("c", 1)
    first.waiters[0].push(ServerAck("1", 0))
    second.waiters[1].push(ServerAck("3", 0))
    second.waiters[0].push(ServerAck("2", 0))
    first.waiters[0].push(AckFrame("1", "tower", code=0, state="done"))
    assert answers.given == [], "not before the turn is over"
    assert await answers.until(2) == [("a", "1+"), ("b", "2 3")]
    assert [w.listening for w in (*first.waiters, *second.waiters, *third.waiters)] == [False] * 3 + [True]
    third.waiters[0].push(ServerAck("4", 0))
    assert (await answers.until(3))[2] == ("c", "4")


async def test_one_that_was_told_before_it_waits_is_answered() -> None:
    answers = Answers()
    batch = FrameBatch(1)
    batch.waiters[0].push(ServerAck("1", 0))
    answers.pending.add(batch, lambda said: answers.given.append(("a", said)))
    assert await answers.until(1) == [("a", "1")]


async def test_those_who_are_told_nothing_in_time_are_told_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_batches, "ANSWER_SECONDS", 0.0)
    answers = Answers()
    late = [answers.add("a", 1), answers.add("b", 1)]
    assert [who for who, said in await answers.until(2) if "too busy" in said] == ["a", "b"]
    for batch in late:
        batch.waiters[0].push(ServerAck("1", 0))
    answers.add("c", 1)
    assert [who for who, _ in await answers.until(3)] == ["a", "b", "c"], "each is answered once"


async def test_a_bug_in_one_answer_is_no_trouble_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    answers.add("bug", 0)
    answers.add("fine", 1).waiters[0].push(ServerAck("1", 0))
    bug, fine = await answers.until(2)
    assert (bug[0], "log says why" in bug[1], fine) == ("bug", True, ("fine", "1"))
    assert "ZeroDivisionError" in caplog.text


async def test_an_alert_that_is_only_handed_over_takes_no_task(tmp_path: Path) -> None:
    local = LocalHub(tmp_path)
    await local.start()
    try:
        await local.add(Role.SENTINEL, "gate")
        await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
        reader, writer = await asyncio.open_connection("127.0.0.1", local.port)
        made: set[str] = set()
        loop = asyncio.get_running_loop()

        def note(loop: asyncio.AbstractEventLoop, work: object) -> asyncio.Task[object]:
            made.add(str(work))
            return asyncio.Task(work, loop=loop)  # type: ignore[arg-type]  # a coroutine

        for n in range(3):
            data = b'{"profile_id":"home","trigger_reason":"smoke","timestamp":%d}' % (time.time() * 1000)
            body = b'{"type":"alert_event","seq_id":"event-%d","data":%b}' % (n, data)
            head = b"Host: localhost\r\nAuthorization: Bearer %b\r\n" % local.tokens["gate"].encode()
            if n:  # the first one also stores that its sentinel was seen
                loop.set_task_factory(note)  # type: ignore[arg-type]  # typeshed's is generic
            writer.write(
                b"POST /v1/messages HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
            )
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), GUARD)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            await reader.readexactly(int(answer.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
        loop.set_task_factory(None)
        writer.close()
        assert not [one for one in made if "serve" in one.lower() or "KeepAlive" in one]
    finally:
        await local.stop()
