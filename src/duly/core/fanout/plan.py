"""The values of a fanout: policy, plans, attempts and their results."""

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
"""The round of the first delivery of each kind. Rounds distinguish deliveries and are part of the ids that
receivers see. The purpose of a delivery is its kind, never its round."""
PLANNED: Final = frozenset({DeliveryKind.STEP, DeliveryKind.FALLBACK})
"""Kinds of deliveries that notify a recipient of a message for the first time."""
TELLING: Final = PLANNED | {DeliveryKind.RAISED}
"""Kinds of deliveries that present a message as valid; if it is withdrawn, a correction must follow."""

NOT_WANTED: Final = "no recipient needs to be told any more"
CUT_OFF: Final = "we stopped before we knew whether it had arrived"

DOUBT: Final = "in doubt: "
"""Begins the error text of an attempt that may have arrived."""


class DoubtPolicy(Enum):
    """What a channel does after an attempt that may have arrived."""

    RESEND = "resend"
    """send again under the same key: the receiver recognises a repeat"""
    REPEAT = "repeat"
    """send once more, marked as a repeat, then stop"""
    STOP = "stop"
    """end it as unknown, and show that"""


class AttemptResult(Enum):
    """How an attempt ended, as its channel reports it."""

    ARRIVED = "arrived"
    NOT_SENT = "not sent"
    """no effect; may be tried again"""
    REFUSED = "refused"
    """no effect, and a further attempt would have none either"""
    IN_DOUBT = "in doubt"
    """it may have had an effect"""
    CALLED_OFF = "called off"
    """not sent, because it is no longer wanted"""


class FanoutPolicy(Struct, frozen=True):
    """The limits of a fanout."""

    channel: str = "alert"
    """the name of its deliveries in the ledger"""
    retry: RetryPolicy = DELIVERY
    lease: int = MINUTE
    """how long a claimed delivery belongs to its worker; longer than the longest attempt"""
    horizon: Horizon = Horizon(keep=30 * DAY)
    """the greatest age of a message, by its own time"""
    keep: int = 90 * DAY
    """how long a message and its deliveries are kept after acceptance"""

    def __post_init__(self) -> None:
        if self.lease <= 0 or self.keep <= 0:
            raise Malformed("the lease and keep of a fanout must be lengths of time greater than 0")


class PlannedDelivery(Struct, frozen=True, gc=False):
    """A delivery that a plan asks for."""

    recipient: str
    due: int
    expires: int
    round: int = 0
    opens: int = 0
    """the time of day that it waits for (the end of quiet hours); 0: it is due, and expires, after lengths
    of time, which stay the same when the wall clock is set"""


class GroupingTraits(Struct, frozen=True, gc=False):
    """Decides which messages go out together; an urgent message goes out alone."""

    episode: str = ""
    urgent: bool = False


class DeliveryPlan(Struct, frozen=True):
    """The recipients of a message and how it is grouped; without recipients, the outcome it has at once."""

    deliveries: tuple[PlannedDelivery, ...] = ()
    end: tuple[State, Answer] = (State.DONE, Answer())
    traits: GroupingTraits = GroupingTraits()


class BatchItem(Struct, frozen=True, gc=False):
    """One delivery of an attempt."""

    ref: DeliveryRef
    attempt: int
    message: Message
    repeat: bool = False
    """whether an earlier attempt may have arrived"""


class StartAttempt(Struct, frozen=True):
    """Effect: send these deliveries to their recipient together, and report the result as `AttemptEnded`."""

    recipient: str
    items: tuple[BatchItem, ...]
    urgent: bool = False


class AttemptEnded(Struct, frozen=True):
    """Event: the result of an attempt. `rest` is how long the recipient asked not to be contacted, if it
    did."""

    batch: StartAttempt
    result: AttemptResult
    reason: str = ""
    rest: int = 0


class ItemSeen(Struct, frozen=True):
    """An item of the ledger as it was read; `body` is None if it did not exist."""

    bucket: str
    name: str
    body: bytes | None


class Amendment(Struct, frozen=True):
    """Event: a message about another message. Its `writes` are committed with it, once, if the item they were
    derived from (`seen`) has not changed; otherwise its sender must try again."""

    message: Message
    origin: Origin
    writes: Group
    seen: ItemSeen | None = None


class DeliveriesChanged(Struct, frozen=True):
    """Event: a message's deliveries were changed in the ledger; `open` are the open ones."""

    key: bytes
    open: tuple[OpenDelivery, ...]


class MessageUnsettled(Struct, frozen=True):
    """Effect: this worker has no open delivery of a message left, but another worker may have one or may have
    ended the last one. The ledger is asked whether the message is over."""

    key: bytes


class FanoutCounts(Struct):
    """Counts of events since the start."""

    accepted: int = 0
    duplicates: int = 0
    attempts: int = 0
    retries: int = 0
    retried_well: int = 0
    """deliveries that succeeded after a retry"""
    retries_well: int = 0
    """the retries of those deliveries, summed"""
    arrived: int = 0
    failed: int = 0
    in_doubt: int = 0
    batches: int = 0


def correction(ref: DeliveryRef, now: int, expires: int) -> Deliver:
    """Return the delivery that corrects an earlier one whose message was withdrawn."""
    kind = DeliveryKind.CORRECTION
    return Deliver(DeliveryRef(ref.key, ref.channel, ref.recipient, FIRST_ROUND[kind], kind), now, expires)
