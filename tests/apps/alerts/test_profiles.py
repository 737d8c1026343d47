"""Who is told, and when: times of day, steps, limits."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from duly.apps.alerts.profiles import EscalationStep, Profile, ProfileDraft, Profiles
from duly.core.fanout.plan import DoubtPolicy
from duly.core.units import HOUR, MINUTE, SECOND
from duly.errors import Malformed
from duly.storage.memory import MemoryLedger


def at(text: str, zone: str = "Europe/Berlin") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * SECOND


def due(quiet: str, now: int, *, urgent: bool = False, zone: str = "Europe/Berlin") -> int:
    profile = Profile(steps=(EscalationStep(0, ("mail",)),), quiet=quiet, zone=zone)
    (planned,) = profile.plan(now, urgent=urgent)
    return planned.due


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("2026-03-01 21:59", "2026-03-01 21:59"),
        ("2026-03-01 22:00", "2026-03-02 07:00"),
        ("2026-03-02 03:00", "2026-03-02 07:00"),
        ("2026-03-02 07:00", "2026-03-02 07:00"),
        ("2026-03-28 23:00", "2026-03-29 07:00"),
        ("2026-10-24 23:00", "2026-10-25 07:00"),
    ],
    ids=["before", "begins", "at night", "ends", "clocks go forward", "clocks go back"],
)
def test_quiet_hours_over_midnight(now: str, then: str) -> None:
    assert due("22:00-07:00", at(now)) == at(then)


def test_quiet_hours_within_a_day_and_elsewhere() -> None:
    assert due("13:00-14:30", at("2026-03-01 14:00")) == at("2026-03-01 14:30")
    assert due("13:00-14:30", at("2026-03-01 15:00")) == at("2026-03-01 15:00")
    tokyo = at("2026-03-01 13:30", "Asia/Tokyo")
    assert due("13:00-14:30", tokyo) == tokyo, "it is early morning in Berlin"


def test_what_is_critical_does_not_wait() -> None:
    night = at("2026-03-02 03:00")
    assert due("22:00-07:00", night, urgent=True) == night


def test_steps_are_rounds_that_are_due_later_and_last_as_long_each() -> None:
    profile = Profile(
        steps=(EscalationStep(0, ("mail", "hook")), EscalationStep(10 * MINUTE, ("boss",))), lasts=HOUR
    )
    planned = profile.plan(5, urgent=True)
    assert [(one.recipient, one.round, one.due, one.expires) for one in planned] == [
        ("mail", 0, 5, 5 + HOUR),
        ("hook", 0, 5, 5 + HOUR),
        ("boss", 1, 5 + 10 * MINUTE, 5 + 10 * MINUTE + HOUR),
    ]


async def test_a_profile_is_kept_with_labels_and_its_addresses_stay_when_it_goes() -> None:
    ledger = MemoryLedger()
    profiles = Profiles(ledger)
    profile, secrets = await profiles.set(
        "home",
        ProfileDraft(
            send=("https://h.example.com/a", "https://h.example.com/a"), escalate=((600, "ntfy://topic"),)
        ),
    )
    (label,) = profile.steps[0].to
    assert list(secrets) == [label]
    assert profile.steps[1].after == 600 * SECOND
    other = Profiles(ledger)
    await other.refresh()
    assert other.get("home") == profile
    assert other.get("unknown") is None
    assert other.doubt(label) is DoubtPolicy.RESEND
    assert other.doubt("gone#1") is DoubtPolicy.STOP, "what is not known is not repeated"
    assert await profiles.remove("home")
    assert not await profiles.remove("home")
    address = profiles.address(label)
    assert address is not None
    assert address.secret == secrets[label]


async def test_the_default_stands_in_and_the_most_generous_limit_counts() -> None:
    profiles = Profiles(MemoryLedger())
    await profiles.set("default", ProfileDraft(send=("console:",), most=5))
    await profiles.set("busy", ProfileDraft(send=("console:",), most=0))
    assert profiles.get("anything") == profiles.get("default")
    (label,) = profiles.named("busy").steps[0].to
    assert profiles.recipient_policy(label).most == 0
    with pytest.raises(Malformed, match="no profile"):
        profiles.named("anything")


async def test_a_secret_of_ones_own_replaces_the_one_that_was_made() -> None:
    profiles = Profiles(MemoryLedger())
    own = "whsec_" + "QUJD" * 10
    await profiles.set("home", ProfileDraft(send=("https://h.example.com/a",)))
    profile, made = await profiles.set("home", ProfileDraft(send=("https://h.example.com/a",), secret=own))
    address = profiles.address(profile.steps[0].to[0])
    assert (made, address and address.secret) == ({}, own)
    with pytest.raises(Malformed):
        await profiles.set("home", ProfileDraft(send=("https://h.example.com/a",), secret="hunter2"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"quiet": "late"}, {"quiet": "25:00-07:00"}, {"zone": "Nowhere"}, {"lasts": 0}, {"most": -1},
        {"tries": -1}, {"together": -1}, {"steps": (EscalationStep(-1, ("x",)),)}, {"steps":
        (EscalationStep(0, ("x",)),) * 21},
    ],
)  # fmt: skip
def test_a_profile_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        Profile(**wrong)
