"""Alerts of a real Prometheus Alertmanager, and webhooks as it and Grafana send them: each is told once."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.identity.accounts import Role
from duly.transports.http import alertmanager as endpoint
from tests.apps.alerts.conftest import Tower
from tests.guard import GUARD
from tests.receivers import Receiver
from tests.servers import free_port, missing, wait_for_port
from tests.small_disk import small_disk

CONFIG = """
route: { receiver: duly, group_by: ['...'], group_wait: 1ms, group_interval: 100ms, repeat_interval: 100ms }
receivers:
  - name: duly
    webhook_configs:
      - url: URL/v1/alertmanager?profile=home
        http_config: { authorization: { type: Bearer, credentials: TOKEN } }
"""


class Alertmanager:
    """An Alertmanager that tells one hub of its alerts, and tells it again ten times a second."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("prometheus-alertmanager")
        if found is None:
            missing("prometheus-alertmanager")
        self._binary, self._folder, self._port = found, folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, url: str, token: str) -> None:
        config = self._folder / "config.yml"
        config.write_text(CONFIG.replace("URL", url).replace("TOKEN", token))
        with (self._folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    self._binary, f"--config.file={config}", f"--storage.path={self._folder}/data",
                    f"--web.listen-address=127.0.0.1:{self._port}", "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        wait_for_port(self._port, self.process, "alertmanager")

    async def report(self, name: str, *, over: bool = False, **labels: str) -> None:
        """Report an alert to it, as Prometheus does; or that it is over."""
        alert: dict[str, Any] = {"labels": {"alertname": name} | labels}
        if over:
            alert["endsAt"] = datetime.now(UTC).isoformat()
        url = f"http://127.0.0.1:{self._port}/api/v2/alerts"
        async with aiohttp.ClientSession() as http, http.post(url, json=[alert]) as said:
            assert said.status == 200, await said.text()

    async def webhooks(self, outcome: str = "requests_total") -> int:
        """How often it has tried to tell the hub; or how often in vain."""
        url = f"http://127.0.0.1:{self._port}/metrics"
        async with aiohttp.ClientSession() as http, http.get(url) as said:
            lines = (await said.text()).splitlines()
        name = f'alertmanager_notification_{outcome}{{integration="webhook"'
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))

    async def until(self, count: int, outcome: str = "requests_total") -> None:
        """Until it has tried, or failed, so often."""
        async with asyncio.timeout(GUARD):
            while await self.webhooks(outcome) < count:
                await asyncio.sleep(0.02)


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    it = Alertmanager(tmp_path)
    yield it
    if it.process is not None:
        it.process.kill()
        it.process.wait()


def webhook(*alerts: dict[str, Any]) -> bytes:
    return json.dumps({"version": "4", "status": "firing", "alerts": alerts}).encode()


def firing(fingerprint: str = "f1", ago: float = 0.0, **more: Any) -> dict[str, Any]:
    at = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=ago)
    alert = {
        "status": "firing",
        "startsAt": at.isoformat(),
        "labels": {"alertname": "DiskFull", "severity": "page", "instance": "db1"},
        "fingerprint": fingerprint,
    }
    return alert | more


async def send(
    tower: Tower,
    body: bytes,
    path: str = "/v1/alertmanager?profile=home",
    credentials: str = "",
    method: str = "POST",
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": credentials or f"Bearer {tower.tokens['gate']}"}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"{tower.url}{path}", data=body, headers=headers) as said,
    ):
        return said.status, await said.json()


# ── the real program ─────────────────────────────────────────────────────────────────────────────


async def test_what_alertmanager_repeats_is_told_once_and_its_end_once(
    tower: Tower, hook: Receiver, alertmanager: Alertmanager
) -> None:
    await tower.profile("home", hook.url)
    alertmanager.start(tower.url, tower.tokens["gate"])
    await alertmanager.report("DiskFull", severity="critical", instance="db1:9100")
    await hook.got(1)
    await alertmanager.until(3)
    assert not await alertmanager.webhooks("requests_failed_total")
    await alertmanager.report("DiskFull", over=True, severity="critical", instance="db1:9100")
    await hook.got(2)
    told = [json.loads(body) for _, body in hook.requests]
    assert [one["type"] for one in told] == ["alert.event", "alert.resolved"]
    assert [one["data"]["status"] for one in told] == ["open", "resolved"]
    first = told[0]["data"]
    assert (first["reason"], first["severity"], first["device"]) == ("DiskFull", "critical", "db1:9100")
    (alert,) = (await tower.do("alert.list"))["alerts"]
    assert (alert["sentinel"], alert["status"], alert["by"]) == ("gate", "resolved", "gate")


async def test_what_could_not_be_stored_is_sent_again_and_told(
    tmp_path: Path, hook: Receiver, alertmanager: Alertmanager
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        tower = Tower(disk / "hub", allow_private_webhooks=True)
        await tower.start()
        try:
            await tower.add(Role.SENTINEL, "gate")
            await tower.profile("home", hook.url)
            room = os.statvfs(disk)
            (disk / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize))
            alertmanager.start(tower.url, tower.tokens["gate"])
            await alertmanager.report("DiskFull")
            await alertmanager.until(1, "requests_failed_total")
            assert not hook.requests
            (disk / "ballast").unlink()
            await hook.got(1)
        finally:
            await tower.stop()
    assert len({headers["webhook-id"] for headers, _ in hook.requests}) == 1


# ── webhooks by hand ─────────────────────────────────────────────────────────────────────────────


async def test_a_webhook_says_what_became_of_its_alerts(tower: Tower) -> None:
    first, second = firing("f1"), firing("f2")
    assert await send(tower, webhook(first)) == (200, report(accepted=1))
    assert await send(tower, webhook(first, second)) == (200, report(accepted=1, repeated=1))
    over = first | {"status": "resolved"}
    never = firing("f3", status="resolved")
    assert await send(tower, webhook(over, never)) == (200, report(resolved=1, ignored=1))
    assert await send(tower, webhook(over, never)) == (200, report(repeated=1, ignored=1))
    standing = {one["event"][:2]: one["status"] for one in (await tower.do("alert.list"))["alerts"]}
    assert standing == {"f1": "resolved", "f2": "open"}


def report(**counts: int) -> dict[str, Any]:
    none: dict[str, Any] = dict.fromkeys(("accepted", "resolved", "repeated", "ignored"), 0)
    return none | counts | {"refused": []}


async def test_an_alert_that_fires_anew_is_another_one(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    before, now = firing(ago=60), firing()
    for count, alert in enumerate((before, before | {"status": "resolved"}, now), 1):
        await send(tower, webhook(alert))
        await hook.got(count)  # else what is over may be told as that, and its beginning not at all
    # The webhook of the first time comes late, and changes nothing.
    assert await send(tower, webhook(before)) == (200, report(repeated=1))
    standing = [one["status"] for one in (await tower.do("alert.list"))["alerts"]]
    assert standing == ["open", "resolved"]


async def test_two_alertmanagers_at_once_with_other_values_report_one_alert(tower: Tower) -> None:
    alert = firing()
    sent = [webhook(alert | {"annotations": {"value": str(n)}}) for n in range(20)]
    said = await asyncio.gather(*(send(tower, body) for body in sent))
    assert [status for status, _ in said] == [200] * 20
    assert sum(counts["accepted"] for _, counts in said) == 1
    assert len((await tower.do("alert.list"))["alerts"]) == 1


async def test_what_a_person_has_resolved_stays_so_while_it_fires(tower: Tower) -> None:
    alert = firing()
    await send(tower, webhook(alert))
    (shown,) = (await tower.do("alert.list"))["alerts"]
    await tower.do("alert.resolve", event=shown["event"])
    assert await send(tower, webhook(alert)) == (200, report(repeated=1))
    assert await send(tower, webhook(alert | {"status": "resolved"})) == (200, report(resolved=1))
    assert (await tower.show(shown["event"]))["by"] == "ann"


async def test_what_has_fired_for_months_is_told_when_it_first_comes(tower: Tower) -> None:
    old = firing(ago=200 * 86_400)
    assert await send(tower, webhook(old)) == (200, report(accepted=1))
    assert await send(tower, webhook(old)) == (200, report(repeated=1))
    (shown,) = (await tower.do("alert.list"))["alerts"]
    assert "startsAt" in shown["device_meta"]


async def test_a_token_may_come_as_the_password_of_basic_authentication(tower: Tower) -> None:
    def basic(password: str) -> str:
        return "Basic " + base64.b64encode(f"gate:{password}".encode()).decode()

    body = webhook(firing())
    assert (await send(tower, body, "/v1/grafana?profile=home", basic(tower.tokens["gate"])))[0] == 200
    for wrong in (basic("wrong"), basic(""), "Basic ?", "Basic /w==", "Basic ü", "Bearer wrong"):
        assert (await send(tower, body, credentials=wrong))[0] == 401
    status, said = await send(tower, body, credentials=f"Bearer {tower.tokens['phone']}")
    assert (status, said["error"]) == (403, "not_allowed")


async def test_grafana_may_send_by_put_and_its_values_are_kept(tower: Tower) -> None:
    alert = firing() | {"values": {"B": 44.2}, "valueString": "", "dashboardURL": "", "ruleUID": "r-1"}
    for counts in (report(accepted=1), report(repeated=1)):
        assert await send(tower, webhook(alert), "/v1/grafana?profile=home", method="PUT") == (200, counts)
    (shown,) = (await tower.do("alert.list"))["alerts"]
    assert shown["device_meta"]["values"] == {"B": 44.2}


async def test_what_will_never_be_taken_is_answered_with_the_reason(tower: Tower) -> None:
    good, lost = firing("f1"), firing("f2", labels={"duly_profile": "nowhere"})
    status, said = await send(tower, webhook(good, lost))
    assert (status, said["accepted"]) == (400, 1)
    ((word, detail),) = [(one["error"], one["detail"]) for one in said["refused"]]
    assert (word, "nowhere" in detail) == ("no_profile", True)
    status, said = await send(tower, b"{}")
    assert (status, said["error"]) == (400, "malformed")


async def test_a_webhook_of_many_alerts_leaves_turns_to_other_clients(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0
    seen: dict[str, Counter[int]] = {"read_alert": Counter(), "event_frame": Counter()}

    def counted(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            seen[name][turn] += 1
            return made(*args)

        return count

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    for name in seen:
        monkeypatch.setattr(endpoint, name, counted(name, getattr(endpoint, name)))
    task = asyncio.create_task(others())
    try:
        status, said = await send(tower, webhook(*(firing(f"f{n}") for n in range(1_000))))
    finally:
        task.cancel()
    assert (status, said["accepted"]) == (200, 1_000)
    for turns in seen.values():
        assert turns.total() == 1_000
        assert max(turns.values()) <= endpoint.TURN_ALERTS
