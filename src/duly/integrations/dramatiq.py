"""Dramatiq actors that run once per message, however often the broker delivers it.

    broker.add_middleware(CurrentMessage())

    @dramatiq.actor
    @once_per_message("postgresql://…")
    def charge(order: str) -> None: ...

The law: the message's id is the key. An exception frees it, so that Dramatiq's own retries run.
"""

from __future__ import annotations

from collections.abc import Callable

from dramatiq.middleware import CurrentMessage

from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import Effect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message


def once_per_message(
    ledger: LedgerSource, *, effect: Effect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run a Dramatiq actor once per message id; put it below `@dramatiq.actor`, and Dramatiq's own
    `CurrentMessage` into the broker's middleware."""
    return per_message("dramatiq", _message_id, ledger, effect, keep, lease)


def _message_id(*_: object, **__: object) -> str | None:
    message = CurrentMessage.get_current_message()
    return None if message is None else str(message.message_id)
