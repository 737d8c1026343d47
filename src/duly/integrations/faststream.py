"""FastStream handlers that run once per message id, with any broker of FastStream.

    broker = RabbitBroker(url, middlewares=[CurrentMessage])

    @broker.subscriber("orders")
    @once_per_message("postgresql://…")
    async def charge(order: str) -> None: ...

The law: the message's id is the key, so its publisher sets `message_id`. FastStream acknowledges a message
after its handler has returned, which is after the commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

from faststream import BaseMiddleware
from faststream.message import StreamMessage

from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import Effect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message

_CURRENT: Final = ContextVar[str | None]("duly_faststream_message", default=None)


class CurrentMessage(BaseMiddleware):  # type: ignore[misc] # mypy does not read faststream
    """Notes which message is being worked on, for `once_per_message`."""

    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]
    ) -> object:
        """Note the message's id while its handler runs."""
        token = _CURRENT.set(msg.message_id or None)
        try:
            return await call_next(msg)
        finally:
            _CURRENT.reset(token)


def once_per_message(
    ledger: LedgerSource, *, effect: Effect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run a FastStream handler once per message id; put it below `@broker.subscriber`, and `CurrentMessage`
    into the broker's middlewares. A repeat gets the result of the first."""
    return per_message("faststream", _message_id, ledger, effect, keep, lease)


def _message_id(*_: object, **__: object) -> str | None:
    return _CURRENT.get()
