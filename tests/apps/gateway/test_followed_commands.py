"""The commands whose apps are here and whose outcome happens at another hub."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

from duly.apps.gateway.followed_commands import FollowedCommands
from duly.apps.gateway.local_gateway import LocalGateway
from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import Admit, Advance
from duly.core.steps import Origin
from duly.core.units import DAY, MS
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Record
from duly.storage.memory import MemoryLedger

UNDER_WAY = Verdict(VerdictKind.DUPLICATE, State.SENT)


async def test_who_follows_what_was_told_to_others_as_unknown_is_told_as_well() -> None:
    """A hub that was slow said that the command was still under way, after it had told others its end."""
    ledger, told = MemoryLedger(), list[Origin]()
    now = ledger.clock.now()
    message = Message("phone", f"{now // MS}_0", "lock_control", "lock", b"{}")

    def tell_end(record: Record, origins: Iterable[Origin]) -> None:
        told.extend(origins)

    local = SimpleNamespace(sessions=SimpleNamespace(apps={"phone": ()}), tell_end=tell_end)
    followed = FollowedCommands(
        ledger, LocalNotifier("hub", LocalBus()), cast("LocalGateway", local), Supervisor()
    )
    await ledger.write(Admit(message, now + DAY, now), Advance(message.key, State.SENT, now))
    await ledger.write(Advance(message.key, State.UNKNOWN, now, Answer(4, b"", "silence")))
    for request in ("first", "second"):
        assert followed.follow(message, UNDER_WAY, cast("Origin", request))
        for _ in range(3):
            await followed.refresh()
    assert told == ["first", "second"]
