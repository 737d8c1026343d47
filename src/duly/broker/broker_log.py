"""What the log of the embedded broker says of its clients: what they were refused.

The broker quotes what came from a client as Go does (`%q`), so no client can write a line of its own.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from duly.broker.acl_dialects import topic_of
from duly.errors import Malformed, NotAllowed, Overloaded, TooLarge

_TEXT: Final = r'"((?:[^"\\]|\\.)*)"'
_CLIENT: Final = re.compile(r"\[ERR\] \S+ - mid(?:_ws)?:(\d+) - " + _TEXT + " - (?:read error: )?(.*)")
"""Over WebSocket, what could not be read begins with `read error`."""
_VIOLATION: Final = re.compile(r"(Publish|Subscription) Violation - .*?Subject " + _TEXT)
_BAD_FILTER: Final = re.compile("invalid topic " + _TEXT + ": (.*)")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))")
_ACTS: Final = {"Publish": "publish", "Subscription": "subscribe"}
_CONTROLS: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_OTHERS: Final = (
    "authentication error", "unable to ", "error ", "unacceptable protocol version", "problem registering",
)  # fmt: skip
"""Beginnings of what is not a refusal, or is reported by the hub itself as it judges who connects. A client
that asks for another version of MQTT is told so, and connects with 3.1.1: many begin with version 5. One that
hangs up while it is judged cannot be registered."""

FULL: Final = (
    "the broker is full of messages for clients that do not fetch them; it takes more when they have "
    "connected, or when their accounts are removed"
)
_ADVICE: Final = {
    "character not supported": "a topic must not contain white space",
    "maximum payload exceeded": "send it in parts",
}


class ClientRefused(Struct, frozen=True):
    """A client that was refused something, by the number of its connection."""

    cid: int
    act: str
    """publish or subscribe; packet, if the broker could not read what came and has disconnected the client"""
    topic: str
    word: str
    why: str
    """what was wrong with a packet or a topic filter; empty if it was only not allowed"""


def refused_client(line: str) -> ClientRefused | None:
    """Return the refusal that a line of the log tells of, or None.

    >>> line = '[7] 2026/11/18 17:27:01 [ERR] 127.0.0.1:4 - mid:37 - "mq" - Publish Violation - Subject "a.b"'
    >>> refused_client(line)
    ClientRefused(cid=37, act='publish', topic='a/b', word='not_allowed', why='')
    """
    found = _CLIENT.search(line)
    if found is None:
        return None
    cid, text = int(found[1]), found[3]
    if (violation := _VIOLATION.match(text)) is not None:
        if not violation[2]:
            return None  # a topic filter that is invalid: the line before says so
        topic = topic_of(unquoted(violation[2]))
        return ClientRefused(cid, _ACTS[violation[1]], topic, NotAllowed.word, "")
    if (bad := _BAD_FILTER.match(text)) is not None:
        return ClientRefused(cid, "subscribe", unquoted(bad[1]), Malformed.word, _advised(bad[2]))
    if text.lower().startswith(_OTHERS) or text == "maximum payload exceeded":
        return None  # over WebSocket, the line before says how large it was
    if text.startswith("JetStream failed") and " exceeded (" in text:
        return ClientRefused(cid, "packet", "", Overloaded.word, FULL)
    word = TooLarge.word if text.startswith("maximum payload") else Malformed.word
    return ClientRefused(cid, "packet", "", word, _advised(text))


def unquoted(text: str) -> str:
    r"""Return the text that Go has quoted.

    >>> unquoted(r'a\"b\x1b\u2028')
    'a"b\x1b\u2028'
    """
    return _ESCAPE.sub(_unescaped, text)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _CONTROLS.get(found[4], found[4])


def _advised(text: str) -> str:
    """Return the text with what to do about it, where that is known."""
    return "; ".join((text, *(advice for said, advice in _ADVICE.items() if said in text)))
