"""Everything that can go wrong, as one tree.

The law: an error says *whose fault* it is and *what to do next*, and it is raised before anything
is stored or half done. Catch the branch you can act on.

    DulyError
    ├── SenderError           the message is wrong: change it, do not repeat it
    │   ├── Malformed         a field has the wrong form
    │   ├── TooLarge          a field or body is over its limit
    │   ├── Conflict          this id was used for something else
    │   ├── Stale             older than we remember; never run
    │   ├── FromTheFuture     its clock is ahead by more than we allow
    │   ├── Expired           its own deadline has passed
    │   ├── NotAuthenticated  we do not know who is speaking
    │   │   ├── TooManyLogins too many tokens were wrong: wait
    │   │   ├── Unsigned      a signature is demanded, and there is none
    │   │   ├── UnknownKey    signed with a key that is not trusted for this sender
    │   │   └── Forged        the signature does not fit this message
    │   ├── NotAllowed        we know, and he may not
    │   ├── NoProfile         nobody would be told of an alert
    │   └── Refused           the hub did not take it; its code and word say why
    ├── OutcomeError          it was accepted, and this is how it ended
    │   ├── Failed            the handler failed, and that is its stored outcome
    │   ├── Unknown           nobody can tell whether the effect happened; not run again
    │   ├── Unstorable        it ran, but its result cannot be written down
    │   ├── DeviceError       a device's handler says so: nothing was done
    │   ├── TaskFailed        a node's handler says so, with a value of its own
    │   └── MediaError        a download did not come to its end; the next call goes on
    ├── LedgerError           the storage: the operator's to settle
    │   ├── LedgerInUse       another process writes this file
    │   ├── LedgerDamaged     the file is not sound; nothing was touched
    │   ├── LedgerTooNew      written by a newer duly
    │   ├── SecretKeyMissing  its secrets are sealed with a key that is not here
    │   └── LedgerUnavailable full disk, lost connection: nothing was stored, try again
    ├── ConnectionLost        there is no connection, or it went too early: send again
    ├── ConnectionRefused     the other side does not let us in: the operator's to settle
    ├── BrokerError           the embedded broker cannot run: the operator's to settle
    ├── ChannelError          a notice did not get through, or may not have
    │   ├── NotSent           it surely had no effect: try again
    │   ├── Declined          the other side does not want it: look at the address and the content
    │   └── InDoubt           it may have arrived
    ├── Overloaded            queues are full: try again later
    │   └── RateLimited       this account or address asks too much: wait as long as it says
    ├── Stopped               we are shutting down: try again remote or later
    └── ProgramError          a bug in the code that called us
        └── IllegalTransition a state change the lifecycle does not allow
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Fault(Enum):
    """Who can mend it."""

    SENDER = "sender"
    OPERATOR = "operator"
    PROGRAM = "program"
    NOBODY = "nobody"


class DulyError(Exception):
    """The root. ``fault`` says who can mend it, ``retry`` whether the same call may succeed later."""

    fault: ClassVar[Fault] = Fault.PROGRAM
    retry: ClassVar[bool] = False
    word: ClassVar[str] = "error"
    """The one word that goes over the wire and into counters."""
    wait: int = 0
    """How long to wait before the next try, in microseconds; 0: not said."""


class SenderError(DulyError):
    """The message is wrong: change it, do not repeat it."""

    fault = Fault.SENDER
    word = "refused"


class Malformed(SenderError, ValueError):
    """A field has the wrong form."""

    word = "malformed"


class TooLarge(SenderError, ValueError):
    """A field or body is over its limit."""

    word = "too_large"


class Conflict(SenderError):
    """This id was used before for something else; nothing was run."""

    word = "id_conflict"


class Stale(SenderError):
    """Older than we remember, so never run; send it again with a new id."""

    word = "stale"


class FromTheFuture(SenderError):
    """Its clock is ahead by more than we allow."""

    word = "future"


class Expired(SenderError):
    """Its own deadline has passed."""

    word = "expired"


class NotAuthenticated(SenderError):
    """We do not know who is speaking: show a token that is valid."""

    word = "not_authenticated"


class TooManyLogins(NotAuthenticated):
    """Too many tokens were wrong: wait before the next try."""

    retry = True
    word = "too_many_logins"

    def __init__(self, detail: str, wait: int = 0) -> None:
        super().__init__(detail)
        self.wait = wait


class Unsigned(NotAuthenticated):
    """A signature is demanded, and there is none: give the sender a key, and trust it here."""

    word = "unsigned"


class UnknownKey(NotAuthenticated):
    """Signed with a key that is not trusted for this sender: 'duly keys trust' makes it so."""

    word = "unknown_key"


class Forged(NotAuthenticated):
    """The signature does not fit: somebody else wrote this, or wrote it for another place."""

    word = "forged"


class NotAllowed(SenderError):
    """We know who is speaking, and he may not do this; somebody has to grant it first."""

    word = "not_allowed"


class NoProfile(SenderError):
    """Nobody would be told of this alert: make the profile, or one named `default`, and send it again."""

    word = "no_profile"
    retry = True


class Refused(SenderError):
    """The hub did not take the command: nothing was done. `code` and `error` say why."""

    def __init__(self, code: int, error: str, detail: str) -> None:
        super().__init__(f"{detail or error} (code {code})")
        self.code = code
        self.error = error
        self.detail = detail


class OutcomeError(DulyError):
    """It was accepted, and this is how it ended."""

    fault = Fault.NOBODY
    word = "outcome"


class Failed(OutcomeError):
    """The stored failure of a run. ``kind`` is the name of the exception that was raised then."""

    word = "failed"

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


class Unknown(OutcomeError):
    """Nobody can tell whether the effect happened; it is not run again."""

    word = "unknown"


class Unstorable(OutcomeError):
    """It ran, but its result cannot be written down."""

    fault = Fault.PROGRAM
    word = "unstorable"


class DeviceError(OutcomeError):
    """Raise it in a handler to fail with a code: nothing was done."""

    word = "device_error"

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(detail or f"code {int(code)}")
        self.code = code
        self.detail = detail


class TaskFailed(OutcomeError):
    """Raise it in a handler to fail with a value of your own: nothing was done. Whoever called gets the same.

    >>> TaskFailed({"lamp": "broken"}).error
    {'lamp': 'broken'}
    """

    word = "task_failed"

    def __init__(self, error: object = None, state: str = "failed") -> None:
        super().__init__(error if isinstance(error, str) else f"{state}: {error!r}")
        self.error = error
        self.state = state


class MediaError(OutcomeError):
    """The download did not come to its end; what arrived is kept, and the next call goes on from there."""

    retry = True
    word = "media"


class LedgerError(DulyError):
    """The storage: the operator's to settle."""

    fault = Fault.OPERATOR
    word = "ledger"


class LedgerInUse(LedgerError):
    """Another process writes this file."""

    word = "ledger_in_use"


class LedgerDamaged(LedgerError):
    """The file is not sound; nothing was touched."""

    word = "ledger_damaged"


class LedgerTooNew(LedgerError):
    """It was written by a newer duly."""

    word = "ledger_too_new"


class SecretKeyMissing(LedgerError):
    """Its secrets are sealed with a key that is not here."""

    word = "secret_key_missing"


class LedgerUnavailable(LedgerError):
    """A full disk, a lost connection: try again with the same ids."""

    retry = True
    word = "ledger_unavailable"


class ConnectionLost(DulyError):
    """There is no connection, or it went before the other side confirmed: send again later."""

    fault = Fault.NOBODY
    retry = True
    word = "connection_lost"


class ConnectionRefused(DulyError):
    """The other side does not let us in, or not listen: the operator's to settle."""

    fault = Fault.OPERATOR
    word = "connection_refused"


class BrokerError(DulyError):
    """The embedded broker cannot run: the operator's to settle."""

    fault = Fault.OPERATOR
    word = "broker"


class ChannelError(DulyError):
    """A notice did not get through, or may not have."""

    fault = Fault.OPERATOR
    word = "channel"


class NotSent(ChannelError):
    """It surely had no effect; try again, not before `rest` (µs) if the other side said so."""

    retry = True
    word = "not_sent"

    def __init__(self, reason: str, rest: int = 0) -> None:
        super().__init__(reason)
        self.rest = rest


class Declined(ChannelError):
    """The other side does not want it, and will not want it later: look at the address and the content."""

    word = "declined"


class InDoubt(ChannelError):
    """It may have arrived."""

    retry = True
    word = "in_doubt"


class Overloaded(DulyError):
    """Queues are full: try again later."""

    fault = Fault.OPERATOR
    retry = True
    word = "overloaded"


class RateLimited(Overloaded):
    """This account or address asks for more than its share; nothing was done. Try again after `wait` (µs)."""

    fault = Fault.SENDER
    word = "rate_limited"

    def __init__(self, detail: str, wait: int) -> None:
        super().__init__(detail)
        self.wait = wait


class Stopped(DulyError):
    """We are shutting down: try again remote or later."""

    fault = Fault.NOBODY
    retry = True
    word = "stopped"


class ProgramError(DulyError):
    """A bug in the code that called us."""

    word = "program"


class IllegalTransition(ProgramError):
    """A state change that the lifecycle does not allow."""

    word = "illegal_transition"
