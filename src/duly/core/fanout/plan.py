"""The values of a fanout: its policy, plans, attempts, and how they ended."""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec import Struct

from duly.core.horizon import Horizon
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Deliver, DeliveryKind, DeliveryRef, Group, OpenDelivery
from duly.core.retry import DELIVERY, RetryPolicy
from duly.core.steps import Origin
from duly.core.units import DAY, MINUTE
from duly.errors import Malformed

FIRST_ROUND: Final = {
    DeliveryKind.STEP: 0,
    DeliveryKind.FALLBACK: 49,
    DeliveryKind.RAISED: 50,
    DeliveryKind.CORRECTION: 100,
    DeliveryKind.BY_HAND: 200,
}
"""The round of the first delivery of each kind. Rounds keep deliveries apart and are part of the ids that
receivers know; what a delivery is for is its kind, never its round."""
PLANNED: Final = frozenset({DeliveryKind.STEP, DeliveryKind.FALLBACK})
"""Deliveries that tell a recipient of a message for the first time."""
TELLING: Final = PLANNED | {DeliveryKind.RAISED}
"""Deliveries that tell of a message as it stands, so that a correction has to follow if it is taken back."""

NOT_WANTED: Final = "no recipient needs to be told any more"
CUT_OFF: Final = "we stopped before we knew whether it had arrived"

DOUBT: Final = "in doubt: "
"""How the error of an attempt that may have arrived begins, for people to read."""


class DoubtPolicy(Enum):
    """What a channel declares about an attempt that may have arrived."""

    RESEND = "resend"
    """the same key again: the receiver can tell"""
    REPEAT = "repeat"
    """once more, marked; then stop"""
    STOP = "stop"
    """end it as unknown, and show it"""


class AttemptResult(Enum):
    """How an attempt ended, as its channel reports it."""

    ARRIVED = "arrived"
    NOT_SENT = "not sent"
    """it had no effect and may be tried again"""
    REFUSED = "refused"
    """it had no effect and never will"""
    IN_DOUBT = "in doubt"
    """it may have had one"""
    CALLED_OFF = "called off"
    """it was not sent: it is not wanted any more"""


class FanoutPolicy(Struct, frozen=True):
    """The limits of a fanout."""

    channel: str = "alert"
    """the name of its deliveries in the ledger"""
    retry: RetryPolicy = DELIVERY
    lease: int = MINUTE
    """how long a claimed delivery belongs to its worker; longer than any attempt can last"""
    horizon: Horizon = Horizon(keep=30 * DAY)
    """a message may be so old, by its own time"""
    keep: int = 90 * DAY
    """how long a message stays after it was accepted, with its deliveries"""

    def __post_init__(self) -> None:
        if self.lease <= 0 or self.keep <= 0:
            raise Malformed("a fanout's lease and keep are lengths of time, more than 0")


class PlannedDelivery(Struct, frozen=True, gc=False):
    """A delivery that a plan asks for."""

    recipient: str
    due: int
    expires: int
    round: int = 0


class GroupingTraits(Struct, frozen=True, gc=False):
    """What decides which messages go out together; an urgent message goes out alone."""

    episode: str = ""
    urgent: bool = False


class DeliveryPlan(Struct, frozen=True):
    """The recipients of a message, and what it goes out with; without recipients, how it ends at once."""

    deliveries: tuple[PlannedDelivery, ...] = ()
    end: tuple[State, Answer] = (State.DONE, Answer())
    traits: GroupingTraits = GroupingTraits()


class BatchItem(Struct, frozen=True, gc=False):
    """One delivery of an attempt."""

    ref: DeliveryRef
    attempt: int
    message: Message
    repeat: bool = False
    """an earlier attempt may have arrived"""


class StartAttempt(Struct, frozen=True):
    """Effect: send these deliveries to their recipient together, and report the result as `AttemptEnded`."""

    recipient: str
    items: tuple[BatchItem, ...]
    urgent: bool = False


class AttemptEnded(Struct, frozen=True):
    """Event: how an attempt ended. `rest` is how long the recipient asked to be left alone, if it did."""

    batch: StartAttempt
    result: AttemptResult
    reason: str = ""
    rest: int = 0


class ItemSeen(Struct, frozen=True):
    """An item of the ledger as it was read; `body` is None if there was none."""

    bucket: str
    name: str
    body: bytes | None


class Amendment(Struct, frozen=True):
    """Event: a message about another one. Its `writes` are committed with it, once, if the item from which
    they were derived (`seen`) has not changed since; otherwise its sender has to try again."""

    message: Message
    origin: Origin
    writes: Group
    seen: ItemSeen | None = None


class DeliveriesChanged(Struct, frozen=True):
    """Event: a message's deliveries were changed in the ledger; `open` are the open ones."""

    key: bytes
    open: tuple[OpenDelivery, ...]


class MessageUnsettled(Struct, frozen=True):
    """Effect: this worker has no open delivery of a message, and another one may have, or may have ended the
    last one: the ledger says whether the message is over."""

    key: bytes


class FanoutCounts(Struct):
    """Counts of what has happened since the start."""

    accepted: int = 0
    duplicates: int = 0
    attempts: int = 0
    retries: int = 0
    retried_well: int = 0
    """deliveries that arrived after a retry"""
    retries_well: int = 0
    """how many retries those took, together"""
    arrived: int = 0
    failed: int = 0
    in_doubt: int = 0
    batches: int = 0


def correction(ref: DeliveryRef, now: int, expires: int) -> Deliver:
    """Return the delivery that follows one whose message has been taken back."""
    kind = DeliveryKind.CORRECTION
    return Deliver(DeliveryRef(ref.key, ref.channel, ref.recipient, FIRST_ROUND[kind], kind), now, expires)
