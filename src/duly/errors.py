"""All errors of duly, as one tree.

An error says *whose fault* it is and *what to do next*, and it is raised before anything is stored or half
done. Catch the branch that you can act on.

    DulyError
    ├── SenderError           the message is wrong: change it, do not repeat it
    │   ├── Malformed         a field has the wrong form
    │   ├── TooLarge          a field or body is over its limit
    │   ├── Conflict          this id was used for something else
    │   ├── Stale             older than ids are remembered; never run
    │   ├── FromTheFuture     its clock is ahead by more than allowed
    │   ├── Expired           its own deadline has passed
    │   ├── NotAuthenticated  the sender is not known
    │   │   ├── TooManyLogins too many tokens were wrong: wait
    │   │   ├── Unsigned      a signature is demanded, and there is none
    │   │   ├── UnknownKey    signed with a key that is not trusted for this sender
    │   │   └── Forged        the signature does not fit this message
    │   ├── NotAllowed        the sender is known and may not do this
    │   ├── NotFound          there is no such message, device or alert
    │   ├── NoProfile         no recipient would be notified of an alert
    │   └── Refused           the hub did not accept it; its code and word say why
    ├── OutcomeError          the message was accepted, and this is how it ended
    │   ├── Failed            the handler failed, and that is its stored outcome
    │   ├── Unknown           it is not known whether the effect happened; not run again
    │   ├── Unstorable        it ran, but its result cannot be stored
    │   ├── DeviceError       a device's handler failed with a code: nothing was done
    │   ├── TaskFailed        a node's handler failed with a value of its own
    │   └── MediaError        a download is incomplete; the next call continues it
    ├── LedgerError           the storage has a problem: the operator can solve it
    │   ├── LedgerInUse       another process writes this file
    │   ├── LedgerDamaged     the file is damaged; nothing was changed
    │   ├── LedgerTooNew      written by a newer duly
    │   ├── SecretKeyMissing  its secrets are encrypted with a key that is missing
    │   └── LedgerUnavailable full disk, lost connection: nothing was stored, try again
    ├── ConnectionLost        there is no connection, or it broke too early: send again
    ├── ConnectionRefused     the server refuses the connection: the operator can solve it
    │   └── VersionRefused    a broker does not speak this version of MQTT
    ├── BrokerError           the embedded broker cannot run: the operator can solve it
    │   └── PortTaken         another program listens on its port
    ├── ChannelError          a notification did not arrive, or may not have arrived
    │   ├── NotSent           it certainly had no effect: try again
    │   ├── Declined          the recipient refuses it: check the address and the content
    │   └── InDoubt           it may have arrived
    ├── Overloaded            queues are full: try again later
    │   └── RateLimited       this account or address asks too often: wait as long as it says
    ├── Stopped               the hub or client is shutting down: try another one, or later
    ├── MissingExtra          a package is not installed: the sentence says which extra brings it
    └── ProgramError          a bug in the calling code
        └── IllegalTransition a state change the lifecycle does not allow
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Fault(Enum):
    """The party that can solve a problem."""

    SENDER = "sender"
    OPERATOR = "operator"
    PROGRAM = "program"
    NONE = "none"
    """there is nothing to solve: it is an outcome, or it passes"""


class DulyError(Exception):
    """The root of all errors. `fault` says who can solve it, `retry` whether the same call may succeed
    later."""

    fault: ClassVar[Fault] = Fault.PROGRAM
    retry: ClassVar[bool] = False
    word: ClassVar[str] = "error"
    """The word that names the error on the wire and in counters."""
    wait: int = 0
    """How long to wait before the next try, in microseconds; 0 if that is not known."""


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
    """The message is older than ids are remembered, so it is never run; send it again with a new id."""

    word = "stale"


class FromTheFuture(SenderError):
    """The clock of the sender is ahead by more than is allowed."""

    word = "future"


class Expired(SenderError):
    """The deadline of the message has passed."""

    word = "expired"


class NotAuthenticated(SenderError):
    """The sender is not known: it has to show a valid token."""

    word = "not_authenticated"


class TooManyLogins(NotAuthenticated):
    """Too many tokens were wrong: wait before the next try."""

    retry = True
    word = "too_many_logins"

    def __init__(self, detail: str, wait: int = 0) -> None:
        super().__init__(detail)
        self.wait = wait


class Unsigned(NotAuthenticated):
    """A signature is demanded and missing: give the sender a key, and trust that key here."""

    word = "unsigned"


class UnknownKey(NotAuthenticated):
    """The message is signed with a key that is not trusted for this sender; see 'duly keys trust'."""

    word = "unknown_key"


class Forged(NotAuthenticated):
    """The signature does not fit: the message is of another sender, or for another recipient."""

    word = "forged"


class NotAllowed(SenderError):
    """The sender is known and may not do this; an operator has to grant it first."""

    word = "not_allowed"


class NotFound(SenderError):
    """There is no such message, device or alert."""

    word = "not_found"


class NoProfile(SenderError):
    """No recipient would be notified of this alert: make its profile, or one named `default`, and send it
    again."""

    word = "no_profile"
    retry = True


class Refused(SenderError):
    """The hub did not accept the command, and nothing was done. `code` and `error` say why."""

    def __init__(self, code: int, error: str, detail: str) -> None:
        super().__init__(f"{detail or error} (code {code})")
        self.code = code
        self.error = error
        self.detail = detail


class OutcomeError(DulyError):
    """The message was accepted, and this is how it ended."""

    fault = Fault.NONE
    word = "outcome"


class Failed(OutcomeError):
    """The run failed, and its failure is stored. `kind` is the name of the exception that was raised then."""

    word = "failed"

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


class Unknown(OutcomeError):
    """It is not known whether the effect happened; it is not run again."""

    word = "unknown"


class Unstorable(OutcomeError):
    """It ran, but its result cannot be stored."""

    fault = Fault.PROGRAM
    word = "unstorable"


class DeviceError(OutcomeError):
    """A device's handler raises it to fail with a code: nothing was done."""

    word = "device_error"

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(detail or f"code {int(code)}")
        self.code = code
        self.detail = detail


class TaskFailed(OutcomeError):
    """A node's handler raises it to fail with a value of its own: nothing was done. The caller gets the
    same error.

    >>> TaskFailed({"lamp": "broken"}).error
    {'lamp': 'broken'}
    """

    word = "task_failed"

    def __init__(self, error: object = None, state: str = "failed") -> None:
        super().__init__(error if isinstance(error, str) else f"{state}: {error!r}")
        self.error = error
        self.state = state


class MediaError(OutcomeError):
    """The download is incomplete; what arrived is kept, and the next call continues from there."""

    retry = True
    word = "media"


class LedgerError(DulyError):
    """The storage has a problem that the operator can solve."""

    fault = Fault.OPERATOR
    word = "ledger"


class LedgerInUse(LedgerError):
    """Another process uses this ledger file."""

    word = "ledger_in_use"


class LedgerDamaged(LedgerError):
    """The ledger file is damaged; nothing was changed."""

    word = "ledger_damaged"


class LedgerTooNew(LedgerError):
    """The ledger was written by a newer duly."""

    word = "ledger_too_new"


class SecretKeyMissing(LedgerError):
    """The secrets of the ledger are encrypted with a key that is missing."""

    word = "secret_key_missing"


class LedgerUnavailable(LedgerError):
    """The ledger cannot be used now, for example since the disk is full: try again with the same ids."""

    retry = True
    word = "ledger_unavailable"


class ConnectionLost(DulyError):
    """There is no connection, or it broke before the other side confirmed: send again later."""

    fault = Fault.NONE
    retry = True
    word = "connection_lost"


class ConnectionRefused(DulyError):
    """The server refuses the connection or a subscription; the operator can solve that."""

    fault = Fault.OPERATOR
    word = "connection_refused"


class VersionRefused(ConnectionRefused):
    """The broker does not speak this version of MQTT; another one may do."""

    word = "version_refused"


class BrokerError(DulyError):
    """The embedded broker cannot run; the operator can solve that."""

    fault = Fault.OPERATOR
    word = "broker"


class PortTaken(BrokerError):
    """Another program listens on the port of the embedded broker."""

    word = "port_taken"


class ChannelError(DulyError):
    """A notification did not arrive, or may not have arrived."""

    fault = Fault.OPERATOR
    word = "channel"


class NotSent(ChannelError):
    """The attempt certainly had no effect; try again, but not before `rest` (µs) if the recipient asked
    for that."""

    retry = True
    word = "not_sent"

    def __init__(self, reason: str, rest: int = 0) -> None:
        super().__init__(reason)
        self.rest = rest


class Declined(ChannelError):
    """The recipient refuses the notification, now and later: check the address and the content."""

    word = "declined"


class InDoubt(ChannelError):
    """The notification may have arrived."""

    retry = True
    word = "in_doubt"


class Overloaded(DulyError):
    """Queues are full: try again later."""

    fault = Fault.OPERATOR
    retry = True
    word = "overloaded"


class RateLimited(Overloaded):
    """This account or address asks too often, and nothing was done. Try again after `wait` (µs)."""

    fault = Fault.SENDER
    word = "rate_limited"

    def __init__(self, detail: str, wait: int) -> None:
        super().__init__(detail)
        self.wait = wait


class Stopped(DulyError):
    """The hub or client is shutting down: try another one, or later."""

    fault = Fault.NONE
    retry = True
    word = "stopped"


class MissingExtra(DulyError, ImportError):
    """A package that only some programs need is not installed; the sentence says which extra brings it."""

    fault = Fault.OPERATOR
    word = "missing_extra"


class ProgramError(DulyError):
    """The calling code has a bug."""

    word = "program"


class IllegalTransition(ProgramError):
    """A state change that the lifecycle does not allow."""

    word = "illegal_transition"
