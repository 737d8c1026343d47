"""The operations of the ledger, as values: what a machine asks to have committed, and what comes back.

A group of operations is one transaction. An operation that did not take hold does not bring its consequences
along: `then` is carried out only if the operation succeeded, `otherwise` only if it did not. So "admit, and
if it is fresh queue a delivery" is one atomic step and never check-then-act.

Every operation class names the type of its result (`Admit` is an `Operation[Verdict]`), and `Results` are
asked by the operation itself: `results.of(admit)` is a `Verdict`. Races are ordinary here, so an operation
that came too late reports it in its result; it never raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, Generic, TypeAlias, TypeVar

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict
from duly.errors import ProgramError

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Operation(Struct, Generic[R_co], frozen=True, gc=False):
    """Base of all operations; the parameter is the type of the result."""


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


class DeliveryRef(Struct, frozen=True, gc=False, array_like=True):
    """Names one delivery: one attempt chain of one message to one (channel, recipient).

    A `round` tells the deliveries of a message to one recipient apart; `kind` says what one is for.
    """

    key: bytes
    channel: str
    recipient: str
    round: int = 0
    kind: DeliveryKind = DeliveryKind.STEP


DeliveryNames: TypeAlias = tuple[bytes, str, str, int]
"""What names a delivery: key, channel, recipient and round."""


class Delivery(Struct, frozen=True, gc=False, array_like=True):
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


class Advanced(Struct, frozen=True, gc=False):
    """What an `Advance` did. `state` and `answer` are what stands now; None: there is no such message."""

    moved: bool
    state: State | None
    answer: Answer | None = None


class Admit(Operation[Verdict], frozen=True, gc=False):
    """Insert a message if it is absent. Result: `Verdict` fresh, duplicate or conflict (or stale: below the
    floor)."""

    message: Message
    until: int
    at: int
    state: State = State.ACCEPTED
    then: tuple[Write, ...] = ()
    sliding: bool = False
    """`until` counts from now, so a repeat's says nothing about how long the first is remembered"""
    listed: bool = False
    """the message is found by its kind, in the order of acceptance"""
    otherwise: tuple[Write, ...] = ()


class Recall(Operation[Verdict], frozen=True, gc=False):
    """Ask what is known of a message, without admitting it. Result: `Verdict`, `otherwise` if unknown."""

    message: Message
    otherwise: Verdict
    at: int


class Withdraw(Operation[bool], frozen=True, gc=False):
    """Take an admission back, with its deliveries: it came to nothing and its id is free again.
    Result: bool. Only a message that has not ended can be withdrawn."""

    key: bytes


class Advance(Operation[Advanced], frozen=True, gc=False):
    """Move a message along the lifecycle, if it may move there. Result: `Advanced`."""

    key: bytes
    to: State
    at: int
    answer: Answer | None = None


class Deliver(Operation[bool], frozen=True, gc=False):
    """Create a delivery, once per `DeliveryRef`. Result: bool. With `attempt` 1 it is born claimed by
    `worker`."""

    ref: DeliveryRef
    due: int
    expires: int = 0
    attempt: int = 0
    worker: str = ""


class Take(Operation[bool], frozen=True, gc=False):
    """Start the next attempt of one delivery, fenced by the last attempt's number. Result: bool."""

    ref: DeliveryRef
    attempt: int
    worker: str
    due: int


class Claim(Operation[list[Delivery]], frozen=True, gc=False):
    """Start the next attempt of up to `limit` deliveries of a channel that are due.
    Result: list of `Delivery`, oldest due first, each with its new attempt number."""

    channel: str
    worker: str
    now: int
    due: int
    limit: int = 100


class Renew(Operation[bool], frozen=True, gc=False):
    """Extend the lease of an attempt under way. Result: bool; False means it was taken over."""

    ref: DeliveryRef
    attempt: int
    due: int


class Postpone(Operation[bool], frozen=True, gc=False):
    """Give an attempt up and try again at `due`. Fenced. Result: bool."""

    ref: DeliveryRef
    attempt: int
    due: int
    error: str = ""
    in_doubt: bool = False
    """this attempt, or one before it, may have arrived"""


class Finish(Operation[bool], frozen=True, gc=False):
    """End a delivery. Fenced by `attempt`; None accepts any attempt's end (an answer that came over the
    network is true whichever transmission it answers). Result: bool."""

    ref: DeliveryRef
    attempt: int | None
    state: State
    error: str = ""
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()
    kept: bool = True
    """with `kept` off a ledger may forget the delivery at once: its message says how it ended, and it is not
    delivered again"""


class AppendEntry(Operation[int], frozen=True, gc=False):
    """Add an entry to a numbered log. Result: its number; numbers have no gaps and start at 1."""

    stream: str
    body: bytes
    at: int
    key: bytes = b""
    ends: bool = False
    """the message `key`, which has just been admitted, is done with this, and its answer is the number: so a
    repeat is told the number of the first"""


class RewriteEntry(Operation[bool], frozen=True, gc=False):
    """Replace the body of an entry; its number, time and key stay. An empty body erases it for good: what was
    erased is never rewritten. Result: bool."""

    stream: str
    n: int
    body: bytes


class MoveCursor(Operation[int], frozen=True, gc=False):
    """Note that a reader has everything up to `n`. A cursor moves forward only, never past the end.
    Result: the cursor."""

    stream: str
    reader: str
    n: int


class RaiseMark(Operation[bool], frozen=True, gc=False):
    """Raise a durable high-water mark to `n`, if it is later: a higher number, or the same sender
    counting anew at a later time. Result: bool."""

    mark: str
    n: int
    ms: int
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


class LowerMark(Operation[bool], frozen=True, gc=False):
    """Take back a high-water mark that a wrong clock has set into the future: its time is at most `ms` from
    now on. Result: whether it was later."""

    mark: str
    ms: int


class RecordRefusal(Operation[None], frozen=True, gc=False):
    """Record a refusal, so that "why did nothing happen?" has an answer. Result: None."""

    scope: str
    id: str
    word: str
    reason: str
    at: int


class PutItem(Operation[bool], frozen=True, gc=False):
    """Put an item into a bucket, replacing the one of its name. Result: bool, True if it is new.

    Buckets hold what is configured rather than sent: principals, grants, profiles, groups.
    """

    bucket: str
    name: str
    body: bytes


class PutNewItem(Operation[bool], frozen=True, gc=False):
    """Put an item into a bucket if there is none of its name. Result: bool."""

    bucket: str
    name: str
    body: bytes
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


class DropItem(Operation[bool], frozen=True, gc=False):
    """Remove an item from its bucket; with `only`, if it still has this body. Result: bool."""

    bucket: str
    name: str
    only: bytes | None = None


class CheckItem(Operation[bool], frozen=True, gc=False):
    """Check that an item is in a bucket (with this body, if one is named). Result: bool. So a permission is
    judged in the same transaction that uses it."""

    bucket: str
    name: str
    body: bytes | None = None
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


Write: TypeAlias = (
    Admit | Recall | Withdraw | Advance | Deliver | Take | Claim | Renew | Postpone | Finish | AppendEntry
    | RewriteEntry | MoveCursor | RaiseMark | LowerMark | RecordRefusal | PutItem | PutNewItem | DropItem
    | CheckItem
)  # fmt: skip


Result: TypeAlias = Verdict | Advanced | bool | int | list[Delivery] | None

Group: TypeAlias = tuple[Write, ...]
"""Operations that are committed together or not at all."""


class Results(Struct, gc=False):
    """What the operations of one group did: those that were carried out, each with its result.

    Both lists are in the order of execution, consequences right behind their cause. An operation is found by
    identity: groups are small, and two equal operations in one group may have had different results.
    """

    operations: list[Write]
    values: list[Any]

    def of(self, operation: Operation[R]) -> R:
        """Return the result of an operation that was carried out; asking for another one is a bug."""
        result: R
        if self.operations[0] is operation:  # most often, and it is the hot path
            result = self.values[0]
            return result
        for at, each in enumerate(self.operations):
            if each is operation:
                result = self.values[at]
                return result
        raise ProgramError(f"{type(operation).__name__} was not carried out in this group; ask `find`")

    def of_each(self, operations: Sequence[Operation[R]]) -> list[R]:
        """Return the results of many operations that were carried out, in the order they are asked for."""
        found = {id(each): at for at, each in enumerate(self.operations)}
        return [self.values[found[id(each)]] for each in operations]

    def find(self, operation: Operation[R]) -> R | None:
        """Return the result of an operation, or None if its cause did not bring it along."""
        return self.of(operation) if any(each is operation for each in self.operations) else None

    def first(self, kind: type[Operation[R]]) -> R | None:
        """Return the result of the first operation of a kind, or None if none was carried out."""
        for at, each in enumerate(self.operations):
            if type(each) is kind:
                result: R = self.values[at]
                return result
        return None


BRANCHING: Final[frozenset[type[Write]]] = frozenset({Admit, Finish, RaiseMark, PutNewItem, CheckItem})
"""The operations with `then` and `otherwise`."""


def refusal_of(message: Message, verdict: Verdict, at: int) -> RecordRefusal:
    """Return the record of why a message was not admitted."""
    return RecordRefusal(message.scope, message.id, verdict.named, verdict.reason, at)


def numbered(n: int) -> Answer:
    """Return the answer of a message whose effect is an entry with this number."""
    return Answer(data=b"%d" % n)


_SAME_TIME: Final = 1_000
"""The number of a message that is sorted by its time is that time (ms), or one of so many after it."""


def is_timed(n: int, ms: int) -> bool:
    """Say whether a position was sorted by its time, which says nothing about numbers.

    >>> is_timed(1_700_000_000_001, 1_700_000_000_000), is_timed(7, 1_700_000_000_000)
    (True, False)
    """
    return 0 <= n - ms < _SAME_TIME


def lowered(n: int, ms: int, limit: int) -> tuple[int, int]:
    """Return a position without the time by which a clock was wrong: its time is at most `limit`.

    >>> lowered(7, 500_000, 400_000), lowered(500_001, 500_000, 400_000), lowered(7, 300_000, 400_000)
    ((7, 400000), (400000, 400000), (7, 300000))
    """
    if ms <= limit:
        return n, ms
    return (limit, limit) if is_timed(n, ms) else (n, limit)


def is_later(n: int, ms: int, mark: tuple[int, int] | None) -> bool:
    """Say whether a position comes after a high-water mark.

    The counter decides. A lower number with a *later* time is a sender that counts anew (reinstalled,
    restarted without its memory), not a late message: those are older on both counts.
    """
    return mark is None or n > mark[0] or ms > mark[1]
