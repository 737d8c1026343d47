"""Files of `file:` channels: a name in one folder of the data folder, and nothing outside of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import apprise
import pytest

from duly.apps.alerts.channels import check_url, open_channel
from duly.apps.alerts.channels.apprise_services import AppriseChannel
from duly.apps.alerts.channels.channel import Notification
from duly.apps.alerts.profiles import ADDRESSES, ChannelAddress, ProfileDraft
from duly.core.operations import PutItem
from duly.errors import Declined, Malformed
from duly.identity.accounts import Role
from tests.guard import GUARD
from tests.local_hub import LocalHub

NOTICE = Notification("alert_1", "warning: smoke", "Reason: smoke", {"type": "alert.test"})


async def send(url: str, folder: Path | None) -> None:
    channel = open_channel(url, folder=folder)
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
    async with asyncio.timeout(GUARD):
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


@pytest.mark.parametrize(
    "url",
    [
        "fcm://project/device?mode=oauth2&keyfile={}",
        "vapid://ann@example.com/bob@example.com?keyfile={}",
        "vapid://ann@example.com/bob@example.com?subfile={}",
        "deltachat://ann:secret@example.com?pgp=sign&pgpprv={}",
        "deltachat://ann:secret@example.com?pgp=encrypt&pgppub={}",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ?template={}",
    ],
)
def test_no_argument_of_a_service_is_a_file_of_the_hub(tmp_path: Path, url: str) -> None:
    """Whatever the argument is called, and also where it is read only when something is sent."""
    (tmp_path / "key").write_text("secret")
    for path in (f"{tmp_path}/key", f"file://{tmp_path}/key", "~/.ssh/id_ed25519", "FILE:///etc/passwd"):
        for check in (check_url, open_channel):
            with pytest.raises(Malformed, match="may not be a file of the hub's machine"):
                check(url.format(quote(path, safe="")))
    check_url(url.format(quote("https://example.com/key", safe="")))
    assert apprise.AppriseAttachment(str(tmp_path / "key"))[0].path, "other users of Apprise open their files"


async def test_a_file_that_a_service_asks_for_while_it_sends_is_refused(tmp_path: Path) -> None:
    """The argument of a service that is not known to be a path."""
    (tmp_path / "key").write_text("secret")
    channel = open_channel("json://localhost")
    service: Any = cast("AppriseChannel", channel)._service

    def notify(**_: object) -> bool:
        return bool(apprise.AppriseAttachment(asset=service.asset).add(str(tmp_path / "key")))

    service.notify = notify
    with pytest.raises(Declined, match="may not be a file of the hub's machine"):
        await channel.send(NOTICE)


PATHS = {"keyfile", "subfile", "pgp_key", "pgp_privkey", "template"}
"""The arguments of services that are a path, or the name of a template at the service."""
OTHER_PATHS = {"path", "fullpath", "prefix", "workflow_path", "webhook_path", "file_url", "filename"}
"""Paths of addresses, and names that a service is told."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that services of Apprise load
def test_every_path_among_the_arguments_of_apprise_is_known() -> None:
    """A new one is looked at here: is it opened by Apprise's attachments, and before something is sent?"""
    found = set()
    for service in apprise.Apprise().details(show_disabled=True)["schemas"]:
        for part in ("args", "tokens"):
            for name, argument in service["details"][part].items():
                said = f"{name} {argument.get('name', '')}".lower()
                if any(word in said for word in ("file", "path", "pem", "cert")) and "profile" not in said:
                    found.add(argument.get("map_to", name))
    assert found - PATHS - OTHER_PATHS <= {"attach_as"}


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
