"""The events that go into a machine, and the steps and effects that come out of it.

The law: a machine gets events and the time, and returns steps to commit and effects to perform. A `Step` is
committed first; then its `done` gets the results of the commit and returns what follows. So no reply is sent
and no message started that a crash could undo. An effect outside a step needs no commit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias, final

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict
from duly.core.operations import CheckItem, Group, OpenDelivery, Results

Origin: TypeAlias = Hashable
"""Where an answer goes: a connection, or a peer's name. The core only passes it on."""


def once_each(origins: list[Origin]) -> list[Origin]:
    """Return the origins without those that are there more than once."""
    return [*dict.fromkeys(origins)] if len(origins) > 1 else origins


# ── events ───────────────────────────────────────────────────────────────────────────────────────


class Arrived(Struct, frozen=True, gc=False):
    """A message has arrived. `patient`: it may wait for a recipient that is away. `given`: conditions that
    must hold when the message is admitted; if one does not, its sender may not send it, or no longer may."""

    message: Message
    origin: Origin = None
    patient: bool = False
    given: tuple[CheckItem, ...] = ()


class Received(Struct, frozen=True, gc=False):
    """The recipient has stored the message."""

    key: bytes


class Answered(Struct, frozen=True, gc=False):
    """The outcome of a message, as its recipient reports it. `attempt` fences the end of a local run; it is
    None for an answer from the network, which is true whichever transmission it answers. `effects` are a
    handler's own writes, which commit together with the end. `by` is the account that answers; an answer
    from any account but the recipient is ignored. With `keep` off the answer's data is passed on but not
    stored; with `burn` off the recipient never took the message, and its id is free again."""

    key: bytes
    state: State
    answer: Answer
    attempt: int | None = None
    effects: Group = ()
    by: str = ""
    keep: bool = True
    burn: bool = True


class AttemptFailed(Struct, frozen=True, gc=False):
    """An attempt failed without effect; the message may be tried again."""

    key: bytes
    attempt: int
    reason: str


class Reachable(Struct, frozen=True, gc=False):
    """A recipient can be reached: it has connected."""

    recipient: str


class Unreachable(Struct, frozen=True, gc=False):
    """A recipient can no longer be reached."""

    recipient: str


class NumberRefused(Struct, frozen=True, gc=False):
    """A sender's message was refused before it reached the machine: its number counts as arrived, and leaves
    no gap."""

    scope: str
    n: int
    made: int


class MachineEvent(Struct, frozen=True, gc=False):
    """An event that only this machine understands."""

    what: object


class DeliveriesFound(Struct, frozen=True, gc=False):
    """Deliveries in the ledger that this worker takes over: stored by another hub for a recipient that is
    connected here, or begun by a hub that is gone. `marks` is how far their lanes have come."""

    open_: tuple[OpenDelivery, ...]
    marks: Mapping[str, tuple[int, int]] = {}


class TimesLowered(Struct, frozen=True, gc=False):
    """The ledger's high-water marks were lowered to at most this time (ms), because a wrong clock had set
    some later."""

    limit: int


class CancelMessages(Struct, frozen=True, gc=False):
    """These messages must not be handed over any more. Those that have started go on; with `started` they end
    as well, as `unknown`, since they may have taken effect."""

    messages: tuple[Message, ...]
    reason: str
    started: bool = False


Event: TypeAlias = (
    Arrived | Received | Answered | AttemptFailed | Reachable | Unreachable | DeliveriesFound | CancelMessages
    | NumberRefused | TimesLowered | MachineEvent
)  # fmt: skip

# ── effects ──────────────────────────────────────────────────────────────────────────────────────


class Transmit(Struct, frozen=True, gc=False):
    """Hand the message to its recipient: a connection, a broker, a handler."""

    message: Message
    attempt: int
    after: int = -1
    again: bool = False
    """the recipient has received the message before, or may have"""


class Reply(Struct, frozen=True, gc=False):
    """Tell one origin the verdict on its message."""

    origin: Origin
    message: Message
    verdict: Verdict


class ReportOutcome(Struct, frozen=True, gc=False):
    """Report the end of a message to every origin that asked. If `origins` is empty, they are found by the
    message's scope."""

    key: bytes
    state: State
    answer: Answer
    origins: tuple[Origin, ...] = ()
    recipient: str = ""


class Ended(Struct, frozen=True, gc=False):
    """A message that was under way here and has ended, according to the ledger."""

    key: bytes
    state: State
    answer: Answer


class MachineEffect(Struct, frozen=True, gc=False):
    """An effect that only this machine's application understands."""

    what: object


Effect: TypeAlias = Transmit | Reply | ReportOutcome | MachineEffect


@final
class Step(Struct, frozen=True, gc=False):
    """Commit `writes`; then `done(results, now)` returns what follows. If they cannot be committed, the
    effects in `failed` are performed instead."""

    writes: Group
    done: Callable[[Results, int], list[Todo]]
    failed: tuple[Effect, ...] = ()


Todo: TypeAlias = Step | Effect
