"""Reads what the embedded broker keeps: the sessions of offline clients, the tasks of devices, and retained
messages.

nats-server keeps them in streams, which the hub reads over its own connection (`duly.broker.callout`). The
law: a task is deleted one by one, so that those beside it stay; a session is only read here, and ended by
the broker itself, when a client connects under its id without a session.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from duly.broker.acl_dialects import DEVICES, NODES, subject_of, topic_of
from duly.core.units import SECOND
from duly.errors import BrokerError

NOT_FOUND: Final = 404
AT_ONCE: Final = 100
"""Sessions that are read at the same time."""

STORED: Final = {DEVICES: 1 << 30, NODES: 3 << 30}
"""Bytes of messages that wait for the clients of an account. When they are used up the broker takes no more
of that account, and outboxes wait: messages to nodes that never come leave devices their own room."""
COUNTED: Final = 2_000_000
"""The same for their number."""

_SESSIONS: Final = "$MQTT_sess"
_MESSAGES: Final = "$MQTT_msgs"
_STORED: Final = "$MQTT.msgs."
_RETAINED: Final = "$MQTT_rmsgs"
_RETAINED_STORED: Final = "$MQTT.rmsgs."

AskBroker: TypeAlias = Callable[[str, dict[str, object]], Awaitable[bytes]]
"""Asks the broker something under a subject, and returns the answer."""


class KeptSession(Struct, frozen=True):
    """A session that the broker keeps, and when it was last stored."""

    client_id: str
    stored_at: int


class KeptMessage(Struct, frozen=True):
    """A message that the broker keeps, since a client has not acknowledged it yet or it is retained."""

    number: int
    topic: str
    payload: bytes
    stored_at: int


class _StreamError(Struct):
    code: int = 0
    description: str = ""


class _StoredMessage(Struct):
    seq: int
    time: str
    subject: str = ""
    data: str = ""


class _MessageAnswer(Struct):
    message: _StoredMessage | None = None
    error: _StreamError | None = None


class _StreamState(Struct):
    subjects: dict[str, int] = {}


class _StreamAnswer(Struct):
    state: _StreamState | None = None
    config: dict[str, object] | None = None
    error: _StreamError | None = None


class _SessionText(Struct):
    id: str = ""


def imported(account: str) -> str:
    """Return the subject under which the hub reaches the streams of one of the broker's accounts."""
    return f"duly.{account}"


class BrokerStreams:
    """The streams of one broker."""

    def __init__(self, request: AskBroker) -> None:
        self._request = request

    async def limit(self, account: str) -> bool:
        """Limit how many messages wait for the clients of an account. Returns False if there is nothing to
        limit yet, since no client has connected."""
        body = await self._request(f"{imported(account)}.STREAM.INFO.{_MESSAGES}", {})
        answer = msgspec.json.decode(body, type=_StreamAnswer)
        _check(answer.error)
        if answer.config is None:
            return False
        limits = {"max_bytes": STORED[account], "max_msgs": COUNTED, "discard": "new"}
        if limits.items() <= answer.config.items():
            return True
        body = await self._request(f"{imported(account)}.STREAM.UPDATE.{_MESSAGES}", answer.config | limits)
        _check(msgspec.json.decode(body, type=_StreamAnswer).error)
        return True

    async def sessions(self, account: str) -> list[KeptSession]:
        """Return the sessions of an account of the broker."""
        wanted: dict[str, object] = {"subjects_filter": ">"}
        body = await self._request(f"{imported(account)}.STREAM.INFO.{_SESSIONS}", wanted)
        answer = msgspec.json.decode(body, type=_StreamAnswer)
        _check(answer.error)
        subjects = [] if answer.state is None else list(answer.state.subjects)
        found: list[KeptSession] = []
        for first in range(0, len(subjects), AT_ONCE):
            some = subjects[first : first + AT_ONCE]
            found += filter(None, await asyncio.gather(*(self._session(account, one) for one in some)))
        return found

    async def _session(self, account: str, subject: str) -> KeptSession | None:
        kept = await self._message(account, _SESSIONS, {"last_by_subj": subject})
        if kept is None:
            return None
        text = msgspec.json.decode(base64.b64decode(kept.data), type=_SessionText)
        return KeptSession(text.id, _time_of(kept.time))

    def tasks(self, account: str, topics: str) -> AsyncIterator[KeptMessage]:
        """Yield the messages on topics, such as `nodes/+/pending`, oldest first."""
        return self._messages(account, _MESSAGES, _STORED, topics, 0)

    def retained(self, account: str, topics: str, after: int) -> AsyncIterator[KeptMessage]:
        """Yield the retained messages of topics that were stored after the one with this number, oldest
        first."""
        return self._messages(account, _RETAINED, _RETAINED_STORED, topics, after)

    async def _messages(
        self, account: str, stream: str, prefix: str, topics: str, number: int
    ) -> AsyncIterator[KeptMessage]:
        subject = f"{prefix}{subject_of(topics)}"
        while True:
            wanted: dict[str, object] = {"seq": number + 1, "next_by_subj": subject}
            kept = await self._message(account, stream, wanted)
            if kept is None:
                return
            number = kept.seq
            topic = topic_of(kept.subject.removeprefix(prefix))
            yield KeptMessage(number, topic, base64.b64decode(kept.data), _time_of(kept.time))

    async def delete(self, account: str, task: KeptMessage) -> None:
        """Delete a message, so that no client gets it any more."""
        wanted: dict[str, object] = {"seq": task.number, "no_erase": True}
        await self._request(f"{imported(account)}.STREAM.MSG.DELETE.{_MESSAGES}", wanted)

    async def _message(self, account: str, stream: str, wanted: dict[str, object]) -> _StoredMessage | None:
        body = await self._request(f"{imported(account)}.STREAM.MSG.GET.{stream}", wanted)
        answer = msgspec.json.decode(body, type=_MessageAnswer)
        _check(answer.error)
        return answer.message


def _check(problem: _StreamError | None) -> None:
    """Raise if the broker could not answer; that there is no such stream or message (yet) is an answer."""
    if problem is not None and problem.code != NOT_FOUND:
        raise BrokerError(f"the broker cannot list what it stores: {problem.description}")


def _time_of(text: str) -> int:
    """Return a time as nats-server writes it, in microseconds.

    >>> _time_of("1970-01-01T00:00:01.5Z")
    1500000
    >>> _time_of("1970-01-01T00:00:01.000002999Z")
    1000002
    """
    whole, _, fraction = text.removesuffix("Z").partition(".")
    start = datetime.fromisoformat(f"{whole}+00:00")
    return int(start.timestamp()) * SECOND + int(fraction[:6].ljust(6, "0"))
