"""duly: messages that take effect once, in the right order, and tell their sender how it ended."""

from __future__ import annotations

from duly.core.horizon import Horizon
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Verdict, Word
from duly.core.retry import RetryPolicy
from duly.errors import (
    Conflict,
    DulyError,
    Expired,
    Failed,
    FromTheFuture,
    IllegalTransition,
    LedgerDamaged,
    LedgerError,
    LedgerInUse,
    LedgerTooNew,
    LedgerUnavailable,
    Malformed,
    OutcomeError,
    Overloaded,
    ProgramError,
    SenderError,
    Stale,
    Stopped,
    TooLarge,
    Unknown,
    Unstorable,
)
from duly.ledger import Ledger, Transaction
from duly.ledgers import open_ledger
from duly.once import once

__all__ = [
    "Answer",
    "Conflict",
    "DulyError",
    "Expired",
    "Failed",
    "FromTheFuture",
    "Horizon",
    "IllegalTransition",
    "Ledger",
    "LedgerDamaged",
    "LedgerError",
    "LedgerInUse",
    "LedgerTooNew",
    "LedgerUnavailable",
    "Malformed",
    "Message",
    "Mode",
    "Order",
    "OutcomeError",
    "Overloaded",
    "ProgramError",
    "RetryPolicy",
    "SenderError",
    "Stale",
    "State",
    "Stopped",
    "TooLarge",
    "Transaction",
    "Unknown",
    "Unstorable",
    "Verdict",
    "Word",
    "once",
    "open_ledger",
]
