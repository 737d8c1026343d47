"""What each figure has to reach, as data: which figure of which question, compared with what, at least or at
most.

A figure without a target is for information. A target without a figure was not measured, because a contender
is not installed or the run was too short, and the run says so.
"""

from __future__ import annotations

from msgspec import Struct


class Target(Struct, frozen=True):
    """One bound. With `of` it is for the ratio to that contender, without for the figure itself."""

    question: str
    figure: str
    of: str = ""
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    """of a figure that is judged by itself"""

    def __str__(self) -> str:
        sign, bound = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{sign} {bound:g} ×" if self.of else f"{sign} {bound:g} {self.unit}"

    def holds(self, value: float, ratio: float | None) -> bool | None:
        """Whether the figure reaches it; None if there is nothing to compare."""
        judged = ratio if self.of else value
        if judged is None:
            return None
        if self.at_least is not None:
            return judged >= self.at_least
        return self.at_most is None or judged <= self.at_most


T = Target
TARGETS = (
    T("gateway", "duly, 1 app × 100", "durable relay", at_least=0.7),
    T("gateway", "duly, 1 app × 100", "NATS, unsynced", at_least=1.0),
    T("gateway", "duly, 1 app × 100", "Redis relay", at_least=2.5),
    T("gateway", "duly, processor time", at_most=60, unit="µs/cmd"),
    T("gateway", "duly, c=1, p50", "durable relay", at_most=1.5),
    T("nodes", "duly, Mosquitto", "gmqtt by hand", at_least=0.6),
    T("nodes", "duly, Mosquitto", "paho by hand", at_least=1.0),
    T("nodes", "duly, embedded NATS", "gmqtt by hand", at_least=0.6),
    T("nodes", "duly, embedded NATS", "paho by hand", at_least=1.0),
    T("nodes", "duly, Mosquitto, c=1, p50", "gmqtt by hand", at_most=4),
    T("nodes", "duly", "Dramatiq", at_least=3),
    T("nodes", "duly", "FastStream", at_least=3),
    T("nodes", "duly", "Celery", at_least=3),
    T("nodes", "duly", "Taskiq", at_least=3),
    T("nodes", "duly", "arq", at_least=3),
    T("nodes", "duly, Mosquitto, those that waited", "its live rate", at_least=0.5),
    T("nodes", "duly, embedded NATS, those that waited", "its live rate", at_least=0.5),
    T("chat", "duly, delivered", "Prosody", at_least=1.5),
    T("chat", "duly, delivered", "ejabberd", at_least=0.6),
    T("chat", "duly, delivered", "Prosody with archive", at_least=4),
    T("chat", "duly, p99", "Prosody", at_most=1),
    T("chat", "duly, a group of 1,000", "bare broadcast", at_least=0.5),
    T("chat", "duly, 10,000 lines at login", "ejabberd", at_least=1),
    T("chat", "a line, most stored", "at 1,000", at_most=1.3),
    T("alerts", "duly, 16 connections, new", "Alertmanager", at_least=1.0),
    T("alerts", "duly, 100 per request, new", "Alertmanager", at_least=0.7),
    T("alerts", "duly, 1 connection, new", "Alertmanager", at_least=0.4),
    T("alerts", "duly, 1 connection, repeats", "new", at_least=2),
    T("alerts", "duly, 16 connections, repeats", "new", at_least=2),
    T("alerts", "duly, 100 per request, repeats", "new", at_least=2),
    T("alerts", "post to webhook, 100/s, p50", at_most=10, unit="ms"),
    T("admission", "admit, 200 callers", "bare groups", at_least=0.6),
    T("admission", "admit_many, 100 callers × 16", "bare groups", at_least=0.6),
    T("once", "once, SQLite, random keys", "Powertools", at_least=6),
    T("once", "once, SQLite", "Powertools", at_least=6),
    T("middleware", "duly, SQLite", "the faster of the others", at_least=2),
    T("middleware", "duly, SQLite", "bare", at_least=0.6),
    T("duplicates", "hot repeat", "fresh", at_least=3),
    T("figures", "seen, least processor time", "unseen", at_most=1.05),
    T("page", "open page, least processor time", "no page", at_most=1.05),
    T("before", "duly, one hub on PostgreSQL", "before", at_least=1.5),
    T("many", "two hubs", "one hub", at_least=1.4),
    T("growth", "cost at 1,000,000 ids", "at 1,000", at_most=1.3),
    T("growth", "cost at 10,000,000 ids", "at 1,000", at_most=1.3),
    T("growth", "memory at 1,000,000 ids", "at 300,000", at_most=1.1),
    T("growth", "memory at 10,000,000 ids", "at 1,000,000", at_most=1.1),
    T("remembered", "1,000,000 remembered", "at 1,000", at_most=1.3),
    T("connections", "commands, 10,000 devices", "nobody else", at_least=0.77),
    T("connections", "memory, 10,000 devices", at_most=1_000, unit="MB"),
    T("restart", "kill -9 to ready, 1,000,000 commands, worst", at_most=3, unit="s"),
    T("restart", "a full journal to ready, 1,000,000 commands", at_most=3, unit="s"),
)
"""1.3 × the cost of a command with 10,000 idle devices is 0.77 × the rate without them."""


def target_of(question: str, figure: str, of: str) -> Target | None:
    """The target of a figure, if it has one."""
    for target in TARGETS:
        if (target.question, target.figure, target.of) == (question, figure, of):
            return target
    return None
