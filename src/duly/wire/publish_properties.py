"""The MQTT 5 properties of a published message: expiry, response topic, correlation data, user properties.

The law: nothing depends on these properties. Everything that a receiver must know is also in the payload,
since a broker or a receiver that speaks MQTT 3.1.1 sees nothing else.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.core.units import MINUTE, SECOND

LATE: Final = MINUTE
"""How long a broker may keep a message that is sent after its expiry: it asks for the outcome of the first
one."""


class PublishProperties(Struct, frozen=True):
    """The properties of one message. `expires` is how many seconds the broker may keep it; `response_topic`
    is where its outcome is expected, and `correlation` identifies it; `user` are names and values for its
    receiver."""

    expires: int | None = None
    response_topic: str = ""
    correlation: bytes = b""
    user: tuple[tuple[str, str], ...] = ()


def seconds_left(expires: int, now: int) -> int | None:
    """Return for how many seconds a broker should keep a message that expires at this time; None if it never
    does.

    >>> seconds_left(0, 7), seconds_left(1_500_000, 0), seconds_left(5, 7)
    (None, 2, 60)
    """
    if not expires:
        return None
    left = expires - now
    return -(-(left if left > 0 else LATE) // SECOND)
