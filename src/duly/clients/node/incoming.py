"""The tasks that a node receives: each is stored, run once and answered; every repeat gets the same answer.

The laws. PUBACK and `ack` go out when a task is stored, not before. A result is stored before it is sent; a
repeat never runs, it gets the stored answer. A task that has expired, is for another node, or is not signed
where that is required, is not run and not answered. After a crash in the middle `at_least_once` runs again;
`at_most_once` does not, and its sender is told that the outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, TypeAlias

from msgspec import Struct

from duly.clients.base import BackgroundJobs
from duly.clients.node.mailbox import Mailbox
from duly.clients.node.peers import Peers, Refusals
from duly.clients.node.tasks import Task, as_kept, has_old_names, pack, pack_task, unpack
from duly.core.horizon import Horizon
from duly.core.id_budget import IdBudget
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Order, Verdict, VerdictKind
from duly.core.ordering import LanePolicy
from duly.core.outbox import TIMED_OUT, OutboxPolicy
from duly.core.steps import Answered, Arrived, Reply, ReportOutcome, Transmit
from duly.core.units import FOREVER
from duly.errors import LedgerError, NotAuthenticated, Overloaded, Stopped, TaskFailed, TooLarge
from duly.runtime.engine import Engine, no_effect
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger
from duly.wire import fd
from duly.wire.fd import FdKind, Form
from duly.wire.fd_signatures import FdSignatures
from duly.wire.session import Acknowledge

REASON: Final = 500
"""The most characters of an exception that are sent."""

BACKLOG: Final = 9_000
"""The most tasks under way or waiting. Further ones stay at the broker, unacknowledged. The engine has room
for more, so it refuses none."""

ANSWER_LIMIT: Final = fd.SIZE_LIMIT - 1024
"""The most bytes of JSON in an answer, with room for its envelope."""

READ_KEPT: Final = 1_000
"""How many decoded payloads are kept until their tasks run; others are decoded again."""

_ACK: Final = FdKind.ACK  # reading a member from its class takes nine times as long
_COMPLETE: Final = FdKind.COMPLETE
_FAILED: Final = FdKind.FAILED
_DONE: Final = State.DONE
_ANSWERED: Final = (State.DONE, State.FAILED)
"""The states of a task that its handler has answered."""
_STORED: Final = (VerdictKind.FRESH, VerdictKind.DUPLICATE)
_ITSELF: Final = "/self"
"""The end of the scope of tasks that a node sent to itself: no username contains a slash, so ids cannot
collide."""

Handler: TypeAlias = Callable[[Task], Awaitable[object]]


class Action(Struct, frozen=True):
    """How the tasks of one action are handled."""

    handler: Handler
    repeatable: bool
    deadline: float | None


class Incoming:
    """A node's inbox, and its handlers at work."""

    def __init__(
        self,
        name: str,
        form: Form,
        actions: Mapping[str, Action],
        horizon: Horizon,
        lanes: LanePolicy,
        budget: IdBudget,
        ledger: Ledger,
        mailbox: Mailbox,
        signatures: FdSignatures,
        peers: Peers,
        refusals: Refusals,
        jobs: BackgroundJobs,
        *,
        ordered: bool,
    ) -> None:
        self._name, self._form, self._actions, self._horizon = name, form, actions, horizon
        self._ledger, self._mailbox, self._peers, self._refusals = ledger, mailbox, peers, refusals
        self._signatures, self._budget, self._jobs, self._ordered = signatures, budget, jobs, ordered
        self._inbox = Inbox(
            OutboxPolicy("run", None, patience=FOREVER),
            ledger.worker,
            lanes=lanes,
            horizon=lambda _: horizon,
            repeatable=self._repeatable,
            refuse=self._unaffordable,
        )
        self.engine = Engine(
            self._inbox,
            ledger,
            no_effect,
            performers={Transmit: self._start, Reply: self._reply, ReportOutcome: self._ended},
        )
        self._held: deque[tuple[Arrived, Acknowledge]] = deque()
        self.tasks = Supervisor()
        self._read: dict[bytes, fd.Content] = {}
        """payloads of tasks that were just received and run next"""
        self._asked: dict[bytes, Message] = {}
        """the tasks that run"""

    async def drain(self, within: float) -> None:
        """Wait for handlers, then cancel those that have not finished."""
        await self.tasks.finish(within)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def hear(self, text: bytes, ack: Acknowledge) -> None:
        """Accept a task. Raises `SenderError` if it is malformed."""
        task = fd.decode_pending(text)
        if task.receiver and task.receiver != self._name:
            reason = f"it is for {task.receiver}, not for {self._name}"
            self._refusals.note(task.sender, task.msg_id, "other_receiver", reason)
            ack()
            return
        try:
            self._signatures.check(task, by=task.sender)
        except NotAuthenticated as problem:
            self._refusals.note(task.sender, task.msg_id, problem.word, str(problem))
            ack()
            return
        payload = self._peers.read(task.sender, task.payload)
        message = Message(
            task.sender + _ITSELF if task.sender == self._name else task.sender,
            task.msg_id,
            task.action,
            self._name,
            pack_task(task),
            task.time,
            task.exp,
            Order(task.sender) if self._ordered else None,
        )
        if payload.sure:  # what is learned about its sender meanwhile does not change it
            if len(self._read) >= READ_KEPT:
                self._read.clear()  # repeats never run
            self._read[message.key] = payload
        if self._held or self._full:
            self._held.append((Arrived(message), ack))
        else:
            self._offer(Arrived(message), ack)

    def _offer(self, event: Arrived, ack: Acknowledge) -> None:
        try:
            self.engine.offer(event, ack)
        except Overloaded:
            self._jobs.do(self._put(event, ack))
        except Stopped:
            return  # not acknowledged: it comes again

    @property
    def _full(self) -> bool:
        return self._inbox.live + self.engine.waiting >= BACKLOG

    def reconnected(self) -> None:
        """Forget what was not stored: it was not acknowledged, so it is sent again."""
        self._held.clear()

    async def _put(self, event: Arrived | Answered, ack: Acknowledge | None = None) -> None:
        with suppress(Stopped):
            await self.engine.put(event, ack)

    def _repeatable(self, message: Message) -> bool:
        action = self._actions.get(message.kind)
        return action is None or action.repeatable

    def _unaffordable(self, event: Arrived, now: int) -> Verdict | None:
        message, budget = event.message, self._budget
        if message.expires <= now + self._horizon.keep or budget.afford(message.scope, message.expires, now):
            return None
        return Verdict(
            VerdictKind.REFUSED,
            reason=f"{message.scope} has used up its budget of {budget.limit} ids that are remembered for "
            "long; send tasks that expire sooner",
            cause="budget",
        )

    # ── what follows, once it is stored ──────────────────────────────────────────────────────────

    def _start(self, effect: Transmit) -> None:
        """Run a task's handler."""
        message = effect.message
        self._asked[message.key] = message
        self.tasks.do(f"handler of {message.kind}", self._run(message, effect.attempt), expected=(Stopped,))

    def _ended(self, effect: ReportOutcome) -> None:
        """Answer a task that has ended, and accept tasks that were held back for lack of room."""
        while self._held and not self._full:
            self._offer(*self._held.popleft())
        key, state, answer = effect.key, effect.state, effect.answer
        asked = self._asked.pop(key, None)
        if asked is None:
            self._jobs.do(self._find_and_tell(key, state, answer))
        else:
            self._tell(asked, state, answer)

    def _reply(self, effect: Reply) -> None:
        """Acknowledge a stored task; a repeat of an ended one gets its answer as well."""
        message, verdict = effect.message, effect.verdict
        if verdict.kind in _STORED:
            sender = _sender(message.scope)
            ack = fd.FdAck(message.id, old_names=has_old_names(message.body))
            self._mailbox.post(sender, _ACK, self._signatures.encode(ack, sender))
            if verdict.state is not None and verdict.state.terminal:
                self._tell(message, verdict.state, verdict.answer or Answer())
        elif verdict.retry:
            self._mailbox.link.reconnect("the ledger cannot store now; what was not stored comes again")
        else:
            self._refusals.count(verdict.named)  # the ledger has recorded it

    async def _find_and_tell(self, key: bytes, state: State, answer: Answer) -> None:
        """Answer a task that ended without running here: only the ledger has its message."""
        with suppress(LedgerError):
            record = await self._ledger.find(key)
            if record is not None:
                self._tell(record.message, state, answer)

    def _tell(self, task: Message, state: State, answer: Answer) -> None:
        old = has_old_names(task.body)
        if answer.data and state in _ANSWERED:
            content = as_kept(answer.data)
            # Repeated exactly as it was first sent, whatever was learned since.
            form = content.form or self._asked_with(task)[1]
        else:
            form = self._asked_with(task)[1]
            why = {"code": answer.code or TIMED_OUT, "detail": answer.reason, "state": state.word}
            content = fd.content_of(why, form)
        sender, encode = _sender(task.scope), self._signatures.encode
        if state is _DONE:
            kind, text = _COMPLETE, encode(fd.FdComplete(task.id, content, old_names=old), sender, form)
        else:
            kind, text = _FAILED, encode(fd.FdFailed(task.id, content, old_names=old), sender, form)
        self._mailbox.keep(task.key, sender, kind, text)

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    async def _run(self, message: Message, attempt: int) -> None:
        payload, form = self._asked_with(message)
        sender = _sender(message.scope)

        def progress(value: object) -> None:
            old = has_old_names(message.body)
            said = fd.FdAck(message.id, old_names=old, progress=fd.content_of(value, form))
            self._mailbox.post(sender, _ACK, self._signatures.encode(said, sender, form))

        state, error = State.FAILED, ""
        try:
            try:
                task = Task(message, payload, sender, attempt, progress)
                said = _within(fd.content_of(await self._act(task), form))
                state = State.DONE
            except TaskFailed as problem:
                said, error = _within(fd.content_of(problem.error, form)), str(problem)
        except asyncio.CancelledError as problem:
            us = asyncio.current_task()
            if us is None or us.cancelling():
                raise
            # something it waited for was cancelled: the handler failed, but this node is not stopping
            error = repr(problem)
            said = fd.content_of(error, form)
        except Exception as problem:
            error = repr(problem)[:REASON]
            said = fd.content_of(error, form)
        answer = Answer(int(state is State.FAILED), pack(said, form), error[:REASON])
        ended = Answered(message.key, state, answer, attempt)
        try:
            self.engine.offer(ended)
        except (Overloaded, Stopped):
            await self._put(ended)

    def _asked_with(self, message: Message) -> tuple[fd.Content, Form]:
        """Return a task's payload and the form of its answer, by what is known of its sender now."""
        sender = _sender(message.scope)
        read = self._read.pop(message.key, None)
        content = self._peers.meant(sender, unpack(message.body)) if read is None else read
        return content, content.form or self._peers.form(sender) or self._form

    def _act(self, task: Task) -> Awaitable[object]:
        """Return the coroutine of the handler for a task."""
        action = self._actions.get(task.action)
        if action is None:
            raise TaskFailed(f"{self._name} does not know {task.action}")
        handler, deadline = action.handler, action.deadline
        return handler(task) if deadline is None else _in_time(handler, task, deadline)


async def _in_time(handler: Handler, task: Task, deadline: float) -> object:
    timeout = asyncio.timeout(deadline)
    try:
        async with timeout:
            return await handler(task)
    except TimeoutError:
        if timeout.expired():
            raise TaskFailed(f"it took longer than {deadline:g} s") from None
        raise


def _within(said: fd.Content) -> fd.Content:
    if len(said.raw) > ANSWER_LIMIT:
        raise TooLarge(f"the answer takes {len(said.raw)} bytes, the limit is {ANSWER_LIMIT}")
    return said


def _sender(scope: str) -> str:
    return scope.removesuffix(_ITSELF)
