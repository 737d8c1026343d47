"""The access rules of an MQTT broker as data: which account may publish and subscribe to which topics.

The law: whatever the tables below do not allow is denied. The rules for each kind of broker, the users of the
embedded broker and the questions that `duly acl test` asks are all generated from these tables.

A node reads its own topics, writes to those of every other node, and publishes only its own status:

    nodes/{me}/pending ack complete failed    subscribe
    nodes/{any node}/pending ack complete failed    publish
    nodes/{me}/status    publish
    nodes/{any name}/status    subscribe

A device takes commands only from the hub. It answers the hub, publishes its status, and reads its own topics,
to which only the hub writes:

    nodes/{me}/pending ack complete failed    subscribe
    nodes/hub/ack complete failed    publish
    nodes/{me}/status    publish and subscribe

The hub commands devices and confirms that it has stored their status, or says why not; it reads their answers
and their status:

    nodes/{any device}/pending ack failed    publish
    nodes/hub/ack complete failed    subscribe
    nodes/{any name}/status    subscribe

Where devices and nodes share a broker, the nodes are named (`peers`): "any node" means one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

PENDING: Final = "pending"
ANSWERS: Final = ("ack", "complete", "failed")
LETTERS: Final = (PENDING, *ANSWERS)
STATUS: Final = "status"

EVERY_NAME: Final = "+"

HUB: Final = "hub"
"""The hub's own name among the nodes."""


class Act(Enum):
    """The two acts that a rule can allow: publish and subscribe."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"


class AccountClass(Enum):
    """The kind of an account at the broker."""

    NODE = "node"
    DEVICE = "device"
    HUB = "hub"


class TopicOwner(Enum):
    """The account whose name is in a topic."""

    OWN = "own"
    PEERS = "peers"
    """any node's, where every account is a node; otherwise only those of the named nodes"""
    ANY = "any"
    HUB = "hub"


class Rule(Struct, frozen=True):
    """Allows accounts of one class to publish or subscribe to topics of one kind."""

    act: Act
    whose: TopicOwner
    kind: str

    def topics(self, prefix: str, me: str, peers: Sequence[str] | None = None) -> list[str]:
        """Return the topic filters this rule allows; `me` may be a broker's own placeholder for the
        username."""
        match self.whose:
            case TopicOwner.OWN:
                names: Sequence[str] = (me,)
            case TopicOwner.PEERS:
                names = (EVERY_NAME,) if peers is None else peers
            case TopicOwner.ANY:
                names = (EVERY_NAME,)
            case TopicOwner.HUB:  # pragma: no branch
                names = (HUB,)
        return [f"{prefix}/{name}/{self.kind}" for name in names]


_LETTERBOX: Final = tuple(Rule(Act.SUBSCRIBE, TopicOwner.OWN, kind) for kind in LETTERS)

RULES: Final[dict[AccountClass, tuple[Rule, ...]]] = {
    AccountClass.NODE: (
        *_LETTERBOX,
        *(Rule(Act.PUBLISH, TopicOwner.PEERS, kind) for kind in LETTERS),
        Rule(Act.PUBLISH, TopicOwner.OWN, STATUS),
        Rule(Act.SUBSCRIBE, TopicOwner.ANY, STATUS),
    ),
    AccountClass.DEVICE: (
        *_LETTERBOX,
        *(Rule(Act.PUBLISH, TopicOwner.HUB, kind) for kind in ANSWERS),
        Rule(Act.PUBLISH, TopicOwner.OWN, STATUS),
        Rule(Act.SUBSCRIBE, TopicOwner.OWN, STATUS),
    ),
    AccountClass.HUB: (
        *(Rule(Act.SUBSCRIBE, TopicOwner.HUB, kind) for kind in ANSWERS),
        Rule(Act.SUBSCRIBE, TopicOwner.ANY, STATUS),
        *(Rule(Act.PUBLISH, TopicOwner.ANY, kind) for kind in (PENDING, "ack", "failed")),
    ),
}


class Permission(Struct, frozen=True):
    """Whether an act is allowed, and why not."""

    allowed: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.allowed


ALLOW: Final = Permission(True)


def allowed(
    act: Act,
    me: str,
    prefix: str,
    of: AccountClass = AccountClass.NODE,
    peers: Sequence[str] | None = None,
) -> list[str]:
    """Return the topic filters that this account may use.

    >>> allowed(Act.PUBLISH, "lamp", "nodes")[-1]
    'nodes/lamp/status'
    >>> allowed(Act.PUBLISH, "lamp", "nodes", AccountClass.DEVICE)
    ['nodes/hub/ack', 'nodes/hub/complete', 'nodes/hub/failed', 'nodes/lamp/status']
    """
    return [topic for rule in RULES[of] if rule.act is act for topic in rule.topics(prefix, me, peers)]


def decide(
    act: Act,
    me: str,
    topic: str,
    prefix: str,
    of: AccountClass = AccountClass.NODE,
    peers: Sequence[str] | None = None,
) -> Permission:
    """Decide whether this account may publish to this topic or subscribe to this filter. A filter is allowed
    if every topic it can match is allowed.

    >>> decide(Act.SUBSCRIBE, "A", "nodes/A/pending", "nodes").allowed
    True
    >>> decide(Act.SUBSCRIBE, "A", "nodes/B/pending", "nodes").reason
    "A may not subscribe to nodes/B/pending: pending is B's own"
    >>> decide(Act.PUBLISH, "lamp", "nodes/lock/pending", "nodes", AccountClass.DEVICE).reason
    'lamp may not publish to nodes/lock/pending: a device is commanded by the hub alone, and answers it alone'
    """
    if any(covers(each, topic) for each in allowed(act, me, prefix, of, peers)):
        return ALLOW
    return Permission(False, f"{me} may not {act.value} to {topic}: {_why(act, topic, prefix, of, peers)}")


def covers(wide: str, narrow: str) -> bool:
    """Return whether one filter matches every topic that the other one matches.

    >>> covers("nodes/+/status", "nodes/A/status"), covers("nodes/A/status", "nodes/+/status")
    (True, False)
    """
    if narrow.startswith("$") and not wide.startswith("$"):
        return False  # a wildcard at the front does not match the broker's own topics ($SYS)
    wides, narrows = wide.split("/"), narrow.split("/")
    for place, level in enumerate(wides):
        if level == "#":
            return True
        if place == len(narrows) or narrows[place] == "#":
            return False
        if level not in ("+", narrows[place]):
            return False
    return len(wides) == len(narrows)


def _why(act: Act, topic: str, prefix: str, of: AccountClass, peers: Sequence[str] | None) -> str:
    below = topic.removeprefix(f"{prefix}/").split("/")
    if topic.startswith(f"{prefix}/") and len(below) == 2 and below[1] in (*LETTERS, STATUS):
        whose, kind = below
        if act is Act.PUBLISH and kind in LETTERS:
            if of is AccountClass.DEVICE:
                return "a device is commanded by the hub alone, and answers it alone"
            if peers is not None and whose not in peers:
                return f"{whose} is not a node; only the hub writes to devices, and only devices to the hub"
        return f"{kind} is {'each account' if whose == EVERY_NAME else whose}'s own"
    return f"nothing is for nodes there, only {prefix}/{{username}}/{' '.join((*LETTERS, STATUS))}"
