"""Each channel against a real other side: it says truly how an attempt went."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.apps.alerts.channels import check_url, declared, label_of, open_channel
from duly.apps.alerts.channels.channel import Channel, Notification
from duly.apps.alerts.channels.webhook import WebhookChannel, key_of, new_secret
from duly.core.fanout.plan import DoubtPolicy
from duly.core.units import SECOND
from duly.errors import Declined, InDoubt, Malformed, NotSent
from tests.receivers import Receiver, mail_server, receiver

NOTICE = Notification(
    "alert_1", "warning: smoke", "Reason: smoke", {"type": "alert.test", "data": {"n": 1}}, True
)


@pytest.fixture
async def hook() -> AsyncIterator[Receiver]:
    async with receiver() as it:
        yield it


async def send(url: str, *, private: bool = True, folder: Path | None = None) -> None:
    channel: Channel = open_channel(url, folder=folder, private=private)
    try:
        await channel.send(NOTICE)
    finally:
        await channel.close()


async def test_a_webhook_says_how_it_went(hook: Receiver) -> None:
    await send(hook.url)
    for word, error in (
        ("500", NotSent),
        ("429 7", NotSent),
        ("404", Declined),
        ("301", Declined),
        ("close", InDoubt),
    ):
        hook.words = [word]
        with pytest.raises(error) as raised:
            await send(hook.url)
        assert getattr(raised.value, "rest", 0) == (7 * SECOND if word == "429 7" else 0)
    with pytest.raises(NotSent):
        await send("http://127.0.0.1:9/nobody-listens")


async def test_a_name_that_leads_into_our_own_network_is_not_asked(hook: Receiver) -> None:
    """Judged by what it leads to when it is asked for, not by how it is spelled."""
    for host in ("localtest.duly.localhost", "localhost"):
        with pytest.raises(Malformed):
            check_url(f"http://{host}/x", private=False)
    with pytest.raises(Malformed):
        open_channel("http://127.0.0.1/x", private=False)
    await send(hook.url.replace("127.0.0.1", "localhost"), private=True)
    port = hook.url.rsplit(":", 1)[1]
    channel = open_channel("http://example.com/x", private=False)
    assert isinstance(channel, WebhookChannel)
    channel._url = f"http://localhost:{port}"
    with pytest.raises(Declined, match="private network"):
        await channel.send(NOTICE)
    await channel.close()
    assert len(hook.requests) == 1


async def test_an_apprise_service_is_told(hook: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    url = hook.url.replace("http://", "json://user:hunter2@")
    hook.words = ["204"]
    with caplog.at_level(logging.DEBUG):
        await send(url)
        assert json.loads(hook.requests[0][1])["message"] == "Reason: smoke"
        hook.words = ["500"]
        with pytest.raises(NotSent, match="did not accept it"):
            await send(url)
    assert "hunter2" not in caplog.text


async def test_mail_is_tried_from_the_command_line_too() -> None:
    async with mail_server() as box:
        await send(f"mailto://127.0.0.1:{box.port}?from=a@example.org&to=b@example.org&to=c@example.org")
        (mail,) = box.mails
        assert (mail["To"], mail["X-Priority"]) == ("b@example.org, c@example.org", "1")
    with pytest.raises(NotSent):
        await send(f"mailto://127.0.0.1:{box.port}?to=b@example.org")


async def test_a_file_gets_a_line_each(tmp_path: Path) -> None:
    for _ in range(2):
        await send("file:out", folder=tmp_path)
    out = tmp_path / "notifications" / "out"
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["alert_1"] * 2
    assert (out.stat().st_mode & 0o077, out.parent.stat().st_mode & 0o077) == (0, 0), "for the owner alone"
    with pytest.raises(NotSent, match="there is no data folder"):
        await send("file:out", folder=tmp_path / "nowhere")


async def test_a_file_that_is_shown_in_a_terminal_does_not_steer_it(tmp_path: Path) -> None:
    title = "a\u202eb\x1b[31m\x9b\u2028 \U000e0041 é 雪"
    channel = open_channel("file:out", folder=tmp_path, private=True)
    await channel.send(Notification("alert_1", title, "text", {"data": {title: title}}))
    text = (tmp_path / "notifications" / "out").read_text()
    assert not {"\u202e", "\x1b", "\x9b", "\u2028", "\U000e0041"} & set(text)
    assert "é 雪" in text
    assert json.loads(text)["title"] == title, "JSON means the same"


async def test_the_console_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    await send("console:")
    assert capsys.readouterr().out == "warning: smoke\nReason: smoke\n"


@pytest.mark.parametrize(
    "url",
    [
        "", "nothing", "https://", "http://[::1", "http://host:99999/", "mailto://host", "mailto://?to=a@b",
        "mailto://host?to=nobody", "nosuchservice://x", "mailto://host?to=a@b&doubt=maybe",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_one_is_refused_with_a_reason(url: str) -> None:
    with pytest.raises(Malformed) as raised:
        check_url(url)
    assert len(str(raised.value)) > 20


def test_what_doubt_means_is_declared_by_the_channel_or_the_address() -> None:
    assert declared("https://example.com/?doubt=stop") is DoubtPolicy.RESEND, "its query is the receiver's"
    assert declared("mailto://h?to=a@b") is DoubtPolicy.REPEAT
    assert declared("mailto://h?to=a@b&doubt=stop") is DoubtPolicy.STOP
    assert declared("ntfy://topic") is DoubtPolicy.REPEAT


def test_labels_tell_addresses_apart_and_hide_what_is_secret() -> None:
    one, other = label_of("tgram://123:token/chat"), label_of("tgram://123:other/chat")
    assert one != other
    assert one.startswith("tgram:apprise#")
    assert "token" not in one


def test_a_secret_is_made_or_checked() -> None:
    assert len(key_of(new_secret())) == 32
    for wrong in ("", "hunter2", "whsec_", "whsec_!!!", "whsec_AAAA"):
        with pytest.raises(Malformed):
            key_of(wrong)
