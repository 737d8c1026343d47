"""The transmissions of one outbox: when each message is sent again, and when it is given up.

The law: a message under way has one timer. The timer is due when the message must be sent again, when it
expires, or when its recipient's time is up; then the outbox decides what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.timers import Timers
from duly.core.units import FOREVER

if TYPE_CHECKING:
    from duly.core.outbox import OutboxPolicy


class Transmission(Struct, eq=False, gc=False):
    """A message under way, and the newest attempt to deliver it."""

    message: Message
    attempt: int
    after: int
    begun: bool = False
    """whether this process transmitted this attempt"""
    received: bool = False
    resting: bool = False
    """the attempt failed, and the message waits for the next one"""
    own: int = 0
    """the message's own time limit; 0: the policy's"""
    give_up: int = FOREVER
    next_try: int = FOREVER
    tries: int = 0
    """transmissions since the start or since the recipient reconnected, which `resend` counts; `attempt`
    continues across restarts and is used only for fencing"""


class Transmissions:
    """The messages under way of one outbox, by key, with their timers.

    `once(message)` returns whether everything is sent to its recipient only once; `patience(message)` returns
    the message's own time limit, or 0.
    """

    def __init__(
        self,
        policy: OutboxPolicy,
        once: Callable[[Message], bool],
        patience: Callable[[Message], int],
    ) -> None:
        self._beyond_expiry = policy.beyond_expiry
        self._most = policy.patience
        self._resend = resend = policy.resend
        self._first = resend.delay(1, b"") if resend is not None and not resend.jitter else None
        """the delay after the first try, if it is the same for all messages"""
        self.is_sent_once = once
        self._patience = patience
        self._by_key: dict[bytes, Transmission] = {}
        self._timers = Timers[bytes]()
        self.get: Callable[[bytes], Transmission | None] = self._by_key.get
        """returns the message under way with this key"""

    def begin(self, message: Message, attempt: int, after: int, now: int) -> Transmission:
        """Add a message that is under way from now on, or again."""
        one = self._by_key[message.key] = Transmission(message, attempt, after, own=self._patience(message))
        self.be_patient(one, now)
        return one

    def transmitted(self, message: Message, attempt: int, after: int, now: int) -> Transmission:
        """Note that this attempt is transmitted now; from now on the message is under way."""
        one = self._by_key.get(message.key) or self.begin(message, attempt, after, now)
        one.attempt = attempt
        one.begun = True
        one.resting = False
        one.tries += 1
        self.repeat_later(one, now)
        return one

    def keep(self, one: Transmission) -> None:
        """Add a message that was under way before the machine was rebuilt, unchanged."""
        self._by_key[one.message.key] = one

    def remove(self, key: bytes) -> None:
        """Remove a message that is no longer under way, with its timer."""
        self._by_key.pop(key, None)
        self._timers.cancel(key)

    def take_all(self) -> dict[bytes, Transmission]:
        """Remove every message, and return them by key."""
        before = self._by_key.copy()
        self._by_key.clear()
        self._timers.clear()
        return before

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    def state(self, key: bytes) -> State | None:
        """Return the state of a message under way (sent or delivered), or None."""
        one = self._by_key.get(key)
        return None if one is None else State.DELIVERED if one.received else State.SENT

    def message(self, key: bytes) -> Message | None:
        """Return the message under way with this key."""
        one = self._by_key.get(key)
        return None if one is None else one.message

    def to(self, recipient: str) -> list[Transmission]:
        """Return the messages under way to this recipient; an empty name means every recipient."""
        return [one for one in self._by_key.values() if recipient in ("", one.message.recipient)]

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def next_try(self, message: Message, attempt: int, now: int) -> int:
        """Return when a message that is transmitted now is sent again if it is not answered."""
        if self._resend is None or self.is_sent_once(message):
            return FOREVER
        if attempt == 1 and self._first is not None:
            return now + self._first
        delay = self._delay(attempt, message.key)
        return FOREVER if delay is None else now + delay

    def repeat_later(self, one: Transmission, now: int) -> None:
        """Set the timer of a message that was just transmitted. Whether its recipient gets everything only
        once is checked when the timer is due, since most messages are answered before that."""
        delay = self._first if one.tries == 1 else None
        if delay is None:
            delay = self._delay(one.tries, one.message.key)
        self.schedule(one, FOREVER if delay is None else now + delay)

    def has_no_more_tries(self, one: Transmission) -> bool:
        """Return whether a message that is due again must not be sent again."""
        if self._resend is None or not one.tries:
            return False
        return self.is_sent_once(one.message) or self._delay(one.tries, one.message.key) is None

    def schedule(self, one: Transmission, next_try: int) -> None:
        """Set the timer of a message: it is sent again at `next_try` unless it ends before."""
        expiry = self.expiry(one)
        if one.own and not one.resting:
            if next_try >= expiry:
                next_try = FOREVER  # the message must not start after its expiry
            expiry = FOREVER
        one.next_try = next_try
        give_up = one.give_up
        self._timers.set(one.message.key, min(give_up, next_try), expiry)

    def cancel(self, one: Transmission) -> None:
        """Cancel the timer of a message that is being sent again."""
        self._timers.cancel(one.message.key)

    def be_patient(self, one: Transmission, now: int) -> None:
        """Restart the time that the recipient of a message has."""
        lasts = one.own or self._most
        if lasts >= FOREVER:
            one.give_up = FOREVER
        elif self._beyond_expiry and one.message.expires > now:
            one.give_up = one.message.expires + lasts
        else:
            one.give_up = now + lasts

    def deadline(self, one: Transmission) -> int:
        """Return when a message ends at the latest. A message with its own time limit has that long from its
        transmission."""
        if one.own and not one.resting:
            return one.give_up
        return min(one.give_up, self.expiry(one))

    def expiry(self, one: Transmission) -> int:
        """Return when a message expires: never, once the recipient has it or a local handler works on it."""
        if one.received or (self._resend is None and not one.resting):
            return FOREVER
        return one.message.expires or FOREVER

    def due(self, now: int) -> Iterator[Transmission]:
        """Yield the messages whose timers are due."""
        for key in self._timers.due(now):
            yield self._by_key[key]

    def next_wake(self) -> int | None:
        """Return when the next timer is due, or None."""
        return self._timers.next_wake()

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: timers keep their length."""
        self._timers.shift(by)
        for one in self._by_key.values():
            if one.give_up < FOREVER:
                one.give_up += by
            if one.next_try < FOREVER:
                one.next_try += by

    def _delay(self, attempt: int, salt: bytes) -> int | None:
        return None if self._resend is None else self._resend.delay(attempt, salt)
