"""The rules of `duly.core.acl` in the languages of brokers.

The law: nothing is allowed that the table does not allow, and no name can make it so. A name that means more
than itself to a broker (a dot to RabbitMQ, a blank to NATS) is refused here, before it becomes a hole.

Mosquitto and EMQX put the username in themselves, so their rules hold for users yet to come. RabbitMQ and
NATS want each user named. Who is to see and do everything, a hub or an observer, is named as an admin.

Brokers differ in how they refuse: NATS and RabbitMQ refuse a forbidden subscription, Mosquitto grants it and
delivers nothing; RabbitMQ hangs up on a forbidden publish, the others acknowledge and drop it. What a message
reaches is what counts, and what `duly acl test` looks at.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.acl import Act, allowed
from duly.dialects.fd import PREFIX, check_prefix, check_username
from duly.errors import Malformed

EVERYTHING: Final = "#"

NO_PASSWORD: Final = "$2a$11$replace.this.by.what.nats-server.passwd.prints"
"""Looks like a bcrypt hash and is none: whose password was not given gets in with no password at all."""

_NOTHING: Final = "$duly.nothing"
"""A subject nobody uses: to NATS an empty list of permissions means that everything is allowed."""

_SESSION: Final = "-[0-9a-f]{8,12}"
"""Behind a node's name, the client id of one that only sends, or looks whether somebody else is there."""

_UNSUPPORTED: Final = re.compile(r"[\s\x00-\x1f\x7f]")


class Wanted(Struct, frozen=True):
    """What rules are wanted for. `passwords` are bcrypt hashes, by name."""

    prefix: str = PREFIX
    users: Sequence[str] = ()
    admins: Sequence[str] = ()
    passwords: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        check_prefix(self.prefix)
        if re.search(r'[\s%${}"\\]', self.prefix):
            raise Malformed(f"the prefix {self.prefix!r} has characters that mean something else in rules")
        everybody = [*self.users, *self.admins]
        for name in everybody:
            check_username(name)
            if re.search(r"[\x00-\x1f\x7f]", name):
                raise Malformed(f"{name!r} contains a control character")
        twice = [name for place, name in enumerate(everybody) if name in everybody[:place]]
        if twice:
            raise Malformed(f"{twice[0]!r} is named twice")

    def named(self, broker: str) -> Sequence[str]:
        if not self.users:
            raise Malformed(f"{broker} wants each user named: --users A,B")
        return self.users


# ── Mosquitto ────────────────────────────────────────────────────────────────────────────────────


def mosquitto(wanted: Wanted) -> str:
    """An `acl_file`."""
    for name in wanted.admins:
        if name != name.strip():
            raise Malformed(f"Mosquitto cannot name {name!r} in a rule: a blank at its end")
    words = {Act.PUBLISH: "write", Act.SUBSCRIBE: "read"}
    return _lines(
        "# Mosquitto: seed 001's rules. In mosquitto.conf:",
        "#   allow_anonymous false",
        "#   password_file FILE        made by mosquitto_passwd",
        "#   acl_file THIS_FILE",
        *(line for name in wanted.admins for line in (f"user {name}", f"topic readwrite {EVERYTHING}")),
        *(f"pattern {words[act]} {each}" for act in Act for each in allowed(act, "%u", wanted.prefix)),
    )


# ── EMQX ─────────────────────────────────────────────────────────────────────────────────────────


def emqx(wanted: Wanted) -> str:
    """An `acl.conf`, of EMQX 5."""
    lines = [
        "%% EMQX 5: seed 001's rules. In emqx.conf: authorization.no_match = deny",
        "%% (the seed's own rules name nobody: EMQX expands ${username}, not $1)",
    ]
    admins = (f"{{username, {_erlang(name)}}}" for name in wanted.admins)
    lines += [f"{{allow, {who}, all, [{_erlang(EVERYTHING)}]}}." for who in admins]
    for act in Act:
        topics = ", ".join(map(_erlang, allowed(act, "${username}", wanted.prefix)))
        lines.append(f"{{allow, all, {act.value}, [{topics}]}}.")
    return _lines(*lines, "{deny, all}.")


def _erlang(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ── RabbitMQ ─────────────────────────────────────────────────────────────────────────────────────


def rabbitmq(wanted: Wanted) -> str:
    """A shell script of `rabbitmqctl` calls. Topics are routing keys there, with dots between the levels."""
    lines = [
        "#!/bin/sh -e",
        "# RabbitMQ: seed 001's rules, for users that exist (rabbitmqctl add_user NAME). Their client id is",
        "# their name, or it begins with NAME- and hexadecimal digits, as those that nodes make up do.",
        "# In rabbitmq.conf: mqtt.allow_anonymous = false",
    ]
    for name in wanted.named("RabbitMQ"):
        for other in (*wanted.users, *wanted.admins):
            if re.fullmatch(re.escape(name) + f"({_SESSION}){{1,2}}", other):
                raise Malformed(f"{other!r} could be a client id of {name!r} on RabbitMQ; use another name")
        queue = rf"^mqtt-subscription-{_regex(name)}({_SESSION}){{0,2}}qos[01]$"
        shared = rf"{queue}|^amq\.topic$"
        lines.append(_ctl("set_permissions", name, queue, shared, shared))
        lines.append(_ctl("set_topic_permissions", name, "amq.topic", *_keys(name, wanted.prefix)))
    for name in wanted.admins:
        lines.append(_ctl("set_permissions", name, ".*", ".*", ".*"))
        lines.append(_ctl("set_topic_permissions", name, "amq.topic", ".*", ".*"))
    return _lines(*lines)


def _keys(name: str, prefix: str) -> list[str]:
    """The routing keys this user may write and read, as regular expressions."""
    for text in (name, prefix):
        if re.search(r"[\s.*>%]", text):
            raise Malformed(
                f"RabbitMQ turns the / of a topic into a dot, and a client id is no free text, so {text!r} "
                "could be taken for another name; use names without dots, blanks, * > and %"
            )
    patterns = []
    for act in (Act.PUBLISH, Act.SUBSCRIBE):
        # A subscription shows itself as it was asked for: with * for +. No topic is called that.
        anybody = r"(\*|[^.*#]+)" if act is Act.SUBSCRIBE else r"[^.*#]+"
        keys = (each.split("/") for each in allowed(act, name, prefix))
        texts = (
            r"\.".join(anybody if level == "+" else _regex(level) for level in levels) for levels in keys
        )
        patterns.append(f"^({'|'.join(texts)})$")
    return patterns


def _regex(text: str) -> str:
    # A brace could stand for a variable, {username}, which RabbitMQ would put in.
    return "".join(
        f"\\x{{{ord(c):x}}}" if c.isascii() and not c.isalnum() and c not in "_-" else c for c in text
    )


def _ctl(*words: str) -> str:
    return shlex.join(["rabbitmqctl", *words[:1], "-p", "/", "--", *words[1:]])


# ── NATS ─────────────────────────────────────────────────────────────────────────────────────────


class BrokerUser(Struct, frozen=True):
    """Who may connect, and which MQTT topic filters he may publish and subscribe to.

    `password` is plain text or a bcrypt hash ("$2b$04$…"): for random tokens the cheapest cost will do.
    """

    name: str
    password: str
    publish: Sequence[str] = ()
    subscribe: Sequence[str] = ()


def node(name: str, password: str, prefix: str = PREFIX) -> BrokerUser:
    """A user who may do what a node may."""
    return BrokerUser(
        name, password, allowed(Act.PUBLISH, name, prefix), allowed(Act.SUBSCRIBE, name, prefix)
    )


def nats(wanted: Wanted) -> str:
    """An `accounts` block, to be included in a nats-server's configuration."""
    passwords = wanted.passwords
    users = [node(name, passwords.get(name, NO_PASSWORD), wanted.prefix) for name in wanted.named("NATS")]
    users += [
        BrokerUser(name, passwords.get(name, NO_PASSWORD), [EVERYTHING], [EVERYTHING])
        for name in wanted.admins
    ]
    return _lines(
        "# NATS: seed 001's rules. In the server's configuration, with jetstream and mqtt: include THIS_FILE",
        nats_users(users).decode().rstrip(),
    )


def nats_users(users: Iterable[BrokerUser]) -> bytes:
    """These users, and only these, with MQTT as their only way in."""
    seen: set[str] = set()
    lines: list[bytes] = []
    for user in users:
        if not user.name or not user.password or _UNSUPPORTED.search(user.name):
            raise Malformed(f"broker user {user.name!r} needs a name without white space, and a password")
        if user.name in seen:
            raise Malformed(f"broker user {user.name!r} is named twice")
        seen.add(user.name)
        lines.append(_nats_user(user))
    # An account without users would let everybody in.
    lines.append(_nats_user(BrokerUser("$nobody", os.urandom(24).hex())))
    return b"accounts { duly { jetstream: enabled, users: [\n%b] } }\n" % b"".join(lines)


def _nats_user(user: BrokerUser) -> bytes:
    return (
        b"  { user: %b, password: %b, allowed_connection_types: [MQTT], permissions: "
        b"{ publish: { allow: %b }, subscribe: { allow: %b } } }\n"
        % (_quoted(user.name), _quoted(user.password), _subjects(user.publish), _subjects(user.subscribe))
    )


def _subjects(topics: Sequence[str]) -> bytes:
    return b"[" + b", ".join(_quoted(s) for s in [subject_of(t) for t in topics] or [_NOTHING]) + b"]"


def subject_of(topic: str) -> str:
    """The NATS subject that nats-server makes of an MQTT topic filter.

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
    for place, level in enumerate(levels):
        if ("+" in level and level != "+") or ("#" in level and (level != "#" or place != len(levels) - 1)):
            raise Malformed(f"{topic!r} is not a topic filter: + fills a level, # fills the last one")
    wild = {"+": "*", "#": ">"}
    return ".".join(wild.get(level) or level.replace(".", "//") for level in levels)


def _quoted(text: str) -> bytes:
    if any(c < " " for c in text):
        raise Malformed(f"{text!r} contains a control character")
    return msgspec.json.encode(text)


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


LANGUAGES: Final[Mapping[str, Callable[[Wanted], str]]] = {
    "mosquitto": mosquitto,
    "emqx": emqx,
    "rabbitmq": rabbitmq,
    "nats": nats,
}
