"""Who may publish and subscribe to what: seed 001's rules for a broker, as data.

The law: the table below is all there is; what it does not allow is denied. Everything else is made from it:
the rules for each kind of broker, the users of the embedded one, and the questions `duly acl test` asks.

A node reads its own letterbox, writes into anybody's, and speaks for itself alone about how it is:

    nodes/{me}/pending ack complete failed    subscribe
    nodes/{anybody}/pending ack complete failed    publish
    nodes/{me}/status    publish
    nodes/{anybody}/status    subscribe
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec import Struct

LETTERS: Final = ("pending", "ack", "complete", "failed")
STATUS: Final = "status"

ANYBODY: Final = "+"


class Act(Enum):
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"


class Rule(Struct, frozen=True):
    """Everybody may do this with the topic of this kind: his own only, or anybody's."""

    act: Act
    own: bool
    kind: str

    def topic(self, prefix: str, me: str) -> str:
        """The topic filter this rule allows; `me` may be a broker's own placeholder for the username."""
        return f"{prefix}/{me if self.own else ANYBODY}/{self.kind}"


RULES: Final = (
    *(Rule(Act.SUBSCRIBE, True, kind) for kind in LETTERS),
    *(Rule(Act.PUBLISH, False, kind) for kind in LETTERS),
    Rule(Act.PUBLISH, True, STATUS),
    Rule(Act.SUBSCRIBE, False, STATUS),
)


class Decision(Struct, frozen=True):
    """Whether it is allowed, and why not."""

    allowed: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.allowed


ALLOW: Final = Decision(True)


def allowed(act: Act, me: str, prefix: str) -> list[str]:
    """The topic filters this user may use.

    >>> allowed(Act.PUBLISH, "lamp", "nodes")[-1]
    'nodes/lamp/status'
    """
    return [rule.topic(prefix, me) for rule in RULES if rule.act is act]


def decide(act: Act, me: str, topic: str, prefix: str) -> Decision:
    """May this user publish to this topic, or subscribe to this filter? A filter is allowed if everything it
    can match is.

    >>> decide(Act.SUBSCRIBE, "A", "nodes/A/pending", "nodes").allowed
    True
    >>> decide(Act.SUBSCRIBE, "A", "nodes/B/pending", "nodes").reason
    "A may not subscribe to nodes/B/pending: pending is B's own"
    """
    if any(covers(each, topic) for each in allowed(act, me, prefix)):
        return ALLOW
    return Decision(False, f"{me} may not {act.value} to {topic}: {_why(act, topic, prefix)}")


def covers(wide: str, narrow: str) -> bool:
    """Whether one filter matches everything the other does.

    >>> covers("nodes/+/status", "nodes/A/status"), covers("nodes/A/status", "nodes/+/status")
    (True, False)
    """
    if narrow.startswith("$") and not wide.startswith("$"):
        return False  # a wildcard at the front does not reach what belongs to the broker
    wides, narrows = wide.split("/"), narrow.split("/")
    for place, level in enumerate(wides):
        if level == "#":
            return True
        if place == len(narrows) or narrows[place] == "#":
            return False
        if level not in ("+", narrows[place]):
            return False
    return len(wides) == len(narrows)


def _why(act: Act, topic: str, prefix: str) -> str:
    below = topic.removeprefix(f"{prefix}/").split("/")
    if topic.startswith(f"{prefix}/") and len(below) == 2 and below[1] in (*LETTERS, STATUS):
        if below[0] == ANYBODY:
            return f"{below[1]} is everybody's own"
        return f"{below[1]} is {below[0]}'s own"
    return f"nothing is for nodes there, only {prefix}/{{username}}/{' '.join((*LETTERS, STATUS))}"
