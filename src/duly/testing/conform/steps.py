"""The steps of scripts for receivers: devices and nodes. A script proves one rule; it is data."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct


class DeliverTask(Struct, frozen=True):
    """Sends a command; a name that was used before sends the same command again. Its type is `count`.

    `like` gives it the id of another command; `age` is how many seconds ago its id was minted."""

    name: str
    times: int = 1
    sender: str = "phone"
    like: str = ""
    other_content: bool = False
    age: int = 0
    expired: bool = False
    unknown_type: bool = False
    lane: str = ""
    receiver: str = ""
    days_old: int = 0
    """of a task: it has no `exp`, and its `time` is this many days ago"""
    undated: bool = False
    """of a task: it has no `exp`, and its `time` is now"""
    unordered: bool = False
    """of a command: its `order` says that it belongs to no lane"""
    bare: bool = False
    """of a command: it has no data, and its `order` names no key"""
    own_fields: bool = False
    """it has fields that the protocol does not know"""
    old_names: bool = False
    plain_json: bool = False


class Reserve(Struct, frozen=True):
    """Mints ids for these commands in this order; they may be delivered in another order. With `age`
    they were minted that many seconds ago, all in the same millisecond."""

    names: tuple[str, ...]
    sender: str = "phone"
    age: int = 0


class ExpectAnswer(Struct, frozen=True):
    """Waits for an answer to the last delivery of a command: `done`, `not done`, or either; with `same`, the
    answer that it got before. Without an answer the rule `answers` is broken; with `proves`, the script's own
    rule."""

    name: str
    how: str = "done"
    same: bool = False
    proves: bool = False


class NotDone(Struct, frozen=True):
    """Expects that a delivered command is not answered as done; with `silent`, that it is not answered at
    all."""

    name: str
    silent: bool = False


class CountEffects(Struct, frozen=True):
    """Expects that this many commands have run since the script began."""

    count: int
    or_fewer: bool = False


class InOrder(Struct, frozen=True):
    """Expects that those of these commands that ran did so in this order."""

    names: tuple[str, ...]


class InKind(Struct, frozen=True):
    """Expects that the answers to a command have the form of the command."""

    name: str


class Flood(Struct, frozen=True):
    """Delivers other commands, each after the one before was answered, until the client has forgotten this
    one: it no longer answers it."""

    name: str


class Cut(Struct, frozen=True):
    """Breaks the connection, and waits for the next one."""


class Kill(Struct, frozen=True):
    """Kills the program and starts it again; `at` names a command: it is killed when that is answered. With
    `if_possible` a program that was started by hand is left alone, and the rest of the script is played."""

    at: str = ""
    if_possible: bool = False


class Pause(Struct, frozen=True):
    """Lets time pass."""

    seconds: float


class AtWork(Struct, frozen=True):
    """Waits for this share of the time that the client took to answer its last command."""

    share: float


class Nonsense(Struct, frozen=True):
    """Sends messages that cannot be decoded or are not expected."""


class Inspect(Struct, frozen=True):
    """Checks how the client behaves on its transport, for the script's own rule."""


ConformStep: TypeAlias = (
    DeliverTask
    | Reserve
    | ExpectAnswer
    | NotDone
    | CountEffects
    | InOrder
    | InKind
    | Flood
    | Cut
    | Kill
    | Pause
    | AtWork
    | Nonsense
    | Inspect
)


class Script(Struct, frozen=True):
    """Steps that prove a rule."""

    rule: str
    steps: tuple[ConformStep, ...]
