"""Dramatiq actors that run once per message, however often the broker delivers it.

    broker.add_middleware(CurrentMessage())

    @dramatiq.actor
    @once_per_message("postgresql://…")
    def charge(order: str) -> None: ...

The law: the message's id is the key. An exception frees it, so that Dramatiq's own retries run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dramatiq.middleware import CurrentMessage

from duly.errors import ProgramError
from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import DeclaredEffect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message


def once_per_message(
    ledger: LedgerSource, *, effect: DeclaredEffect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run a Dramatiq actor once per message id; put it below `@dramatiq.actor`, and Dramatiq's own
    `CurrentMessage` into the broker's middleware."""
    return per_message("dramatiq", _message_id, ledger, effect, keep, lease)


def _message_id(*_: object, **__: object) -> str | None:
    message = CurrentMessage.get_current_message()
    if message is not None:
        return str(message.message_id)
    if type(threading.current_thread()).__module__.startswith("dramatiq."):  # a thread of a worker
        raise ProgramError(
            "the message of this actor is not known; add dramatiq.middleware.CurrentMessage() to the broker"
        )
    return None
