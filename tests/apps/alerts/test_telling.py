"""Those who are told, as bad as they come: a webhook receiver and a mail server on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from tests.apps.alerts.conftest import Tower, event
from tests.receivers import Mailbox, Receiver, receiver
from tests.stopwatch import Stopwatch


def mail_to(box: Mailbox, more: str = "") -> str:
    return f"mailto://127.0.0.1:{box.port}?from=tower@example.org&to=ops@example.org{more}"


# ── bad receivers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "words", [["500"], ["close"], ["close after"], ["503", "close after", "500", "close"]]
)
async def test_a_bad_webhook_receiver_gets_each_event_once(
    tower: Tower, hook: Receiver, words: list[str]
) -> None:
    await tower.profile("home", hook.url)
    hook.words = list(words)
    await tower.post(event())
    await tower.until_state("event-1", "done")
    assert len(hook.requests) == len(words) + 1
    assert len({headers["webhook-id"] for headers, _ in hook.requests}) == 1, "the same key in every attempt"
    assert hook.events == ["event-1"]


@pytest.mark.parametrize("field", ["device_meta", "location", "summary", "timestamp", "offset_ms"])
@pytest.mark.parametrize("number", ["1e400", "9" * 400, "9" * 5_000])
async def test_an_alert_is_told_whatever_number_is_in_it(
    tower: Tower, hook: Receiver, field: str, number: str
) -> None:
    """As JSON for programs, and as text for people. The receiver is a program that fails by long integers."""
    long = len(number) > 4_000
    await tower.profile("home", *([] if long else [hook.url]), "console:")
    value = number if field in ("timestamp", "offset_ms") else f'{{"speed":{number}}}'
    sent = event(severity="critical")
    sent["data"].pop(field, None)
    text = json.dumps(sent).replace('"data": {', f'"data": {{"{field}": {value}, ')
    status, said = await tower.post(text.encode())
    assert (status, said["code"]) == (202, 0)
    await tower.until_state("event-1", "done")
    assert len(hook.requests) == (not long)
    assert (await tower.show("event-1"))["deliveries"][0]["attempts"] == 1


async def test_an_outage_of_a_channel_is_two_lines_in_the_log(
    tower: Tower, hook: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    await tower.profile("home", hook.url)
    hook.words = ["500", "503", "close"]
    await tower.post(event())
    await tower.until_state("event-1", "done")
    said = [record.getMessage() for record in caplog.records if record.name == "duly.outage"]
    assert len(said) == 2
    begun, ended = (line.removeprefix("the channel to http:127.0.0.1:") for line in said)
    assert "does not work: " in begun
    assert "works again, after " in ended


async def test_mail_servers_that_hang_delay_no_other_recipient(tower: Tower, hook: Receiver) -> None:
    """The name of the webhook has to be looked up, which takes a thread, too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        mails = [f"mailto://127.0.0.1:{port}?to=ops{n}@example.org" for n in range(40)]
        await tower.profile("mails", *mails)
        await tower.profile("home", hook.url.replace("127.0.0.1", "localhost"))
        await tower.post(event("for-mails", profile_id="mails"))
        connection, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
        with connection:
            watch = Stopwatch()
            await tower.post(event())
            await hook.got(1)
            assert watch.seconds < 5, "a step of SMTP times out after 15"


async def test_a_receiver_that_hangs_is_given_up_and_asked_again_with_the_same_key(
    tower: Tower, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.apps.alerts.channels.webhook.SECONDS", 0.2)
    await tower.profile("home", hook.url)
    hook.words = ["hang"]
    await tower.post(event())
    shown = await tower.until_state("event-1", "done")
    assert shown["deliveries"][0]["attempts"] == 2
    assert hook.events == ["event-1"]


async def test_retry_after_is_respected(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    hook.words = ["429 1"]
    began = time.monotonic()
    await tower.post(event())
    await hook.got(2)
    assert time.monotonic() - began >= 0.95


@pytest.mark.parametrize("status", ["400", "401", "404", "410", "302"])
async def test_what_a_receiver_will_never_take_is_a_dead_letter_that_can_be_sent_elsewhere(
    tower: Tower, hook: Receiver, status: str
) -> None:
    await tower.profile("home", hook.url)
    hook.words = [status]
    await tower.post(event())
    await tower.until_state("event-1", "failed")
    (dead,) = (await tower.do("deliveries.list", state="dead"))["deliveries"]
    assert status in dead["error"]
    await tower.do("deliveries.edit", event="event-1", recipient=dead["recipient"], url=hook.url + "/other")
    await hook.got(2)
    await tower.until(lambda: hook.events == ["event-1"])


async def test_a_receiver_that_is_down_gets_it_when_it_is_back(tower: Tower) -> None:
    async with receiver() as gone:
        url = gone.url
    await tower.profile("home", url)
    await tower.post(event())
    await tower.until(lambda: tower.hub.alerts._fanout.counts.attempts >= 2)
    (waiting,) = (await tower.do("deliveries.list", state="open"))["deliveries"]
    assert waiting["error"] == "it cannot be reached"


# ── mail ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "mails", "state"),
    [
        ([], 1, "done"),
        (["450"], 1, "done"),
        (["450", "451"], 1, "done"),
        (["550"], 0, "failed"),
        (["550 rcpt"], 0, "failed"),
        (["close"], 1, "done"),
        (["close after"], 2, "done"),
        (["close after", "close after"], 2, "unknown"),
    ],
)
async def test_a_bad_mail_server_brings_at_most_one_repeat_and_it_is_marked(
    tower: Tower, box: Mailbox, words: list[str], mails: int, state: str
) -> None:
    await tower.profile("home", mail_to(box))
    box.words = list(words)
    await tower.post(event())
    await tower.until_state("event-1", state)
    assert len(box.mails) == mails
    assert len({mail["Message-ID"] for mail in box.mails}) <= 1
    for mail in box.mails[1:]:
        assert mail["Subject"].startswith("Repeat? ")
        assert "may be a repeat" in mail.get_payload()


async def test_a_mail_server_that_hangs_is_given_up_and_brings_at_most_one_repeat(
    tower: Tower, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.apps.alerts.channels.mail.SECONDS", 1.0)
    await tower.profile("home", mail_to(box))
    box.words = ["hang"]
    await tower.post(event())
    await tower.until_state("event-1", "done")
    (mail,) = box.mails
    assert mail["Subject"].startswith("Repeat? "), "nobody can tell what became of the first"
    assert box.attempts == 2
    box.words = ["hang", "hang"]
    await tower.post(event("event-2"))
    await tower.until_state("event-2", "unknown")
    assert len(box.mails) == 1


async def test_a_mail_address_can_declare_that_doubt_means_stop(tower: Tower, box: Mailbox) -> None:
    await tower.profile("home", mail_to(box, "&doubt=stop"))
    box.words = ["close after"]
    await tower.post(event())
    shown = await tower.until_state("event-1", "unknown")
    assert len(box.mails) == 1
    assert shown["deliveries"][0]["error"].startswith("in doubt")


async def test_mail_that_looks_like_smtp_arrives_whole(tower: Tower, box: Mailbox) -> None:
    await tower.profile("home", mail_to(box))
    await tower.post(event(trigger_reason="line\r\n.\r\nBcc: all@example.org", device_address="Tür"))
    await tower.until_state("event-1", "done")
    (mail,) = box.mails
    assert mail["Bcc"] is None
    text = mail.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert "Tür" in text.decode()
    assert "Event: event-1" in text.decode()
