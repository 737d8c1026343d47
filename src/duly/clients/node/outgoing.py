"""The tasks that a node sends: each is stored, and sent again until it is answered or has expired.

The laws. A task is stored before it is sent, and sent again with the same id and the same bytes: at once
after a reconnect, otherwise after growing pauses. An answer counts only for a task that this node sent, and
where signing is required only if the task's receiver signed it. The first answer counts; a late one settles a
task that is `unknown`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Final, TypeAlias

from msgspec.structs import replace

from duly.clients.base import BackgroundJobs
from duly.clients.node.mailbox import Mailbox
from duly.clients.node.peers import Peers, Refusals
from duly.clients.node.tasks import SentTask, pack
from duly.core.ids import Uuid7Ids
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind, key_of
from duly.core.operations import Advance, DeliveryRef, Finish
from duly.core.outbox import Outbox, OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    Event,
    Reachable,
    Received,
    Reply,
    ReportOutcome,
    Transmit,
)
from duly.core.units import DAY, HOUR, SECOND, seconds
from duly.errors import (
    Conflict,
    ConnectionLost,
    DulyError,
    LedgerError,
    Malformed,
    NotAuthenticated,
    Overloaded,
    Stopped,
)
from duly.runtime.engine import Engine, no_effect
from duly.storage.ledger import Ledger, Record
from duly.wire import fd
from duly.wire.fd import FdKind, Form
from duly.wire.fd_signatures import FdSignatures
from duly.wire.publish_properties import PublishProperties, seconds_left
from duly.wire.session import Acknowledge

PATIENCE: Final = HOUR
"""How long after its expiry a received task may still be answered before it ends as unknown."""

REMEMBER: Final = 7 * DAY
RECEIPTS_AFTER: Final = 0.5
CHANNEL: Final = "task"
CANCELLED: Final = Answer(0, b"", "its sender has cancelled it")
UNSETTLED: Final = 10_000
"""How many tasks that ended as unknown can still be settled by a late result."""

Said: TypeAlias = fd.FdAck | fd.FdComplete | fd.FdFailed

_READ: Final[dict[FdKind, Callable[[bytes], Said]]] = {
    FdKind.ACK: fd.decode_ack,
    FdKind.COMPLETE: fd.decode_complete,
    FdKind.FAILED: fd.decode_failed,
}
_PENDING: Final = FdKind.PENDING  # reading a member from its class takes nine times as long
_SENT: Final = State.SENT
_DELIVERED: Final = State.DELIVERED
_DONE: Final = State.DONE
_UNKNOWN: Final = State.UNKNOWN
_STORED: Final = (VerdictKind.FRESH, VerdictKind.DUPLICATE)
_key_of: Final = lru_cache(4_096)(key_of)
"""Cached, because a task's id is needed at least twice more, with its `ack` and its end."""


class Outgoing:
    """A node's outbox."""

    def __init__(
        self,
        name: str,
        form: Form,
        resend: RetryPolicy,
        ledger: Ledger,
        mailbox: Mailbox,
        signatures: FdSignatures,
        peers: Peers,
        refusals: Refusals,
        jobs: BackgroundJobs,
    ) -> None:
        self._name, self._form, self._ledger, self._mailbox = name, form, ledger, mailbox
        self._signatures, self._peers, self._refusals, self._jobs = signatures, peers, refusals, jobs
        policy = OutboxPolicy(CHANNEL, resend, patience=PATIENCE, beyond_expiry=True, remember=REMEMBER)
        self._outbox = Outbox(policy, ledger.worker)
        self.engine = Engine(
            self._outbox,
            ledger,
            no_effect,
            performers={Transmit: self._transmit, Reply: self._stored, ReportOutcome: self._report_end},
        )
        self._sent: OrderedDict[bytes, SentTask] = OrderedDict()
        self._leaving: set[bytes] = set()
        """tasks that were published and not yet confirmed by the broker"""
        self._receipts: dict[bytes, None] = {}
        """tasks whose receiver has them, in order; not stored yet"""
        self._storing: asyncio.TimerHandle | None = None
        self._answers = mailbox.topic(name, FdKind.COMPLETE)
        self._ids = Uuid7Ids()
        self._random = b""

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    async def send(
        self, to: str, action: str, payload: object, expires: float, id: str | None, form: Form | None
    ) -> SentTask:
        """Send a task; returns when it is stored."""
        if id:
            sent = await self._send_again(to, action, payload, expires, id, form or self._form)
        else:
            sent = self.begin(to, action, payload, expires, form)
        await sent.stored
        return sent

    def begin(
        self, to: str, action: str, payload: object, expires: float, form: Form | None = None
    ) -> SentTask:
        """Send a new task; it is stored and published soon after."""
        now, how = self._ledger.clock.now(), form or self._form
        content = fd.content_of(payload, how)
        return self._launch(
            fd.FdPending(self._name, to, self._mint(now), action, now, _until(now, expires), content), how
        )

    async def retry(self, id: str, expires: float) -> SentTask:
        """Send a task that has ended once more, under a new id."""
        record = await self._record(id)
        if not record.state.terminal:
            raise Malformed(f"{id} has not ended; it is sent again without your help")
        task, now = fd.decode_pending(record.message.body), self._ledger.clock.now()
        anew = replace(task, msg_id=self._mint(now), time=now, exp=_until(now, expires))
        sent = self._launch(anew, task.form or self._form)
        await sent.stored
        return sent

    async def _send_again(
        self, to: str, action: str, payload: object, expires: float, id: str, form: Form
    ) -> SentTask:
        """Send a task under an id that may have been used: the same task under it is a repeat, whatever its
        times are."""
        now, key = self._ledger.clock.now(), key_of(self._name, id)
        task = fd.FdPending(
            self._name, to, id, action, now, _until(now, expires), fd.content_of(payload, form)
        )
        known = await self._ledger.find(key)
        if known is not None and _meaning(known.message.body) != _meaning(fd.encode(task, form)):
            raise Conflict(f"{id} was used before for something else; nothing was sent; use a new id")
        if (sent := self._sent.get(key)) is not None:
            return sent
        return self._launch(task, form) if known is None else self._store(known.message)

    def _launch(self, task: fd.FdPending, form: Form) -> SentTask:
        body = self._signatures.encode(task, task.receiver, form)
        return self._store(
            Message(self._name, task.msg_id, task.action, task.receiver, body, expires=task.exp)
        )

    def _store(self, message: Message) -> SentTask:
        event = Arrived(message)
        try:
            self.engine.offer(event)
        except Overloaded:
            self._jobs.do(self._put(event, None))
        sent = self._sent[message.key] = SentTask(message)
        return sent

    def _mint(self, now: int) -> str:
        if not self._random:
            self._random = secrets.token_bytes(10 * 256)  # one call to the system for many ids
        bits, self._random = self._random[:10], self._random[10:]
        return self._ids.next(now, int.from_bytes(bits, "big"))

    async def find(self, id: str) -> SentTask:
        """Return a task that this node sent, also before a restart."""
        key = key_of(self._name, id)
        if (sent := self._sent.get(key)) is not None:
            return sent
        record = await self._record(id)
        sent = self._sent.setdefault(key, SentTask(record.message, record.state))
        record = await self._record(id)  # it may have ended before this SentTask was created
        if record.state.terminal and not sent.result.done:
            self._ended(key, record.state, record.answer or Answer())
        return sent

    async def cancel(self, id: str) -> SentTask:
        """Stop sending a task; returns when that is stored."""
        sent = await self.find(id)
        stored = asyncio.Event()
        await self.engine.put(Answered(key_of(self._name, id), State.CANCELLED, CANCELLED), stored.set)
        await stored.wait()
        return sent

    async def _record(self, id: str) -> Record:
        record = await self._ledger.find(key_of(self._name, id))
        if record is None:
            raise Malformed(f"{self._name} has sent no task {id}, or has forgotten it")
        return record

    def reconnected(self) -> None:
        """Send everything again: the broker may have lost it, even if it kept the session."""
        self._offer(Reachable(""))

    def flush(self) -> None:
        """Store the waiting receipts."""
        if self._storing is not None:
            self._storing.cancel()
        self._store_receipts()

    def close(self) -> None:
        """Fail every caller that still waits."""
        for sent in self._sent.values():
            sent.fail(Stopped("the node was stopped before the task ended; with store= it goes on"))

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    def hear(self, kind: FdKind, payload: bytes, ack: Acknowledge) -> None:
        """Handle an answer. Raises `SenderError` if it is malformed."""
        said = _READ[kind](payload)
        key = _key_of(self._name, said.msg_id)
        task = self._outbox.transmissions.get(key)
        if task is None:
            self._jobs.do(self._late(key, said, ack))
        else:
            self._answered(key, said, task.message.recipient, ack)

    async def _late(self, key: bytes, said: Said, ack: Acknowledge) -> None:
        """Handle an answer to a task that is not under way: it may settle an unknown one, or belong to no
        task of this node."""
        try:
            record = await self._ledger.find(key)
        except LedgerError:
            self._mailbox.link.reconnect("the ledger cannot be read now; what was not stored comes again")
            return
        if record is None:
            self._refusals.note(
                "", said.msg_id, "unknown_task", f"an answer to no task that {self._name} sent"
            )
            ack()
        elif isinstance(said, fd.FdAck):
            ack()
        else:
            self._answered(key, said, record.message.recipient, ack)

    def _answered(self, key: bytes, said: Said, by: str, ack: Acknowledge) -> None:
        try:
            self._signatures.check(said, by)
        except NotAuthenticated as problem:
            self._refusals.note(by, said.msg_id, problem.word, str(problem))
            ack()
            return
        sent = self._sent.get(key)
        if type(said) is fd.FdAck:
            if sent is not None and said.progress is not fd.NOTHING:
                sent.report_progress(self._peers.read(by, said.progress).value)
            self._received(key, sent)
            ack()
        elif type(said) is fd.FdComplete:
            content = self._peers.read(by, said.value)
            answer = Answer(0, pack(content, content.form))
            if sent is not None:
                sent.hear(answer, content)
            self._offer(Answered(key, _DONE, answer), ack)
        elif type(said) is fd.FdFailed:
            content = self._peers.read(by, said.error)
            state, reason = _failure(content.value)
            self._offer(Answered(key, state, Answer(1, pack(content, content.form), reason)), ack)

    def _received(self, key: bytes, sent: SentTask | None) -> None:
        """Note that the receiver has a task. That is stored a little later: most tasks are answered before,
        and after a crash the task is sent and acknowledged again."""
        if sent is not None and not sent.is_delivered:
            sent.reach(_DELIVERED)
        self._receipts[key] = None
        if self._storing is None:
            self._storing = asyncio.get_running_loop().call_later(RECEIPTS_AFTER, self._store_receipts)

    def _store_receipts(self) -> None:
        self._storing = None
        receipts, self._receipts = self._receipts, {}
        for key in receipts:
            if self._outbox.transmissions.state(key) is State.SENT:
                self._offer(Received(key))

    def _offer(self, event: Event, ack: Acknowledge | None = None) -> None:
        try:
            self.engine.offer(event, ack)
        except Overloaded:
            self._jobs.do(self._put(event, ack))
        except Stopped:
            return  # not acknowledged: it comes again

    async def _put(self, event: Event, ack: Acknowledge | None) -> None:
        with suppress(Stopped):
            await self.engine.put(event, ack)

    # ── what follows, once it is stored ──────────────────────────────────────────────────────────

    def _transmit(self, effect: Transmit) -> None:
        """Publish a task, unless it is already on its way to the broker."""
        message = effect.message
        key = message.key
        if key not in self._leaving:
            self._leaving.add(key)
            properties = PublishProperties(
                seconds_left(message.expires, self._ledger.clock.now()), self._answers, message.id.encode()
            )
            left = partial(self._left, message)
            self._mailbox.post(message.recipient, _PENDING, message.body, left, properties)

    def _left(self, message: Message, problem: DulyError | None) -> None:
        """Note that the broker has a task, or why it has not."""
        self._leaving.discard(message.key)
        if problem is not None and not isinstance(problem, ConnectionLost):
            self._refusals.note(self._name, message.id, problem.word, f"not sent: {problem}")

    def _stored(self, effect: Reply) -> None:
        """Tell a caller that its task is stored, or why not."""
        key, verdict = effect.message.key, effect.verdict
        sent = self._sent.get(key)
        if sent is None:
            return
        if verdict.state is not None and verdict.state.terminal:
            self._ended(key, verdict.state, verdict.answer or Answer())
        elif verdict.kind in _STORED:
            sent.reach(verdict.state or _SENT)
        elif verdict.retry:
            self._jobs.do(self._check_stored(key, sent, verdict))
        else:
            self._refused(key, sent, verdict)

    async def _check_stored(self, key: bytes, sent: SentTask, verdict: Verdict) -> None:
        """Read whether a task was stored although its commit failed: then it is under way, and a caller that
        retried would have it done twice."""
        record = None
        with suppress(LedgerError, Stopped):
            record = await self._ledger.find(key)
        if record is None:
            self._refused(key, sent, verdict)
        elif record.state.terminal and not sent.result.done:
            self._ended(key, record.state, record.answer or Answer())
        elif not sent.is_stored:
            sent.reach(record.state)

    def _refused(self, key: bytes, sent: SentTask, verdict: Verdict) -> None:
        self._sent.pop(key, None)
        try:
            verdict.require()
        except DulyError as problem:
            sent.fail(problem)

    def _report_end(self, effect: ReportOutcome) -> None:
        """Tell a caller how its task ended."""
        self._ended(effect.key, effect.state, effect.answer)

    def _ended(self, key: bytes, state: State, answer: Answer) -> None:
        sent = self._sent.get(key)
        if sent is None:
            return
        sent.end(state, answer)
        if state is not _UNKNOWN:
            del self._sent[key]
        elif len(self._sent) > UNSETTLED:
            oldest = next((k for k, s in self._sent.items() if s.result.done), None)
            if oldest is not None:
                del self._sent[oldest]


async def cancel_stored(ledger: Ledger, id: str) -> bool:
    """Cancel a task in the ledger of a node that is not running. Returns False if it has ended or does not
    exist."""
    name = (await ledger.item("node", "name") or b"").decode()
    record = await ledger.find(key_of(name, id)) if name else None
    if record is None or record.state.terminal:
        return False
    message, now = record.message, ledger.clock.now()
    ref = DeliveryRef(message.key, CHANNEL, message.recipient)
    end = Advance(message.key, State.CANCELLED, now, CANCELLED)
    return await ledger.apply(Finish(ref, None, State.CANCELLED, CANCELLED.reason, (end,)))


def _until(now: int, expires: float) -> int:
    """Return when a task expires, rounded up to the whole seconds of the wire."""
    if expires < 0:
        raise Malformed(f"expires={expires:g} is in the past; it is a number of seconds from now")
    return -(-(now + seconds(expires)) // SECOND) * SECOND


def _meaning(body: bytes) -> tuple[str, str, object]:
    """Return what makes two tasks with one id the same; times and signatures may differ."""
    task = fd.decode_pending(body)
    return task.receiver, task.action, task.payload.value


def _failure(error: object) -> tuple[State, str]:
    """Return how a task ended, by its error: a duly node names the state if it is not `failed`."""
    match error:
        case {"state": "unknown" | "expired" | "superseded" | "cancelled" as state, **rest}:
            return State[state.upper()], str(rest.get("detail", ""))[:500]
        case _:
            return State.FAILED, str(error)[:500]
