"""Files of `file:` channels: a name in one folder of the data folder, and nothing outside of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from duly.apps.alerts.channels import check_url, open_channel
from duly.apps.alerts.channels.channel import Notification
from duly.apps.alerts.profiles import ADDRESSES, ChannelAddress, ProfileDraft
from duly.core.operations import PutItem
from duly.errors import Declined, Malformed
from duly.identity.accounts import Role
from tests.local_hub import LocalHub

NOTICE = Notification("alert_1", "warning: smoke", "Reason: smoke", {"type": "alert.test"})


async def send(url: str, data: Path | None) -> None:
    channel = open_channel(url, data=data)
    await channel.send(NOTICE)
    await channel.close()


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub")
    await it.start()
    await it.add(Role.SENTINEL, "gate")
    await it.add(Role.ADMIN, "ann")
    yield it
    await it.stop()


async def ask(local: LocalHub, path: str, who: str, body: object) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {local.tokens[who]}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{local.url}{path}", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def alert_ended(local: LocalHub, event: str) -> str:
    """The reason with which the only delivery of this alert ended."""
    frame = {"type": "alert_event", "seq_id": event, "data": {"profile_id": "home", "trigger_reason": "fall"}}
    assert (await ask(local, "/v1/messages", "gate", frame))[0] == 202
    async with asyncio.timeout(30):
        while True:
            _, text = await ask(local, "/v1/admin/alert.show", "ann", {"event": event})
            if '"state":"done"' in text.replace(" ", "") or '"state":"failed"' in text.replace(" ", ""):
                return text
            await asyncio.sleep(0.02)


OUTSIDE_NAMES = [
    "/etc/cron.d/x", "//host/x", "///x", "../secret.key", "..", ".", "", "a/b", "./a", "a\\b", "a\x00b",
    "a\x1bb", "x" * 300, "é" * 150, "%2e%2e/x", "~/x", "a/../../x", "?doubt=resend",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE_NAMES)
async def test_a_file_is_a_name_in_one_folder_and_nothing_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(Malformed, match="file name without a folder, such as"):
        check_url(f"file:{name}")
    with pytest.raises(Malformed, match="file name without a folder"):
        await send(f"file:{name}", tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_is_a_link_or_a_pipe_is_not_written(tmp_path: Path) -> None:
    folder, keys = tmp_path / "notifications", tmp_path / "authorized_keys"
    folder.mkdir()
    (folder / "link").symlink_to(keys)
    (folder / "dangling").symlink_to(tmp_path / "fresh")
    os.mkfifo(folder / "pipe")
    keys.write_text("mine\n")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(Declined, match="is a link, or no ordinary file"):
            await send(f"file:{name}", tmp_path)
    assert (keys.read_text(), (tmp_path / "fresh").exists()) == ("mine\n", False)


async def test_the_folder_of_files_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "notifications").symlink_to(tmp_path / "elsewhere")
    await send("file:out", tmp_path)
    assert (tmp_path / "elsewhere" / "out").exists()


@pytest.mark.parametrize(
    "service",
    ["discord://1234567890123456789/{0}", "workflows://example.com/{0}/{0}", "tgram://123456789:{0}/1"],
)
def test_no_service_is_sent_a_file_of_the_hub(tmp_path: Path, service: str) -> None:
    (tmp_path / "hub.json").write_text('{"token": "dt_secret"}')
    url = service.format("a" * 64)
    check_url(url)
    for path in (f"{tmp_path}/hub.json", f"file://{tmp_path}/hub.json"):
        with pytest.raises(Malformed, match="may not be a file of the hub's machine"):
            check_url(f"{url}?template={path}")
        with pytest.raises(Malformed, match="may not be a file of the hub's machine"):
            open_channel(f"{url}?template={path}")


# ── on the wire ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["{outside}", "../outside", "../../outside"])
async def test_a_token_of_an_administrator_does_not_write_outside_of_the_folder(
    local: LocalHub, tmp_path: Path, name: str
) -> None:
    address = f"file:{name.format(outside=tmp_path / 'outside')}"
    for wanted in ({"send": [address]}, {"nobody": True, "escalate": [[1, address]]}):
        draft = json.dumps(wanted)
        status, said = await ask(local, "/v1/admin/profile.set", "ann", {"name": "home", "draft": draft})
        assert (status, "file:alerts.jsonl" in said) == (400, True), said
    assert local.hub.alerts.profiles.all() == {}


async def test_a_hub_starts_with_an_outside_file_of_an_older_version_and_declines_it(
    local: LocalHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles, outside = local.hub.alerts.profiles, tmp_path / "authorized_keys"
    profile, _ = await profiles.set("home", ProfileDraft(send=("file:told",)))
    ((label,),) = (step.to for step in profile.steps)
    old = profiles._encrypt(label, ChannelAddress(f"file:{outside}"))
    await local.hub.ledger.write(PutItem(ADDRESSES, label, old))
    await local.stop()
    await local.start()
    (line,) = (one.getMessage() for one in caplog.records if label in one.getMessage())
    assert line.startswith(f"profile home: nothing is written to {label}: a file: address is a file name")
    ended = await alert_ended(local, "event-1")
    assert "a file: address is a file name without a folder, such as file:alerts.jsonl" in ended
    assert not outside.exists()
    await set_profile(local, "file:fresh")
    assert '"state":"done"' in (await alert_ended(local, "event-2")).replace(" ", "")
    assert (local.folder / "notifications" / "fresh").exists()


async def set_profile(local: LocalHub, address: str) -> None:
    draft = json.dumps({"send": [address]})
    status, said = await ask(local, "/v1/admin/profile.set", "ann", {"name": "home", "draft": draft})
    assert status == 200, said
