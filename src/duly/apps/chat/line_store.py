"""The line store: the state machine that stores chat lines, each with its number.

The law: a request is one step that also ends it: the message is admitted, its line gets a number, and the
further writes are made, or none of it happens. So nothing is ever under way, a crash leaves nothing half
done, and there is nothing to restore. A repeat gets the number of the first line.

The engine's timer also drives the subscriptions, which send unacknowledged lines again. How far readers have
come is stored in the flush of the lines that are stored at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from msgspec import Struct

from duly.apps.chat.conversations import HORIZON, Request
from duly.apps.chat.reader_cursors import ReaderCursors
from duly.core import horizon as horizons
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, VerdictKind
from duly.core.operations import Admit, AppendEntry, Group, OpenDelivery, Recall, Results, numbered
from duly.core.outbox import UNABLE
from duly.core.steps import Arrived, Effect, Ended, Event, Origin, Reply, Step, Todo
from duly.errors import ProgramError
from duly.wire.session import Session

CHANNEL: Final = "chat"
_DONE: Final = State.DONE  # reading a member from its class takes nine times as long
_FRESH: Final = VerdictKind.FRESH


class RequestOrigin(Struct, eq=False):
    """The origin of a request: who asked for what."""

    session: Session
    request: Request
    at: int = 0
    """when the line is stored"""


class ChatTimers(Protocol):
    """The timed work of the subscriptions."""

    def wake(self, now: int) -> None:
        """Do what is due."""
        ...

    def next_wake(self) -> int | None:
        """Return when something is due next, or None."""
        ...

    def shift(self, by: int) -> None:
        """Move all timers because the wall clock was set."""
        ...

    def restored(self) -> None:
        """Catch up after a failure of the ledger: lines may have been stored that were not sent to
        subscribers."""
        ...


class LineStore:
    """Stores each request in one step, and what `cursors` has gathered in another; it has nothing under
    way."""

    channel = CHANNEL

    def __init__(self, timers: ChatTimers, cursors: ReaderCursors) -> None:
        self._timers = timers
        self._cursors = cursors

    def handle(self, event: Event, now: int) -> list[Todo]:
        """Return the one step that stores a request, or refuses it if its id is too old."""
        if not isinstance(event, Arrived):
            return []  # a session came or went: only the timers are checked
        message, origin = event.message, cast("RequestOrigin", event.origin)
        refusal = horizons.judge(message, HORIZON, now)
        if refusal is not None:
            writes: Group = (Recall(message, refusal, now),)
        else:
            origin.at = now
            writes = origin.request.writes(horizons.remember_until(message, HORIZON), now)

        def done(results: Results, now: int) -> list[Todo]:
            return [Reply(origin, message, _verdict(results))]

        return [Step(writes, done, (Reply(origin, message, UNABLE),))]

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        """Return the reply to a repeat of a stored request: the verdict on the first one."""
        return [Reply(origin, message, verdict)]

    def unable(self, event: Event) -> list[Effect]:
        """Return the refusal of a request that could not be stored; its sender may repeat it."""
        return [Reply(event.origin, event.message, UNABLE)] if isinstance(event, Arrived) else []

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages under way, of which there are none."""
        return []

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        """Report the restart to the timers; there is nothing else to restore."""
        self._timers.restored()
        return []

    def wake(self, now: int) -> list[Todo]:
        """Run the timers that are due; return the step that stores how far readers have come."""
        self._timers.wake(now)
        return self._cursors.take()

    def next_wake(self) -> int | None:
        """Return when the next timer is due, or readers' positions are to be stored; or None."""
        due = self._cursors.next_wake()
        return self._timers.next_wake() if due is None else due

    def shift(self, by: int) -> None:
        """Move all timers because the wall clock was set."""
        self._timers.shift(by)


def _verdict(results: Results) -> Verdict:
    """Return the verdict on the message, with the number of its line if it is new.

    The message was either admitted or, if it is too old or a precondition failed, only looked up.
    """
    n = results.first(AppendEntry)
    if n is not None:
        return Verdict(_FRESH, _DONE, numbered(n))
    verdict = results.first(Admit) or results.first(Recall)
    if verdict is None:
        raise ProgramError("a request neither admits nor recalls its message")
    return verdict
