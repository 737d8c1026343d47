"""The values of `duly.Consumer`: a message of a queue, and its outcome.

The law: a message of a queue is the kernel's message under another name, and is rebuilt from it after a
restart. Its scope is the consumer's name and the sender, so that consumers of different names on one ledger
do not confuse their messages.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from zlib import crc32

import msgspec
from msgspec import Struct

from duly.core.finite import check_finite
from duly.core.lifecycle import State
from duly.core.messages import TIME_LIMIT, Answer, Message, Mode, Order, Verdict, VerdictKind
from duly.core.units import SECOND
from duly.errors import Malformed, ProgramError

PARTITIONS: Final = 16
"""The number of partitions of lanes among the consumers of one name. It is fixed, since the partition is part
of a message's fingerprint."""
UNORDERED: Final = "any"
"""The recipient of messages without a lane: every consumer serves it."""
RESULT_LIMIT: Final = 256 * 1024
_BEYOND: Final = TIME_LIMIT // SECOND


class QueueMessage(Struct, frozen=True):
    """A message as delivered by a queue.

    `id` is the sender's own id, the same at every delivery. Messages of one `lane` take effect in the order
    of `n`, the sender's counter in that lane, from 0 or 1 upwards; without a counter in the order of `time`.
    Without a lane they run in any order. `time` is when the sender created it (not when the queue took it)
    and `expires` when it must no longer take effect, as seconds since 1970 or a `datetime` with a zone.
    `attempt` is set for the handler: the number of this run.
    """

    id: str
    body: bytes | str = b""
    sender: str = ""
    lane: str | None = None
    n: int | None = None
    time: float | datetime = 0
    expires: float | datetime = 0
    attempt: int = 1

    def json(self) -> Any:
        """Return the body decoded from JSON. Raises `ValueError` if it is not JSON."""
        return msgspec.json.decode(self.body)


class Outcome(Struct, frozen=True):
    """The outcome of a queue message. Acknowledge the message to the queue in every case.

    `word` is `done`, `failed`, `superseded` (a later one of its lane went first), `expired`, `unknown` (a
    crash interrupted it, and it may have taken effect), `cancelled`; or why it was not accepted: `stale`,
    `conflict`, `future`, `too_large`, `malformed`, … `result` is what the handler returned, as JSON carries
    it; `error` is the value that it raised `duly.TaskFailed` with. `repeat`: the queue has delivered it
    before.
    """

    word: str
    result: Any = None
    error: Any = None
    reason: str = ""
    repeat: bool = False

    @property
    def done(self) -> bool:
        """Whether its handler has succeeded, at this delivery or an earlier one."""
        return self.word == State.DONE.word


def partition_of(name: str, lane: str | None) -> str:
    """Return the recipient that stands for a lane: one of a fixed number.

    >>> partition_of("lamps", "kitchen"), partition_of("lamps", None)
    ('lamps.4', 'lamps.any')
    """
    return f"{name}.{UNORDERED if lane is None else crc32(lane.encode(errors='replace')) % PARTITIONS}"


def to_message(name: str, message: QueueMessage, mode: Mode) -> Message:
    """Return the kernel's form of a message. Raises `SenderError` if the sender is at fault, `ProgramError`
    if the calling code is."""
    if not isinstance(message, QueueMessage):
        raise ProgramError(f"a consumer handles duly.QueueMessage, not {type(message).__name__}")
    body = message.body.encode() if isinstance(message.body, str) else message.body
    if not isinstance(body, bytes):
        raise ProgramError(f"the body of a message must be bytes or text, not {type(body).__name__}")
    for field in ("id", "sender", "lane"):
        value = getattr(message, field)
        if not isinstance(value, str) and not (field == "lane" and value is None):
            raise ProgramError(
                f"the {field} of a message must be text, not {type(value).__name__}; write str(…)"
            )
    n: object = message.n
    if not (n is None or type(n) is int):
        raise ProgramError(f"the counter n of a message must be an int, not {type(n).__name__}")
    if message.lane is None and message.n is not None:
        raise ProgramError(f"message {message.id!r} has a counter and no lane; give lane= as well")
    order = None
    if message.lane is not None:
        # It names its predecessor in the lane, so that the consumer of the lane need not see the others.
        order = Order(message.lane, mode, message.n, None if message.n is None else message.n - 1)
    return Message(
        f"{name}/{message.sender}",
        message.id,
        name,
        partition_of(name, message.lane),
        body,
        _micros("time", message.time),
        _micros("expires", message.expires),
        order,
    )


def from_message(name: str, message: Message, attempt: int) -> QueueMessage:
    """Return a message as its handler gets it."""
    order = message.order
    return QueueMessage(
        message.id,
        message.body,
        message.scope.removeprefix(f"{name}/"),
        None if order is None else order.key,
        None if order is None else order.n,
        message.time / SECOND,
        message.expires / SECOND,
        attempt,
    )


def answer_of(result: object) -> Answer:
    """Return the stored form of what a handler returned. A value that cannot be stored is not a failure: the
    handler has run."""
    try:
        data = msgspec.json.encode(result)
        check_finite(result, data)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        return Answer(0, b"", f"done, but its result cannot be stored: {problem}")
    if len(data) > RESULT_LIMIT:
        return Answer(0, b"", f"done, but its result has {len(data)} bytes; the limit is {RESULT_LIMIT}")
    return Answer(0, data)


def outcome_of(state: State, answer: Answer | None, *, repeat: bool = False) -> Outcome:
    """Return the outcome of a message for its caller."""
    answer = answer or Answer()
    value = msgspec.json.decode(answer.data) if answer.data else None
    if state is State.DONE:
        return Outcome(state.word, value, None, answer.reason, repeat)
    return Outcome(state.word, None, value, answer.reason, repeat)


def refused(verdict: Verdict) -> Outcome:
    """Return the outcome of a message that was not accepted."""
    return Outcome(verdict.named, reason=verdict.reason, repeat=verdict.kind is VerdictKind.CONFLICT)


def _micros(field: str, value: float | datetime) -> int:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ProgramError(f"{field}={value!r} has no zone; use datetime.now(UTC)")
        value = value.timestamp()
    if not isinstance(value, int | float):
        raise ProgramError(f"{field} must be seconds since 1970 or a datetime, not {type(value).__name__}")
    if not 0 <= value < _BEYOND:
        raise Malformed(f"{field}={value} is not a time in seconds since 1970; divide milliseconds by 1000")
    return round(value * SECOND)
