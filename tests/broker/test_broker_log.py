"""What is read from lines of the broker's log, also if a client has tried to write a line of its own."""

from __future__ import annotations

import pytest

from duly.broker.broker_log import ClientRefused, refused_client, unquoted

LINE = "[7] 2026/11/18 17:27:01.850569 [ERR] 127.0.0.1:46303 - mid:37 - "


@pytest.mark.parametrize(
    ("subject", "topic"),
    [
        ("nodes.mq2.pending", "nodes/mq2/pending"),
        ("/.lead", "/lead"),
        ("trail./", "trail/"),
        ("a./.b", "a//b"),
        ("a//b.c", "a.b/c"),
        (r"q.\"q\".z", 'q/"q"/z'),
        (r"esc.\x1b[31m", "esc/\x1b[31m"),
        ("ünï.中文", "ünï/中文"),
    ],
)
def test_the_topic_of_a_violation_is_the_one_that_was_sent(subject: str, topic: str) -> None:
    refused = refused_client(f'{LINE}"mq1" - Publish Violation - Subject "{subject}"')
    assert refused == ClientRefused(37, "publish", topic, "not_allowed", "")


def test_an_invalid_topic_filter_is_reported_once() -> None:
    first = refused_client(LINE + '"mq1" - invalid topic "a b": character not supported for MQTT topics')
    assert first is not None
    assert (first.act, first.topic, first.word) == ("subscribe", "a b", "malformed")
    assert refused_client(LINE + '"mq1" - Subscription Violation - Subject "", SID ') is None


@pytest.mark.parametrize(
    "text",
    [
        'authentication error - User "mq1"',
        "unable to connect: authentication error",
        "Unable to load session",
        "unacceptable protocol version of 5",
        "read error: unacceptable protocol version of 5",
        "read error: unable to connect: authentication error",
        "read error: maximum payload exceeded",
        'Problem registering with account "duly": connection closed',
    ],
)
def test_what_the_hub_has_judged_and_what_the_broker_cannot_do_is_no_refusal_of_a_packet(text: str) -> None:
    assert refused_client(LINE + '"mq1" - ' + text) is None


def test_what_cannot_be_read_over_websocket_is_reported_as_over_tcp() -> None:
    text = '"mq1" - received unexpected packet'
    assert refused_client(LINE + text.replace("- ", "- read error: ")) == refused_client(LINE + text)
    large = "maximum payload exceeded: 3000024 vs 1048576"
    assert refused_client(f'{LINE}"mq1" - {large}') == ClientRefused(
        37, "packet", "", "too_large", large + "; send it in parts"
    )


def test_a_client_cannot_write_a_line_by_its_client_id() -> None:
    forged = r'"mq1-\" - Publish Violation - Subject \"nodes.lock.pending" - topic cannot be empty'
    refused = refused_client(LINE + forged)
    assert refused == ClientRefused(37, "packet", "", "malformed", "topic cannot be empty")


def test_go_quotes_are_undone() -> None:
    assert unquoted(r"tab\tquote\"back\\slash\u2028\U0001f600") == 'tab\tquote"back\\slash\u2028\U0001f600'
