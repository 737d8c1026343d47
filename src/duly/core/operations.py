"""The verbs of the ledger, as values: what a machine may ask to have committed, and what comes back.

The law: a group of writes is one transaction, and a write that did not take hold does not drag its
consequences along. `then` is applied only if its write succeeded, `otherwise` only if it did not; so
"admit, and if it is fresh queue a delivery" is one atomic step and never check-then-act.

Races are ordinary here, so a write that came too late reports it in its result; it never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict


class DeliveryKind(IntEnum):
    """What a delivery is for. Numbers are what the ledger stores: never reuse one."""

    STEP = 0
    """a step of its message's plan: the first one, or an escalation, numbered by its round"""
    FALLBACK = 1
    """to recipients who are told of something urgent because all others could not be"""
    RAISED = 2
    """its message has become urgent"""
    CORRECTION = 3
    """its message was taken back"""
    BY_HAND = 4
    """a person has asked for it"""

    @property
    def word(self) -> str:
        """Its name in JSON."""
        return self.name.lower()


class DeliveryRef(Struct, frozen=True, gc=False):
    """Names one delivery: one attempt chain of one message to one (channel, recipient).

    A `round` tells the deliveries of a message to one recipient apart; `kind` says what one is for.
    """

    key: bytes
    channel: str
    recipient: str
    round: int = 0
    kind: DeliveryKind = DeliveryKind.STEP


class Delivery(Struct, frozen=True, gc=False):
    """A delivery as the ledger holds it. `due` is when it may be claimed (again): for one that waits,
    its next attempt; for one under way, the end of its lease."""

    ref: DeliveryRef
    state: State
    attempt: int
    due: int
    expires: int = 0
    worker: str = ""
    error: str = ""
    in_doubt: bool = False
    """an attempt before the last one may have arrived"""


class OpenDelivery(Struct, frozen=True, gc=False):
    """A delivery that has not ended, with its message: what a restart goes on with."""

    message: Message
    state: State
    delivery: Delivery


class Admit(Struct, frozen=True, gc=False):
    """Insert if absent. Result: `Verdict` fresh, duplicate or conflict (or stale: below the floor)."""

    message: Message
    until: int
    at: int
    state: State = State.ACCEPTED
    then: tuple[Write, ...] = ()
    sliding: bool = False
    """`until` counts from now, so a repeat's says nothing about how long the first is remembered"""


class Recall(Struct, frozen=True, gc=False):
    """What is known of this message, without admitting it. Result: `Verdict`, `otherwise` if unknown."""

    message: Message
    otherwise: Verdict
    at: int


class Withdraw(Struct, frozen=True, gc=False):
    """Take an admission back, with its deliveries: it came to nothing and its id is free again.
    Result: bool. Only a message that has not ended can be withdrawn."""

    key: bytes


class Advance(Struct, frozen=True, gc=False):
    """Compare-and-set along the lifecycle. Result: `Advanced`."""

    key: bytes
    to: State
    at: int
    answer: Answer | None = None


class Deliver(Struct, frozen=True, gc=False):
    """Create a delivery, once per `DeliveryRef`. Result: bool. With `attempt` 1 it is born claimed by
    `worker`."""

    ref: DeliveryRef
    due: int
    expires: int = 0
    attempt: int = 0
    worker: str = ""


class Take(Struct, frozen=True, gc=False):
    """Start the next attempt of one delivery, fenced by the last attempt's number. Result: bool."""

    ref: DeliveryRef
    attempt: int
    worker: str
    due: int


class Claim(Struct, frozen=True, gc=False):
    """Start the next attempt of up to `limit` deliveries of a channel that are due.
    Result: list of `Delivery`, oldest due first, each with its new attempt number."""

    channel: str
    worker: str
    now: int
    due: int
    limit: int = 100


class Renew(Struct, frozen=True, gc=False):
    """Extend the lease of an attempt under way. Result: bool; False means it was taken over."""

    ref: DeliveryRef
    attempt: int
    due: int


class Postpone(Struct, frozen=True, gc=False):
    """Give an attempt up and try again at `due`. Fenced. Result: bool."""

    ref: DeliveryRef
    attempt: int
    due: int
    error: str = ""
    in_doubt: bool = False
    """this attempt, or one before it, may have arrived"""


class Finish(Struct, frozen=True, gc=False):
    """End a delivery. Fenced by `attempt`; None accepts any attempt's end (an answer that came over the
    network is true whichever transmission it answers). Result: bool."""

    ref: DeliveryRef
    attempt: int | None
    state: State
    error: str = ""
    then: tuple[Write, ...] = ()


class AppendEntry(Struct, frozen=True, gc=False):
    """Add an entry to a numbered log. Result: its number; numbers have no gaps and start at 1."""

    stream: str
    body: bytes
    at: int
    key: bytes = b""
    ends: bool = False
    """the message `key`, which has just been admitted, is done with this, and its answer is the number: so a
    repeat is told the number of the first"""


class RewriteEntry(Struct, frozen=True, gc=False):
    """Replace the body of an entry; its number, time and key stay. An empty body erases it for good: what was
    erased is never rewritten. Result: bool."""

    stream: str
    n: int
    body: bytes


class MoveCursor(Struct, frozen=True, gc=False):
    """A reader has everything up to `n`. Moves forward only, never past the end. Result: the cursor."""

    stream: str
    reader: str
    n: int


class RaiseMark(Struct, frozen=True, gc=False):
    """Raise a durable high-water mark to `n`, if it is later: a higher number, or the same sender
    counting anew at a later time. Result: bool."""

    mark: str
    n: int
    ms: int
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


class RecordRefusal(Struct, frozen=True, gc=False):
    """Record a refusal, so that "why did nothing happen?" has an answer. Result: None."""

    scope: str
    id: str
    word: str
    reason: str
    at: int


class PutItem(Struct, frozen=True, gc=False):
    """Lay an item on a bucket, replacing what lies there under its name. Result: bool, True if it is new.

    Buckets hold what is configured rather than sent: principals, grants, profiles, groups.
    """

    bucket: str
    name: str
    body: bytes


class PutNewItem(Struct, frozen=True, gc=False):
    """Lay an item on a bucket if there is none of its name. Result: bool."""

    bucket: str
    name: str
    body: bytes
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


class DropItem(Struct, frozen=True, gc=False):
    """Take an item off its bucket; with `only`, if it still is this one. Result: bool."""

    bucket: str
    name: str
    only: bytes | None = None


class CheckItem(Struct, frozen=True, gc=False):
    """Whether an item lies on a bucket (with this body, if one is named). Result: bool. So that what somebody
    may do is decided in the same transaction that does it."""

    bucket: str
    name: str
    body: bytes | None = None
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


Write: TypeAlias = (
    Admit | Recall | Withdraw | Advance | Deliver | Take | Claim | Renew | Postpone | Finish | AppendEntry
    | RewriteEntry | MoveCursor | RaiseMark | RecordRefusal | PutItem | PutNewItem | DropItem | CheckItem
)  # fmt: skip


class Advanced(Struct, frozen=True, gc=False):
    """What an `Advance` did. `state` and `answer` are what stands now; None: there is no such message."""

    moved: bool
    state: State | None
    answer: Answer | None = None


Result: TypeAlias = Verdict | Advanced | bool | int | list[Delivery] | None

Group: TypeAlias = tuple[Write, ...]
"""Writes that are committed together or not at all."""

Results: TypeAlias = list[Result]
"""What a group's writes did, in the order they were applied, consequences right behind their cause."""


def consequences(write: Write, result: Result) -> Group:
    """What a write brings with it, given how it went: the one place that knows `then` and `otherwise`."""
    match write:
        case Admit(then=then):
            return then if isinstance(result, Verdict) and result.fresh else ()
        case Finish(then=then):
            return then if result else ()
        case (
            RaiseMark(then=then, otherwise=otherwise)
            | PutNewItem(then=then, otherwise=otherwise)
            | CheckItem(then=then, otherwise=otherwise)
        ):
            return then if result else otherwise
        case _:
            return ()


def execute(
    group: Group, apply: Callable[[Write], Result], applied: list[tuple[Write, Result]] | None = None
) -> Results:
    """Apply a group, write by write; `applied` is told each write with its result."""
    results: Results = []
    for write in group:
        result = apply(write)
        results.append(result)
        if applied is not None:
            applied.append((write, result))
        if more := consequences(write, result):
            results += execute(more, apply, applied)
    return results


def numbered(n: int) -> Answer:
    """The answer of a message whose effect is an entry with this number."""
    return Answer(data=b"%d" % n)


def is_later(n: int, ms: int, mark: tuple[int, int] | None) -> bool:
    """Whether a position comes after a high-water mark.

    The counter decides. A lower number with a *later* time is a sender that counts anew (reinstalled,
    restarted without its memory), not a late message: those are older on both counts.
    """
    return mark is None or n > mark[0] or ms > mark[1]
