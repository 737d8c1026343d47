"""The verbs of the command line on alerts, deliveries and profiles.

They are the same with and without a running hub. The account that acknowledged, resolved or silenced is the
authenticated one; the name that a client gives is stored beside it as a claim.
"""

from __future__ import annotations

from typing import Final

import msgspec

from duly.apps.alerts.alert_queries import AlertRecord, named, show, show_delivery
from duly.apps.alerts.model import AlertState
from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.profiles import Profile, ProfileDraft, Profiles
from duly.apps.alerts.silences import Silence
from duly.core.units import DAY, MS, SECOND
from duly.errors import Malformed

MOST_LISTED: Final = 10_000
"""The most alerts or deliveries that one request lists."""
LONGEST: Final = 3_660 * DAY
"""The longest silence: ten years."""
_SILENCED: Final = frozenset({"sentinel", "device", "reason", "profile", "note"})


async def administer(
    operations: AlertOperations, profiles: Profiles, verb: str, wanted: dict[str, str], by: str
) -> object:
    """Carry out a verb on alerts, deliveries or profiles for the account `by`."""
    match verb:
        case "alert.list":
            alerts = await operations.alerts(
                standing=wanted.get("status", ""),
                sentinel=wanted.get("sentinel", ""),
                limit=_limit(wanted),
            )
            return {"alerts": [show(alert) for alert in alerts]}
        case "alert.show" | "deliveries.show":
            return show(await _asked(operations, wanted))
        case "alert.ack" | "alert.resolve":
            standing = AlertState.ACKNOWLEDGED if verb == "alert.ack" else AlertState.RESOLVED
            alert = await _asked(operations, wanted)
            await operations.say(alert, standing, by, wanted.get("note", ""), _claimed(wanted, by))
            return show(await _asked(operations, wanted))
        case "alert.silence":
            chosen: dict[str, object] = {name: value for name, value in wanted.items() if name in _SILENCED}
            if not chosen.keys() & {"sentinel", "device", "reason", "profile"}:
                raise Malformed("name what to silence with --sentinel, --device, --reason or --profile")
            since = operations.now()
            chosen |= {"until": since + _length(wanted["lasts"]), "since": since}
            chosen |= {"by": by, "claimed": _claimed(wanted, by)}
            quiet = msgspec.convert(chosen | {"critical": "critical" in wanted}, Silence)
            return {"silence": await operations.silences.add(quiet), **_show_silence(quiet)}
        case "alert.unsilence":
            return {"changed": await operations.silences.remove(wanted["silence"])}
        case "alert.silences":
            found = await operations.silences.all()
            return {"silences": [{"silence": name} | _show_silence(one) for name, one in found.items()]}
        case "deliveries.list":
            pairs = await operations.deliveries(state=wanted.get("state", ""), limit=_limit(wanted))
            return {"deliveries": [named(alert) | show_delivery(one) for alert, one in pairs]}
        case "deliveries.retry":
            alert = await _asked(operations, wanted)
            made = await operations.retry(alert, wanted.get("recipient", ""))
            return {"deliveries": [named(alert) | show_delivery(one) for one in made]}
        case "deliveries.edit":
            alert = await _asked(operations, wanted)
            made = await operations.edit(alert, wanted["recipient"], wanted["url"])
            return {"deliveries": [named(alert) | show_delivery(one) for one in made]}
        case "profile.set":
            draft = read_draft(wanted["draft"])
            profile, secrets = await profiles.set(wanted["name"], draft)
            return show_profile(wanted["name"], profile) | {"secrets": secrets}
        case "profile.list":
            return {"profiles": [show_profile(name, one) for name, one in profiles.all().items()]}
        case "profile.show":
            return show_profile(wanted["name"], profiles.named(wanted["name"]))
        case "profile.remove":
            return {"changed": await profiles.remove(wanted["name"])}
        case _:
            raise Malformed(f"there is no verb {verb!r}")


def draft_of(raw: object) -> ProfileDraft:
    """Read a draft of a profile; raises `Malformed` if it is invalid."""
    try:
        return msgspec.convert(raw, ProfileDraft)
    except msgspec.ValidationError as problem:
        raise Malformed(f"this is not a profile: {problem}") from None


def read_draft(text: str) -> ProfileDraft:
    """Read a draft of a profile from JSON; raises `Malformed` if it is invalid."""
    try:
        raw: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError) as problem:
        raise Malformed(f"the draft of a profile is not JSON: {problem}") from None
    return draft_of(raw)


def _limit(wanted: dict[str, str]) -> int:
    text = wanted.get("limit", "50")
    if not text.isdecimal() or len(text) > 5 or not 1 <= int(text) <= MOST_LISTED:
        raise Malformed(f"limit is a number from 1 to {MOST_LISTED}, not {text[:80]!r}")
    return int(text)


def _length(text: str) -> int:
    """Return the length of a silence, given in seconds, in microseconds."""
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not 0 < length <= LONGEST / SECOND:
        raise Malformed(f"lasts is a number of seconds, at most {LONGEST // SECOND}, not {text[:80]!r}")
    return round(length * SECOND)


def _claimed(wanted: dict[str, str], by: str) -> str:
    """Return the name that the client gave, if it differs from that of its account."""
    claimed = wanted.get("by", "")
    return "" if claimed == by else claimed


async def _asked(operations: AlertOperations, wanted: dict[str, str]) -> AlertRecord:
    return await operations.find(wanted["event"], wanted.get("sentinel", ""))


def show_profile(name: str, profile: Profile) -> dict[str, object]:
    """Return a profile as the API shows it; times are in seconds."""
    return {
        "name": name,
        "steps": [{"after": step.after / SECOND, "to": list(step.to)} for step in profile.steps],
        "quiet": profile.quiet,
        "zone": profile.zone,
        "lasts": profile.lasts / SECOND,
        "tries": profile.tries,
        "most": profile.most,
        "together": profile.together / SECOND,
        "heartbeat": profile.heartbeat / SECOND,
        "grace": profile.grace / SECOND,
        "silent": profile.silent.value,
    }


def _show_silence(one: Silence) -> dict[str, object]:
    seen: dict[str, object] = msgspec.to_builtins(one)
    return seen | {"until": one.until // MS, "since": one.since // MS}
