"""Messages on the dashboard: finding them, showing one with everything that happened to it, and acting on it.

The ledger has no index by recipient, state or kind, since every message would pay for it. Instead the
database searches messages from the newest on, several hundred thousand in the time that a page has. With a
larger ledger a page may be short or empty and still have a next one.

Acting on a message never changes its content. Resending sends a new message with the same content; cancelling
is possible until the message was handed over; settling an `unknown` one stores its result as a late answer
would, with the name of the person and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from duly.core.ids import time_of
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of
from duly.core.monitor.signals import CANCEL, EVENT, UPDATE
from duly.core.operations import Advance
from duly.core.units import FOREVER, MS
from duly.errors import Malformed, NotFound
from duly.runtime.timeline import TimelineStep, timeline_of
from duly.runtime.trail import Hop
from duly.server.dashboard.commands import SEES_ALL, PageCommands
from duly.server.dashboard.requests import text_of
from duly.server.dashboard.visitors import DashboardVisitor
from duly.storage.ledger import Record
from duly.storage.message_filter import OPEN_STATES, MessageFilter
from duly.transports.http import messages as http
from duly.transports.http.query_options import number
from duly.wire.fields import unpack

if TYPE_CHECKING:
    from duly.server.hub import Hub

SEARCH_SECONDS: Final = 0.15
"""A filtered page that has searched for this long does not start another stretch."""
STRETCH: Final = 50_000
"""How many messages the ledger searches per query."""
PAGE_LIMIT: Final = 200
BODY_SHOWN: Final = 4_000
"""Bytes of a message's data that are shown."""
CANCEL_SECONDS: Final = 3.0
REFUSALS_SHOWN: Final = 20
LAST_TIME: Final = (1 << 48) - 1

OF_CHAT: Final = frozenset(
    [
        "one_chat",
        "group_chat",
        "edit",
        "delete",
        "group_create",
        "group_invite",
        "group_join",
        "group_leave",
        "group_remove",
        "group_role",
        "friend_ask",
        "friend_accept",
        "friend_remove",
        "block",
        "unblock",
    ]
)
"""Kinds of messages between people: their content is theirs, and not shown."""
OF_ALERTS: Final = frozenset({EVENT, UPDATE, CANCEL})


def filter_of(query: Mapping[str, str]) -> MessageFilter:
    """Return the filter in a query; raises `Malformed` for what it cannot mean."""
    word = text_of(query, "state")
    if word in ("", "any"):
        states: frozenset[State] = frozenset()
    elif word == "open":
        states = OPEN_STATES
    elif word == "trouble":
        states = frozenset({State.FAILED, State.EXPIRED, State.UNKNOWN})
    else:
        states = frozenset(state for state in State if state.word == word)
        if not states:
            known = ", ".join(state.word for state in State)
            raise Malformed(f"{word!r} is not a state; use open, trouble, {known}")
    return MessageFilter(
        scope=text_of(query, "scope") or None,
        recipient=text_of(query, "to") or None,
        kind=text_of(query, "kind") or None,
        states=states,
        since=_time(query, "since") * MS,
        until=_time(query, "until") * MS or FOREVER,
    )


def _time(query: Mapping[str, str], name: str) -> int:
    text = text_of(query, name, 20)
    if not text:
        return 0
    if not text.isdecimal() or int(text) > LAST_TIME:
        raise Malformed(f"{name} is a time in milliseconds since 1970, not {text!r}")
    return int(text)


class RefusalRow(msgspec.Struct, frozen=True):
    """What was refused under the id of a message: when (ms), the word for it, and why."""

    at: int
    word: str
    reason: str


class MessageViews:
    """The messages of one hub, as the dashboard shows them and acts on them."""

    def __init__(self, hub: Hub, commands: PageCommands) -> None:
        self._hub = hub
        self._commands = commands

    # ── finding ──────────────────────────────────────────────────────────────────────────────────

    async def page(self, visitor: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return a page of messages, newest first, with a cursor to the next one."""
        limit = number(query.get("limit"), 50, PAGE_LIMIT)
        wanted = filter_of(query)
        id_ = text_of(query, "id").strip()
        if id_:
            found = [one for one in await self._hub.ledger.with_id(id_) if wanted.fits(one)]
            return {"messages": [_row(one) for one in found[:limit]], "next": None, "searched_to": None}
        reader, cursors = f"dashboard/{visitor.name}", self._hub.cursors
        cursor = text_of(query, "before", 1_000)
        place = cursors.decrypt(reader, cursor) if cursor else None
        if place is None and wanted.until < FOREVER:
            # The time in an id is its sender's and may be off, so messages accepted a little later are
            # included.
            place = min(wanted.until // MS + 600_000, LAST_TIME).to_bytes(6, "big")
        records, following = await self._search(wanted, place, limit)
        return {
            "messages": [_row(one) for one in records],
            "next": None if following is None else cursors.encrypt(reader, following),
            "searched_to": _time_in(following) if following is not None and len(records) < limit else None,
        }

    async def _search(
        self, wanted: MessageFilter, place: bytes | None, limit: int
    ) -> tuple[list[Record], bytes | None]:
        """Return matching messages, and where to continue; None if that was all."""
        found: list[Record] = []
        over = monotonic() + SEARCH_SECONDS
        while True:
            page = await self._hub.ledger.newest(
                wanted=wanted, before=place, limit=limit + 1 - len(found), look_at=STRETCH
            )
            found += page.records
            if len(found) > limit:
                return found[:limit], found[limit - 1].place
            place = page.next
            if place is None or monotonic() > over:
                return found, place

    # ── one of them ──────────────────────────────────────────────────────────────────────────────

    async def one(self, visitor: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return one message with its deliveries and everything that is known to have happened to it."""
        record = await self._record(text_of(query, "scope"), text_of(query, "id"))
        hub, key = self._hub, record.message.key
        deliveries = await hub.ledger.deliveries(key)
        hops, refusals = await self._trail(record), await self._refusals(record.message)
        chat = record.message.kind in OF_CHAT
        shown = http.show(record)
        if chat:
            shown.pop("ack", None)
        return shown | {
            "time": record.message.time // MS,
            "until": record.until // MS,
            "data": None if chat else _data(record.message),
            "private": chat,
            "deliveries": [http.show_delivery(one) for one in deliveries],
            "hops": hops,
            "refusals": refusals,
            "timeline": _timeline(record, hops, refusals),
            "line": None if not chat else await hub.trace_line(record, SEES_ALL),
            "may": self._may(record),
        }

    async def _trail(self, record: Record) -> list[Hop]:
        return await self._hub.hops(record, receipts_too=record.message.kind in OF_CHAT)

    async def _refusals(self, message: Message) -> list[RefusalRow]:
        found = await self._hub.ledger.refusals(REFUSALS_SHOWN, of=(message.scope, message.id))
        return [RefusalRow(one.at // MS, one.word, one.reason) for one in found]

    def _may(self, record: Record) -> dict[str, bool]:
        """Return what can be done with a message in its state."""
        command = record.message.kind not in OF_CHAT | OF_ALERTS and self._is_command(record.message)
        return {
            "resend": command and record.state.terminal,
            "cancel": command and record.state is State.ACCEPTED,
            "settle": record.state is State.UNKNOWN and record.message.kind not in OF_CHAT,
        }

    def _is_command(self, message: Message) -> bool:
        return message.recipient != message.scope and message.kind not in self._hub.gateway.policy.pushes

    async def _record(self, scope: str, id_: str) -> Record:
        if not scope or not id_:
            raise Malformed("name a message by its scope and its id")
        record = await self._hub.ledger.find(key_of(scope, id_))
        if record is None:
            raise NotFound(f"nothing is known of {scope}/{id_} (any more)")
        return record

    # ── acting ───────────────────────────────────────────────────────────────────────────────────

    async def resend(self, visitor: DashboardVisitor, wanted: dict[str, str]) -> dict[str, object]:
        """Send a command with the same content again, under the id that the page has minted."""
        record = await self._asked(wanted)
        if not self._may(record)["resend"]:
            raise Malformed("only a command that has ended can be sent again")
        body = unpack(record.message.body)
        return await self._commands.send(
            visitor, text_of(wanted, "new_id"), record.message.recipient, record.message.kind,
            body.data or Raw(b"null"), body.fields, queue=wanted.get("queue") == "yes",
        )  # fmt: skip

    async def cancel(self, visitor: DashboardVisitor, wanted: dict[str, str]) -> dict[str, object]:
        """Cancel a command that waits; one that was handed to its device cannot be called back."""
        record = await self._asked(wanted)
        why = f"cancelled by {visitor.name} on the dashboard"
        note = text_of(wanted, "why", 500)
        if not await self._hub.gateway.cancel(record.message, f"{why}: {note}" if note else why):
            raise Malformed(f"it is {record.state.word} and does not wait any more; it cannot be cancelled")
        ended = await self._hub.ledger.wait(record.message.key, CANCEL_SECONDS)
        if ended is None or ended.state is not State.CANCELLED:
            state = "gone" if ended is None else ended.state.word
            raise Malformed(f"it could not be cancelled any more: it is {state} now")
        return {"state": ended.state.word}

    async def settle(self, visitor: DashboardVisitor, wanted: dict[str, str]) -> dict[str, object]:
        """Settle a message whose outcome is unknown, as done or failed, with a reason."""
        record = await self._asked(wanted)
        why = text_of(wanted, "why", 500).strip()
        to = {"done": State.DONE, "failed": State.FAILED}.get(text_of(wanted, "as"))
        if to is None or not why:
            raise Malformed("say how it ended, done or failed, and why you know")
        # Checked first: an unknown message can only become what is asked for here, or be settled meanwhile.
        if record.state is not State.UNKNOWN:
            raise Malformed(f"it is {record.state.word}; only what is unknown can be settled")
        reason = f"settled by hand by {visitor.name}: {why}"
        ledger = self._hub.ledger
        answer = Answer(0 if to is State.DONE else 3, b"", reason)
        moved = await ledger.apply(Advance(record.message.key, to, ledger.clock.now(), answer))
        if not moved.moved:
            state = "forgotten" if moved.state is None else moved.state.word
            raise Malformed(f"it is {state}; only what is unknown can be settled")
        settled = await ledger.find(record.message.key)
        if settled is not None:
            self._hub.gateway.effects.tell_settled(settled)
        return {"state": to.word}

    async def _asked(self, wanted: dict[str, str]) -> Record:
        return await self._record(text_of(wanted, "scope"), text_of(wanted, "id"))


def _timeline(record: Record, hops: list[Hop], refusals: list[RefusalRow]) -> list[TimelineStep]:
    """Return the timeline of a message, the same as `duly trace` shows."""
    return timeline_of(
        record.state.word,
        made=(time_of(record.message.id) or 0) // MS,
        accepted_at=record.accepted_at // MS,
        moved_at=record.moved_at // MS,
        reason="" if record.answer is None else record.answer.reason,
        hops=hops,
        refusals=[(one.at, one.word, one.reason) for one in refusals],
    )


def _time_in(key: bytes) -> int:
    """Return the time that a key begins with, in milliseconds."""
    return int.from_bytes(key[:6], "big")


def _row(record: Record) -> dict[str, object]:
    message, answer = record.message, record.answer
    return {
        "scope": message.scope,
        "id": message.id,
        "type": message.kind,
        "to": message.recipient,
        "state": record.state.word,
        "accepted_at": record.accepted_at // MS,
        "moved_at": record.moved_at // MS,
        "code": None if answer is None else answer.code,
        "detail": "" if answer is None else answer.reason[:300],
    }


def _data(message: Message) -> object:
    """Return the data of a message and its own fields, as text; long ones are cut."""
    try:
        body = unpack(message.body)
        whole = {"data": body.data or Raw(b"null")} | dict(body.fields)
        text = msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = message.body.hex(" ")
    return text if len(text) <= BODY_SHOWN else f"{text[:BODY_SHOWN]} …"
