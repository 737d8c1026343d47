"""What one hub was told to keep quiet about, every hub keeps quiet about, from that moment on.

The law: the hubs here get no hints, so nothing of this rests on hints.
"""

from __future__ import annotations

import time
from pathlib import Path

from duly.apps.alerts.profiles import ProfileDraft
from duly.apps.alerts.silences import Silence
from duly.core.messages import key_of
from duly.identity.accounts import Role
from tests.end_to_end.many import LocalCluster
from tests.end_to_end.raw import Peer
from tests.servers import Postgres

ROUNDS = 10


async def report(sentinel: Peer, room: str) -> str:
    """Report an alert; its id, once it was accepted."""
    seq_id, now = sentinel.ids(), int(time.time() * 1000)
    data = {
        "profile_id": "home", "trigger_reason": "fall", "device_address": room, "session_id": "1",
        "timestamp": now, "severity": "warning",
    }  # fmt: skip
    await sentinel.say("alert_event", seq_id=seq_id, data=data)
    assert (await sentinel.hear_of(seq_id))["code"] == 0
    return seq_id


async def test_a_silence_holds_at_once_at_a_hub_where_alerts_keep_coming(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server)
    try:
        await cluster.start(2, hints=False)
        here, there = cluster.hubs
        cluster.tokens["watch"] = await here.accounts.add(Role.SENTINEL, "watch")
        await here.alerts.profiles.set("home", ProfileDraft(send=("console:",)))
        said = []
        async with cluster.join(1, "watch") as sentinel:
            for n in range(ROUNDS):
                await report(sentinel, f"room-{n}")
                await here.alerts.operations.silences.add(
                    Silence(until=here.ledger.clock.now() * 2, device=f"room-{n}")
                )
                record = await there.ledger.find(key_of("watch", await report(sentinel, f"room-{n}")))
                said.append(record.answer.reason if record and record.answer else "somebody is told")
        assert said == ["silenced; no recipient was told"] * ROUNDS
    finally:
        await cluster.stop()
