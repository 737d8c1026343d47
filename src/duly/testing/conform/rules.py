"""The rules that a client must follow, by name.

`duly conform` proves them, and docs/write-your-own.md explains them under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct


class Noun(StrEnum):
    """The kinds of clients that can be tested."""

    DEVICE = "device"
    APP = "app"
    NODE = "node"
    SENTINEL = "sentinel"


class ConformRule(Struct, frozen=True):
    """A rule: its name, and the sentence that says what a client must do. With `restarts` it can be proved
    only if the client's program can be killed and restarted; with `over` it is a rule of one transport."""

    name: str
    sentence: str
    restarts: bool = False
    over: str = ""


class BrokenRule(Exception):
    """A client has broken a rule. It becomes a part of the report, and never leaves the run."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(why)
        self.rule = rule


class NotChecked(Exception):
    """A rule cannot be proved with this client. That is part of the report as well."""


_RECEIVES: Final = (
    ConformRule("connects", "It connects, says who it is, and connects again after every cut, within 30 s."),
    ConformRule(
        "answers", "It answers every command once, under the id and to the sender that the command names."
    ),
    ConformRule("runs-once", "It does not run a repeat, however often and however late the repeat comes."),
    ConformRule("repeats-the-answer", "It answers a repeat with the answer that it has stored."),
    ConformRule("keys-by-sender", "It takes the same id from another sender for another command."),
    ConformRule("refuses-conflicts", "It does not run other content under an id that it knows."),
    ConformRule("remembers-over-cuts", "It answers a repeat from memory after a reconnection, too."),
    ConformRule(
        "remembers-over-restarts", "It answers a repeat from memory after a restart, too.", restarts=True
    ),
    ConformRule(
        "stores-before-it-answers",
        "It stores an answer before it sends it: kill -9 loses none.",
        restarts=True,
    ),
    ConformRule(
        "runs-once-over-kills", "It does not run a command twice that kill -9 has interrupted.", restarts=True
    ),
    ConformRule("never-runs-the-forgotten", "It does not run what it may have run and no longer remembers."),
    ConformRule("minds-expiry", "It does not begin what is past its `exp`, and does not call it done."),
    ConformRule("names-the-unknown", "It answers a command that it does not know, with a code other than 0."),
    ConformRule("survives-nonsense", "It goes on after messages that it cannot read or does not expect."),
)
_SESSION: Final = (
    ConformRule(
        "keeps-its-session",
        "It connects with a session that is kept, and subscribes with QoS 1.",
        over="mqtt",
    ),
    ConformRule(
        "reports-status",
        "It publishes a retained status `online:true`; its will is `online:false` with the same `session`.",
        over="mqtt",
    ),
)

RULES: Final[Mapping[Noun, tuple[ConformRule, ...]]] = {
    Noun.DEVICE: (
        *_RECEIVES,
        ConformRule(
            "keeps-order",
            "It lets no command take effect after a later one of the same sender and order key.",
        ),
        ConformRule(
            "answers-pings",
            "It answers WebSocket pings: silence of half a minute is a lost connection.",
            over="ws",
        ),
        ConformRule(
            "keeps-pushes",
            "It keeps a push that has a `seq_id`, and sends it again until it is acknowledged.",
        ),
        *_SESSION,
        ConformRule(
            "confirms-receipt", "It publishes an `ack` once a task is stored, before its result.", over="mqtt"
        ),
    ),
    Noun.NODE: (
        *_RECEIVES,
        *_SESSION,
        ConformRule(
            "confirms-receipt",
            "It publishes an `ack` once a task is stored, before its result, and again for every repeat.",
            over="mqtt",
        ),
        ConformRule("minds-the-receiver", "It neither runs nor answers a task for another receiver."),
        ConformRule(
            "minds-old-tasks", "It neither runs nor answers a task without `exp` whose `time` is days ago."
        ),
        ConformRule(
            "answers-in-kind", "It answers in the form (base64 or JSON) and with the field names of the task."
        ),
        ConformRule("resends", "It sends a task again with the same id and content until it is answered."),
        ConformRule(
            "takes-the-first-end", "It takes the first result of a task that it sent, and no other for it."
        ),
    ),
    Noun.APP: (
        ConformRule(
            "connects", "It connects, says who it is, and connects again after every cut, within 30 s."
        ),
        ConformRule(
            "mints-ids", "It gives each command a new id, {milliseconds}_{counter}, greater than all before."
        ),
        ConformRule(
            "resends", "It sends a command again with the same id and content until the hub has answered it."
        ),
        ConformRule(
            "resends-after-cuts", "It sends what has not ended again, after a reconnection, with the same id."
        ),
        ConformRule("waits-for-the-end", "It takes `server_ack` code 0 for accepted, not for done."),
        ConformRule("takes-any-order", "It takes an `ack` that comes before its `server_ack`."),
        ConformRule(
            "reads-duplicates", "It takes code 5 for accepted, and the `ack` that follows for the end."
        ),
        ConformRule("ends-once", "It reports the first end of a command; later answers change nothing."),
        ConformRule("ignores-strangers", "It takes no answer to another id for its own."),
        ConformRule(
            "reports-refusals",
            "It reports a refused command, with the hub's code, and does not send it again.",
        ),
        ConformRule("tries-again-after-4", "It sends a command again after code 4, with the same id."),
        ConformRule("reports-the-unknown", "It reports `unknown` as unknown: neither done nor failed."),
        ConformRule("survives-nonsense", "It goes on after messages that it cannot read or does not expect."),
        ConformRule("mints-ids-over-restarts", "Its ids do not go back after a restart.", restarts=True),
    ),
    Noun.SENTINEL: (
        ConformRule(
            "connects", "It connects, says who it is, and connects again after every cut, within 30 s."
        ),
        ConformRule("fills-in-events", "Its `alert_event` has an id, a `profile_id` and a `trigger_reason`."),
        ConformRule(
            "resends", "It sends an event again with the same id and content until the hub has answered it."
        ),
        ConformRule("resends-after-cuts", "It sends what was not acknowledged again after a reconnection."),
        ConformRule("tries-again-after-4", "It sends an event again after code 4, with the same id."),
        ConformRule("stops-when-acknowledged", "It does not send an event again after code 0 or 5."),
        ConformRule(
            "keeps-while-offline", "It reports what happened while the hub was away, all of it, in order."
        ),
        ConformRule("survives-nonsense", "It goes on after messages that it cannot read or does not expect."),
        ConformRule(
            "debounces",
            "It reports the same reason of a device once in half a minute, however often it comes.",
        ),
        ConformRule(
            "limits", "It reports at most ten events of a device in an hour, and sums up the others."
        ),
        ConformRule(
            "keeps-over-kills",
            "It sends an event again after kill -9 that was not acknowledged.",
            restarts=True,
        ),
    ),
}
