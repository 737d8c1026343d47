"""Writes the rules of `duly.core.acl` in the languages of brokers.

Nothing is allowed that the table does not allow, and no name can change that: a name that means more than
itself to a broker (a dot to RabbitMQ, a blank to NATS) is refused here.

There are two kinds of networks. Without a hub every user is a node. With a hub (`hub` names its user)
every user is a device of that hub, and the nodes are named: so no node can command a device, and a device
commands nothing. Mosquitto and EMQX insert the username themselves, so their rules also hold for later
users (devices, where there is a hub). RabbitMQ and NATS want each user named. An observer, which sees and
does everything, is named as an admin.

Brokers differ in how they refuse: NATS and RabbitMQ refuse a forbidden subscription, Mosquitto grants it
and delivers nothing; RabbitMQ closes the connection after a forbidden publish, the others acknowledge and
drop it. So only the delivery of messages shows what a broker enforces, and `duly acl test` looks at that.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.acl import ANSWERS, HUB, AccountClass, Act, Rule, TopicOwner, allowed
from duly.errors import Malformed
from duly.wire.fd import PREFIX, check_prefix, check_username

EVERYTHING: Final = "#"

NO_PASSWORD: Final = "$2a$11$replace.this.by.what.nats-server.passwd.prints"
"""Has the form of a bcrypt hash and matches no password: a user without a given password cannot log in."""

_NOTHING: Final = "$duly.nothing"
"""A subject that is not used: to NATS an empty list of permissions means that everything is allowed."""

_SESSION: Final = "-[0-9a-f]{8,12}"
"""What follows a node's name in the client ids of its short connections, which send or ask something once."""

_UNSUPPORTED: Final = re.compile(r"[\s\x00-\x1f\x7f]")


class RulesRequest(Struct, frozen=True):
    """The users that rules are to be written for. `users` are nodes; `passwords` are bcrypt hashes by
    name."""

    prefix: str = PREFIX
    users: Sequence[str] = ()
    admins: Sequence[str] = ()
    passwords: Mapping[str, str] = {}
    devices: Sequence[str] = ()
    hub: str = ""
    """the user as which the hub logs in; empty if there is no hub and every user is a node"""

    def __post_init__(self) -> None:
        check_prefix(self.prefix)
        if re.search(r'[\s%${}"\\]', self.prefix):
            raise Malformed(
                f"the prefix {self.prefix!r} has characters with a special meaning in rules; choose another "
                "prefix"
            )
        if self.devices and not self.hub:
            raise Malformed("devices belong to a hub: name its user too, --hub hub")
        hubs = [self.hub] if self.hub else []
        names = [*self.users, *self.devices, *hubs, *self.admins]
        if self.hub and HUB in (*self.users, *self.devices):
            raise Malformed(f"the topics of {HUB!r} are the hub's own; choose another name")
        for name in names:
            check_username(name)
            if re.search(r"[\x00-\x1f\x7f]", name):
                raise Malformed(f"{name!r} contains a control character")
        twice = [name for position, name in enumerate(names) if name in names[:position]]
        if twice:
            raise Malformed(f"{twice[0]!r} is named twice")

    @property
    def peers(self) -> Sequence[str] | None:
        """The users that a node may write to: None for all, or, where there is a hub, the named nodes."""
        return self.users if self.hub else None

    @property
    def special(self) -> list[tuple[str, AccountClass]]:
        """The users with rules of their own where the broker inserts the username: with a hub, all but
        devices."""
        nodes = [(name, AccountClass.NODE) for name in self.users]
        return [*nodes, (self.hub, AccountClass.HUB)] if self.hub else []

    def members(self, broker: str) -> list[tuple[str, AccountClass]]:
        """Return all users but the admins, for a broker that wants each user named."""
        found = [(name, AccountClass.NODE) for name in self.users]
        found += [(name, AccountClass.DEVICE) for name in self.devices]
        if not found:
            also = ", or --devices C,D" if self.hub else ""
            raise Malformed(f"{broker} needs the name of each user: --users A,B{also}")
        return [*found, *([(self.hub, AccountClass.HUB)] if self.hub else [])]

    def allows(self, act: Act, name: str, of: AccountClass) -> list[str]:
        """Return the topic filters that this user may use; the name may be a placeholder of the broker."""
        return allowed(act, name, self.prefix, of, self.peers)


# ── Mosquitto ────────────────────────────────────────────────────────────────────────────────────


def mosquitto(wanted: RulesRequest) -> str:
    """Return the text of an `acl_file` of Mosquitto."""
    for name in (*wanted.admins, *(name for name, _ in wanted.special)):
        if name != name.strip():
            raise Malformed(f"Mosquitto cannot name {name!r} in a rule, since it begins or ends with a blank")
    others = AccountClass.DEVICE if wanted.hub else AccountClass.NODE
    return _lines(
        f"# Mosquitto: {_who(wanted)}. In mosquitto.conf:",
        "#   allow_anonymous false",
        "#   password_file FILE        made by mosquitto_passwd",
        "#   acl_file THIS_FILE",
        *(line for name in wanted.admins for line in (f"user {name}", f"topic readwrite {EVERYTHING}")),
        *(line for name, of in wanted.special for line in _mosquitto_user(wanted, name, of)),
        *(f"pattern {_MOSQUITTO[act]} {each}" for act in Act for each in wanted.allows(act, "%u", others)),
    )


_MOSQUITTO: Final = {Act.PUBLISH: "write", Act.SUBSCRIBE: "read"}


def _mosquitto_user(wanted: RulesRequest, name: str, of: AccountClass) -> list[str]:
    """Return the rules of a user that is not a device. The patterns for devices hold for it too, hence the
    denials."""
    topics = [f"topic {_MOSQUITTO[act]} {each}" for act in Act for each in wanted.allows(act, name, of)]
    if of is AccountClass.NODE:
        answers = (Rule(Act.PUBLISH, TopicOwner.HUB, kind) for kind in ANSWERS)
        topics += [f"topic deny {each}" for rule in answers for each in rule.topics(wanted.prefix, name)]
    return [f"user {name}", *topics]


# ── EMQX ─────────────────────────────────────────────────────────────────────────────────────────


def emqx(wanted: RulesRequest) -> str:
    """Return the text of an `acl.conf` of EMQX 5."""
    lines = [
        f"%% EMQX 5: {_who(wanted)}. In emqx.conf: authorization.no_match = deny",
        "%% (EMQX expands ${username}, not $1)",
    ]
    everything = f"[{_erlang(EVERYTHING)}]"
    lines += [f"{{allow, {{username, {_erlang(name)}}}, all, {everything}}}." for name in wanted.admins]
    for name, of in wanted.special:
        who = f"{{username, {_erlang(name)}}}"
        lines += [f"{{allow, {who}, {act.value}, {_topics(wanted, act, name, of)}}}." for act in Act]
        lines.append(f"{{deny, {who}, all, {everything}}}.")
    others = AccountClass.DEVICE if wanted.hub else AccountClass.NODE
    for act in Act:
        lines.append(f"{{allow, all, {act.value}, {_topics(wanted, act, '${username}', others)}}}.")
    return _lines(*lines, "{deny, all}.")


def _topics(wanted: RulesRequest, act: Act, name: str, of: AccountClass) -> str:
    return f"[{', '.join(map(_erlang, wanted.allows(act, name, of)))}]"


def _erlang(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ── RabbitMQ ─────────────────────────────────────────────────────────────────────────────────────


def rabbitmq(wanted: RulesRequest) -> str:
    """Return a shell script of `rabbitmqctl` calls. RabbitMQ turns topics into routing keys with dots between
    the levels."""
    lines = [
        "#!/bin/sh -e",
        f"# RabbitMQ: {_who(wanted)}, for users that exist (rabbitmqctl add_user NAME). Their client id is",
        "# their name, or it begins with NAME- and hexadecimal digits, as those that nodes make up do.",
        "# In rabbitmq.conf: mqtt.allow_anonymous = false",
    ]
    for name, of in wanted.members("RabbitMQ"):
        for other in (*wanted.users, *wanted.devices, *wanted.admins):
            if re.fullmatch(re.escape(name) + f"({_SESSION}){{1,2}}", other):
                raise Malformed(f"{other!r} could be a client id of {name!r} on RabbitMQ; use another name")
        queue = rf"^mqtt-subscription-{_regex(name)}({_SESSION}){{0,2}}qos[01]$"
        shared = rf"{queue}|^amq\.topic$"
        lines.append(_ctl("set_permissions", name, queue, shared, shared))
        lines.append(_ctl("set_topic_permissions", name, "amq.topic", *_keys(wanted, name, of)))
    for name in wanted.admins:
        lines.append(_ctl("set_permissions", name, ".*", ".*", ".*"))
        lines.append(_ctl("set_topic_permissions", name, "amq.topic", ".*", ".*"))
    return _lines(*lines)


def _keys(wanted: RulesRequest, name: str, of: AccountClass) -> list[str]:
    """Return the routing keys that this user may write and read, as regular expressions."""
    for text in (name, wanted.prefix):
        if re.search(r"[\s.*>%]", text):
            raise Malformed(
                f"RabbitMQ turns the / of a topic into a dot and restricts client ids, so {text!r} could "
                "be taken for another name; use names without dots, blanks, * > and %"
            )
    patterns = []
    for act in (Act.PUBLISH, Act.SUBSCRIBE):
        # RabbitMQ shows a + of a subscription as *, which no topic contains.
        any_name = r"(\*|[^.*#]+)" if act is Act.SUBSCRIBE else r"[^.*#]+"
        keys = (each.split("/") for each in wanted.allows(act, name, of))
        texts = (
            r"\.".join(any_name if level == "+" else _regex(level) for level in levels) for levels in keys
        )
        patterns.append(f"^({'|'.join(texts)})$")  # never empty: every class may do something of either
    return patterns


def _regex(text: str) -> str:
    # A brace could begin a variable such as {username}, which RabbitMQ would replace.
    return "".join(
        f"\\x{{{ord(c):x}}}" if c.isascii() and not c.isalnum() and c not in "_-" else c for c in text
    )


def _ctl(*words: str) -> str:
    return shlex.join(["rabbitmqctl", *words[:1], "-p", "/", "--", *words[1:]])


# ── NATS ─────────────────────────────────────────────────────────────────────────────────────────


DEVICES: Final = "duly"
NODES: Final = "nodes"
"""The two accounts of the embedded broker, which share nothing: the hub and its devices are in `DEVICES`,
nodes in `NODES`."""


class BrokerUser(Struct, frozen=True):
    """A user of a broker, with the MQTT topic filters that it may publish and subscribe to. What `denied`
    covers it may not publish to, also where `publish` would allow it.

    `password` is plain text or a bcrypt hash ("$2b$04$…"): for random tokens the lowest cost is enough.
    """

    name: str
    password: str = ""
    publish: Sequence[str] = ()
    subscribe: Sequence[str] = ()
    account: str = DEVICES
    denied: Sequence[str] = ()


def member(name: str, password: str, of: AccountClass, wanted: RulesRequest) -> BrokerUser:
    """Return a user with the permissions of a class of accounts."""
    account = NODES if of is AccountClass.NODE and not wanted.hub else DEVICES
    publish, subscribe = (wanted.allows(act, name, of) for act in (Act.PUBLISH, Act.SUBSCRIBE))
    return BrokerUser(name, password, publish, subscribe, account)


def node(name: str, password: str = "", prefix: str = PREFIX) -> BrokerUser:
    """Return a user of the embedded broker with the permissions of a node."""
    return member(name, password, AccountClass.NODE, RulesRequest(prefix))


def device(name: str, password: str = "", prefix: str = PREFIX) -> BrokerUser:
    """Return a user of the embedded broker with the permissions of a device."""
    return member(name, password, AccountClass.DEVICE, RulesRequest(prefix))


def hub(name: str, password: str = "", prefix: str = PREFIX) -> BrokerUser:
    """Return a user of the embedded broker with the permissions of the hub."""
    return member(name, password, AccountClass.HUB, RulesRequest(prefix))


def nats(wanted: RulesRequest) -> str:
    """Return an `accounts` block, to be included in the configuration of a nats-server."""
    passwords = wanted.passwords
    users = [
        member(name, passwords.get(name, NO_PASSWORD), of, wanted) for name, of in wanted.members("NATS")
    ]
    users += [
        BrokerUser(name, passwords.get(name, NO_PASSWORD), [EVERYTHING], [EVERYTHING])
        for name in wanted.admins
    ]
    return _lines(
        f"# NATS: {_who(wanted)}. In the server's configuration, with jetstream and mqtt: include THIS_FILE",
        nats_users(users).decode().rstrip(),
    )


def nats_users(users: Iterable[BrokerUser]) -> bytes:
    """Return an `accounts` block with these users only, who may connect by MQTT only."""
    lines = [_nats_user(user) for user in check_users(users)]
    # An account without users would let every client in.
    lines.append(_nats_user(BrokerUser("$unused", os.urandom(24).hex())))
    return b"accounts { duly { jetstream: enabled, users: [\n%b] } }\n" % b"".join(lines)


def check_users(users: Iterable[BrokerUser]) -> list[BrokerUser]:
    """Return these users if all of them can be users of a NATS server; raise `Malformed` otherwise."""
    seen: dict[str, BrokerUser] = {}
    for user in users:
        if not user.name or not user.password or _UNSUPPORTED.search(user.name):
            raise Malformed(f"broker user {user.name!r} needs a name without white space, and a password")
        if user.name in seen:
            raise Malformed(f"broker user {user.name!r} is named twice")
        _nats_user(user)
        seen[user.name] = user
    return list(seen.values())


def _nats_user(user: BrokerUser) -> bytes:
    return (
        b"  { user: %b, password: %b, allowed_connection_types: [MQTT], permissions: "
        b"{ publish: { allow: %b }, subscribe: { allow: %b } } }\n"
        % (_quoted(user.name), _quoted(user.password), _subjects(user.publish), _subjects(user.subscribe))
    )


def _subjects(topics: Sequence[str]) -> bytes:
    return b"[" + b", ".join(map(_quoted, subjects(topics))) + b"]"


def subjects(topics: Sequence[str]) -> list[str]:
    """Return the NATS subjects of these topic filters; never empty, since an empty list would allow
    everything."""
    return [subject_of(topic) for topic in topics] or [_NOTHING]


def subject_of(topic: str) -> str:
    """Return the NATS subject that nats-server derives from an MQTT topic filter.

    >>> subject_of("nodes/+/pending"), subject_of("nodes/a.b/#")
    ('nodes.*.pending', 'nodes.a//b.>')
    """
    levels = topic.split("/")
    if not topic or _UNSUPPORTED.search(topic) or "*" in topic or ">" in topic:
        raise Malformed(
            f"{topic!r} cannot be a topic here: the broker allows no white space, * or > in topics and names"
        )
    if "" in levels:
        raise Malformed(f"{topic!r} has an empty level; leave out the extra /")
    for position, level in enumerate(levels):
        if ("+" in level and level != "+") or (
            "#" in level and (level != "#" or position != len(levels) - 1)
        ):
            raise Malformed(f"{topic!r} is not a topic filter: + fills a level, # fills the last one")
    wild = {"+": "*", "#": ">"}
    return ".".join(wild.get(level) or level.replace(".", "//") for level in levels)


def topic_of(subject: str) -> str:
    """Return the MQTT topic or topic filter that a NATS subject was derived from.

    >>> topic_of("nodes.a//b.pending"), topic_of("nodes.*.pending"), topic_of("nodes.>"), topic_of("a./.b")
    ('nodes/a.b/pending', 'nodes/+/pending', 'nodes/#', 'a//b')
    """
    levels = subject.replace("//", "\0").split(".")
    return "/".join(_MQTT_LEVELS.get(level, level.replace("\0", ".")) for level in levels)


_MQTT_LEVELS: Final = {"*": "+", ">": "#", "/": ""}


def _quoted(text: str) -> bytes:
    if any(c < " " for c in text):
        raise Malformed(f"{text!r} contains a control character")
    return msgspec.json.encode(text)


def _who(wanted: RulesRequest) -> str:
    """Return the users that the rules are for, as their first line names them."""
    if not wanted.hub:
        return "the rules of nodes (no hub)"
    nodes = f", and for the nodes {', '.join(wanted.users)}" if wanted.users else ""
    return f"the rules for the hub {wanted.hub} and its devices{nodes}"


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


LANGUAGES: Final[Mapping[str, Callable[[RulesRequest], str]]] = {
    "mosquitto": mosquitto,
    "emqx": emqx,
    "rabbitmq": rabbitmq,
    "nats": nats,
}
