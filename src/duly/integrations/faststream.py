"""FastStream handlers that run once per message, however often the broker delivers it.

    broker = RabbitBroker(url, middlewares=[CurrentStreamMessage])

    @broker.subscriber("charges")
    @once_per_message("postgresql://…")
    async def charge(order: str) -> None: ...

The law: the key is an id that every delivery of a message has: the sender's `message_id`, or the place of the
message in its stream (Redis streams, NATS JetStream, Kafka). FastStream makes up an id for a message without
one, a new one for each delivery, and passes a correlation id on to everything that a handler publishes;
neither counts, and a message without an id of its own is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from typing import Any, Final, TypeAlias

from faststream import BaseMiddleware
from faststream.message import StreamMessage

from duly.errors import ProgramError
from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import DeclaredEffect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message

_StreamMessage: TypeAlias = Any
"""A `StreamMessage` of FastStream, which mypy does not read."""
_CURRENT: Final = ContextVar[_StreamMessage]("duly_faststream_message", default=None)


class CurrentStreamMessage(BaseMiddleware):  # type: ignore[misc] # mypy does not read faststream
    """Notes which message is being worked on, for `once_per_message`."""

    async def consume_scope(self, call_next: Callable[[object], Awaitable[object]], msg: object) -> object:
        """Note the message while its handler runs."""
        before = _CURRENT.set(msg)
        try:
            return await call_next(msg)
        finally:
            _CURRENT.reset(before)


def once_per_message(
    ledger: LedgerSource, *, effect: DeclaredEffect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run a FastStream handler once per message; put it below `@broker.subscriber`, and
    `CurrentStreamMessage` into the broker's middlewares. A repeat gets the result of the first."""
    return per_message("faststream", _message_id, ledger, effect, keep, lease)


def _message_id(*_: object, **__: object) -> str | None:
    message = _CURRENT.get()
    if message is not None:
        return stable_id(message)
    if any(isinstance(value, StreamMessage) for value in copy_context().values()):  # FastStream has one here
        raise ProgramError(
            "the message of this handler is not known; add duly.integrations.faststream.CurrentStreamMessage "
            "to the broker: middlewares=[CurrentStreamMessage]"
        )
    return None


def stable_id(message: _StreamMessage) -> str:
    """Return the id that all deliveries of a message share; raises `ProgramError` if it has none."""
    raw = message.raw_message
    given = message.headers.get("message_id") or message.headers.get("Nats-Msg-Id")
    if given or (given := getattr(raw, "message_id", None)):
        return str(given)
    if isinstance(raw, dict):
        if raw.get("message_ids"):
            return f"{raw.get('channel')} {' '.join(map(_text, raw['message_ids']))}"
    elif hasattr(raw, "offset") and hasattr(raw, "partition"):
        return f"{raw.topic} {raw.partition} {raw.offset}"
    elif getattr(raw, "reply", "").startswith("$JS.ACK."):
        return f"{raw.metadata.stream} {raw.metadata.sequence.stream}"
    raise ProgramError(
        "this message has no id that its next delivery would have, too: publish it with message_id=…, or "
        'with headers={"message_id": …}; or use duly.once with a key of your own'
    )


def _text(id_: object) -> str:
    return id_.decode() if isinstance(id_, bytes) else str(id_)
