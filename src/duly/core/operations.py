"""The operations of the ledger, as values that a machine asks to commit, and their results.

A group of operations is one transaction. An operation may have consequences: `then` is carried out only if
the operation succeeded, `otherwise` only if it did not. So "admit, and if it is fresh queue a delivery" is
one atomic step and never check-then-act.

Every operation class names the type of its result (`Admit` is an `Operation[Verdict]`), and `Results` are
looked up by the operation itself: `results.of(admit)` is a `Verdict`. Races are normal, so an operation that
came too late reports it in its result; it never raises.
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
    """to recipients that get an urgent message because it could not be delivered to any other"""
    RAISED = 2
    """sent because its message has become urgent"""
    CORRECTION = 3
    """sent because its message was retracted"""
    BY_HAND = 4
    """requested by a person"""

    @property
    def word(self) -> str:
        """The name of the kind in JSON."""
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
"""The key, channel, recipient and round, which identify a delivery."""


class Delivery(Struct, frozen=True, gc=False, array_like=True):
    """A delivery as the ledger holds it. `due` is when it may be claimed: for a waiting delivery, the time of
    its next attempt; for one under way, the end of its lease."""

    ref: DeliveryRef
    state: State
    attempt: int
    due: int
    expires: int = 0
    worker: str = ""
    error: str = ""
    in_doubt: bool = False
    """an attempt before the last may have reached the recipient"""


class OpenDelivery(Struct, frozen=True, gc=False):
    """A delivery that has not ended, with its message; a restart continues it."""

    message: Message
    state: State
    delivery: Delivery
    accepted_at: int = 0
    """when its message was accepted (µs)"""


class Advanced(Struct, frozen=True, gc=False):
    """The result of an `Advance`. `state` and `answer` are the current ones; `state` is None if there is no
    such message."""

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
    """`until` is counted from now: the `until` of a repeat does not say how long the first message is kept"""
    listed: bool = False
    """the message can be found by its kind, in the order of acceptance"""
    otherwise: tuple[Write, ...] = ()
    repeatable: bool = False
    """better stored twice than lost: a ledger restored from a backup accepts it though it may have had it"""


class Recall(Operation[Verdict], frozen=True, gc=False):
    """Look up a message without admitting it. Result: the `Verdict` on a known message, else `otherwise`."""

    message: Message
    otherwise: Verdict
    at: int


class Withdraw(Operation[bool], frozen=True, gc=False):
    """Undo an admission and its deliveries: the message had no effect, and its id is free again. Result:
    bool. Only a message that has not ended can be withdrawn."""

    key: bytes


class Advance(Operation[Advanced], frozen=True, gc=False):
    """Move a message along the lifecycle, if it may move there. Result: `Advanced`."""

    key: bytes
    to: State
    at: int
    answer: Answer | None = None


class Deliver(Operation[bool], frozen=True, gc=False):
    """Create a delivery, once per `DeliveryRef`. Result: bool. With `attempt` 1 the delivery is created as
    claimed by `worker`."""

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
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


class Claim(Operation[list[Delivery]], frozen=True, gc=False):
    """Start the next attempt of up to `limit` deliveries of a channel that are due.
    Result: list of `Delivery`, oldest due first, each with its new attempt number."""

    channel: str
    worker: str
    now: int
    due: int
    limit: int = 100


class Renew(Operation[bool], frozen=True, gc=False):
    """Extend the lease of an attempt under way. Result: bool; False means that another worker took it
    over."""

    ref: DeliveryRef
    attempt: int
    due: int


class Postpone(Operation[bool], frozen=True, gc=False):
    """Give up an attempt and make the next one due at `due`. Fenced by `attempt`. Result: bool."""

    ref: DeliveryRef
    attempt: int
    due: int
    error: str = ""
    in_doubt: bool = False
    """this attempt, or an earlier one, may have reached the recipient"""


class Finish(Operation[bool], frozen=True, gc=False):
    """End a delivery. Fenced by `attempt`; None means any attempt, since an answer from the network is true
    whichever transmission it answers. Result: bool."""

    ref: DeliveryRef
    attempt: int | None
    state: State
    error: str = ""
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()
    kept: bool = True
    """with `kept` off a ledger may forget the delivery at once: its message records how it ended"""


class AppendEntry(Operation[int], frozen=True, gc=False):
    """Add an entry to a numbered log. Result: its number; numbers have no gaps and start at 1."""

    stream: str
    body: bytes
    at: int
    key: bytes = b""
    ends: bool = False
    """the entry ends the message `key`, which has just been admitted, as done; its answer is the number of
    the entry, which a repeat gets as well"""


class RewriteEntry(Operation[bool], frozen=True, gc=False):
    """Replace the body of an entry; its number, time and key stay. An empty body erases the entry for good:
    an erased entry is never rewritten. Result: bool."""

    stream: str
    n: int
    body: bytes


class MoveCursor(Operation[int], frozen=True, gc=False):
    """Record that a reader has all entries up to `n`. A cursor only moves forward, and never past the end.
    Result: the cursor."""

    stream: str
    reader: str
    n: int


class RaiseMark(Operation[bool], frozen=True, gc=False):
    """Raise a durable high-water mark to `n` if that is later: a higher number, or a sender that counts from
    the start again at a later time. Result: bool."""

    mark: str
    n: int
    ms: int
    then: tuple[Write, ...] = ()
    otherwise: tuple[Write, ...] = ()


class LowerMark(Operation[bool], frozen=True, gc=False):
    """Lower the time of a high-water mark that a wrong clock has set into the future to at most `ms`. Result:
    whether it was later."""

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
    """Put an item into a bucket, replacing an item of the same name. Result: bool, True if the item is new.

    Buckets hold configuration rather than messages: principals, grants, profiles, groups.
    """

    bucket: str
    name: str
    body: bytes


class PutNewItem(Operation[bool], frozen=True, gc=False):
    """Put an item into a bucket if the bucket has none of this name. Result: bool."""

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
    """Check that an item is in a bucket (with this body, if one is given). Result: bool. It lets a permission
    be checked in the same transaction that uses it."""

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
    """The operations of one group that were carried out, and the result of each.

    Both lists are in the order of execution; consequences follow their operation. An operation is found by
    identity: groups are small, and two equal operations in one group may have different results.
    """

    operations: list[Write]
    values: list[Any]

    def of(self, operation: Operation[R]) -> R:
        """Return the result of an operation that was carried out; the caller must know that it was."""
        result: R
        if self.operations[0] is operation:  # the most frequent case, on the hot path
            result = self.values[0]
            return result
        for at, each in enumerate(self.operations):
            if each is operation:
                result = self.values[at]
                return result
        raise ProgramError(f"{type(operation).__name__} was not carried out in this group; ask `find`")

    def of_each(self, operations: Sequence[Operation[R]]) -> list[R]:
        """Return the results of many operations that were carried out, in the given order."""
        found = {id(each): at for at, each in enumerate(self.operations)}
        return [self.values[found[id(each)]] for each in operations]

    def find(self, operation: Operation[R]) -> R | None:
        """Return the result of an operation, or None if it was not carried out."""
        return self.of(operation) if any(each is operation for each in self.operations) else None

    def first(self, kind: type[Operation[R]]) -> R | None:
        """Return the result of the first operation of a kind, or None if none was carried out."""
        for at, each in enumerate(self.operations):
            if type(each) is kind:
                result: R = self.values[at]
                return result
        return None


BRANCHING: Final[frozenset[type[Write]]] = frozenset({Admit, Take, Finish, RaiseMark, PutNewItem, CheckItem})
"""The operations that have consequences (`then`, `otherwise`)."""


def refusal_of(message: Message, verdict: Verdict, at: int) -> RecordRefusal:
    """Return the record of why a message was not admitted."""
    return RecordRefusal(message.scope, message.id, verdict.named, verdict.reason, at)


def numbered(n: int) -> Answer:
    """Return the answer of a message whose effect is an entry with this number."""
    return Answer(data=b"%d" % n)


_SAME_TIME: Final = 1_000
"""The number of a message that is sorted by time is that time (ms), or less than this much above it."""


def is_timed(n: int, ms: int) -> bool:
    """Return whether a position was sorted by time, so that its number is not a counter.

    >>> is_timed(1_700_000_000_001, 1_700_000_000_000), is_timed(7, 1_700_000_000_000)
    (True, False)
    """
    return 0 <= n - ms < _SAME_TIME


def lowered(n: int, ms: int, limit: int) -> tuple[int, int]:
    """Return a position with its time lowered to at most `limit`, because a clock was ahead.

    >>> lowered(7, 500_000, 400_000), lowered(500_001, 500_000, 400_000), lowered(7, 300_000, 400_000)
    ((7, 400000), (400000, 400000), (7, 300000))
    """
    if ms <= limit:
        return n, ms
    return (limit, limit) if is_timed(n, ms) else (n, limit)


def is_later(n: int, ms: int, mark: tuple[int, int] | None) -> bool:
    """Return whether a position comes after a high-water mark.

    The counter decides. A lower number with a *later* time means that the sender counts from the start again
    (it was reinstalled, or lost its memory); a late message has both a lower number and an earlier time.
    """
    return mark is None or n > mark[0] or ms > mark[1]
