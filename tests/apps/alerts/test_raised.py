"""An alert that nobody was told of becomes critical: then somebody is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.apps.alerts.conftest import Tower, event
from tests.receivers import Receiver


def worse(id_: str = "u1") -> dict[str, Any]:
    return {"type": "alert_update", "seq_id": id_, "data": {"event": "event-1", "severity": "critical"}}


async def silence(tower: Tower, *, critical: bool) -> None:
    await tower.do("alert.silence", device="*", lasts="60", **({"critical": "1"} if critical else {}))


async def test_one_that_was_silenced(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, escalate=((600, hook.url + "/boss"),))
    await silence(tower, critical=False)
    await tower.post(event())
    assert (await tower.post(worse()))[1]["code"] == 0
    await hook.got(1)
    assert json.loads(hook.requests[0][1])["type"] == "alert.raised"
    rounds = {(one["round"], one["state"]) for one in (await tower.show("event-1"))["deliveries"]}
    assert (1, "accepted") in rounds, "the escalation begins, too"
    assert (await tower.post(worse("u2")))[1]["code"] == 0
    assert len((await tower.show("event-1"))["deliveries"]) == 2, "once"


async def test_one_that_is_silenced_on_purpose(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    await silence(tower, critical=True)
    await tower.post(event())
    await tower.post(worse())
    assert not (await tower.show("event-1"))["deliveries"]


@pytest.mark.parametrize("refuses", [False, True], ids=["its profile only lists", "every address refused it"])
async def test_one_that_could_not_be_told(tower: Tower, hook: Receiver, refuses: bool) -> None:
    if refuses:
        hook.words = ["400"]
        await tower.profile("home", hook.url)
    await tower.post(event())
    await tower.until_state("event-1", "failed" if refuses else "done")
    await tower.profile("default", hook.url + "/default")
    await tower.post(worse())
    await hook.got(3 if refuses else 1)
    assert {json.loads(body)["data"]["severity"] for _, body in hook.requests[-1:]} == {"critical"}


async def test_an_alert_without_recipients_is_recorded(tower: Tower) -> None:
    await tower.post(event())
    await tower.post(worse())
    assert [one.word for one in await tower.hub.ledger.refusals(10)] == ["untold"]
    assert tower.hub.alerts.state()["critical_untold"] == 1
