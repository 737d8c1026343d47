"""The verbs of the command line that the audit chain records, and what it records of each.

Every verb that changes something is recorded with the names it concerns, never with a secret: neither the
address of a recipient nor a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_READS: Final = frozenset(
    [
        "list",
        "doctor",
        "temporary_token",
        "alert.list",
        "alert.show",
        "alert.silences",
        "deliveries.list",
        "deliveries.show",
        "profile.list",
        "profile.show",
        "audit.list",
        "audit.verify",
        "dashboard.users",
    ]
)
_NAMES: Final = (
    "role", "name", "app", "device", "sentinel", "event", "recipient", "profile", "reason", "silence",
    "lasts",
)  # fmt: skip
"""The arguments that name what a verb is about, in the order in which they are recorded."""


class AuditedVerb(NamedTuple):
    """The entry of a verb in the audit chain."""

    action: str
    target: str
    detail: str


def audited(verb: str, wanted: Mapping[str, str]) -> AuditedVerb | None:
    """Return what is recorded of a verb with these arguments; None for one that only reads.

    >>> audited("grant", {"app": "phone", "device": "lock"})
    AuditedVerb(action='grant', target='phone lock', detail='')
    >>> audited("floor", {}), audited("list", {})
    (None, None)
    """
    if verb in _READS or (verb == "floor" and "mend" not in wanted) or (verb == "prune" and "dry" in wanted):
        return None
    target = " ".join(wanted[name] for name in _NAMES if wanted.get(name))
    return AuditedVerb(verb, target, wanted.get("note", ""))
