"""The reason codes of MQTT 5, and the return codes of MQTT 3.1.1, in words.

The law: a sentence about a refusal says its code as well, so that a broker's own documents can be searched.
"""

from __future__ import annotations

from typing import Final

from duly.errors import DulyError, Malformed, NotAllowed, Overloaded, TooLarge

FAILURES: Final = 0x80
"""The first code that means a failure."""

UNSUPPORTED_VERSION: Final = 0x84

_RETURN_CODES: Final = {
    1: "it speaks another MQTT than 3.1.1",
    2: "it does not accept the client id",
    3: "it is unavailable, or (RabbitMQ) the client id is not for us",
    4: "wrong username or password",
    5: "not authorised",
}

_WORDS: Final = {
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "refused for a reason of the broker's own",
    0x84: "unsupported protocol version",
    0x85: "client id not valid",
    0x86: "wrong username or password",
    0x87: "not authorized",
    0x88: "server unavailable",
    0x89: "server busy",
    0x8A: "banned",
    0x8B: "server shutting down",
    0x8C: "bad authentication method",
    0x8D: "keep alive timeout",
    0x8E: "session taken over by another connection with this client id",
    0x8F: "topic filter invalid",
    0x90: "topic name invalid",
    0x91: "packet number in use",
    0x92: "packet number not found",
    0x93: "receive maximum exceeded",
    0x94: "topic alias invalid",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "ended by an administrator",
    0x99: "payload format invalid",
    0x9A: "retained messages are not supported",
    0x9B: "quality of service is not supported",
    0x9C: "use another server",
    0x9D: "the server has moved",
    0x9E: "shared subscriptions are not supported",
    0x9F: "connection rate exceeded",
    0xA0: "connected for too long",
    0xA1: "subscription identifiers are not supported",
    0xA2: "wildcard subscriptions are not supported",
}


def return_code(code: int) -> str:
    """Return the words for why a broker of MQTT 3.1.1 refuses a connection."""
    return _RETURN_CODES.get(code, f"code {code}")


def words(code: int, said: str = "") -> str:
    """Return the words for a code, with the code, and with what the broker has said besides.

    >>> words(0x87)
    'not authorized (0x87)'
    >>> words(0x97, "10 a minute")
    'quota exceeded (0x97): 10 a minute'
    """
    text = f"{_WORDS.get(code, 'unknown reason')} (0x{code:02X})"
    return f"{text}: {said[:200]}" if said else text


def publish_error(code: int, sentence: str) -> DulyError:
    """Return the error for a message that the broker has refused with this code."""
    if code == 0x95:
        return TooLarge(sentence)
    if code in (0x90, 0x99):
        return Malformed(sentence)
    return Overloaded(sentence) if code in (0x96, 0x97) else NotAllowed(sentence)
