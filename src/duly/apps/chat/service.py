"""Chat lets people and groups talk, in conversations whose members all see the same lines in the same order.

The laws. The client mints the id; `server_ack` goes out after the line is stored, with its conversation and
its number, and a repeat gets the same. A line is one row, however many read it: readers have cursors. A
person sees no conversation they are not in, nor whether it exists. Typing and presence are told to those
who are connected, and kept nowhere.

What a frame means is here and in `groups` and `friends`; storing is `store`, telling is `subscriptions`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from duly.apps.chat import conversations as c
from duly.apps.chat import receipts
from duly.apps.chat.account_removal import remove_from_chat
from duly.apps.chat.conversations import NOT_YOURS, Precondition, Rank, Request
from duly.apps.chat.friends import FRIENDS, Friends
from duly.apps.chat.groups import GROUPS, Groups
from duly.apps.chat.remote_hubs import ChatRemote, ChatRemoteHubs, SingleHubChat
from duly.apps.chat.store import LineStore, RequestOrigin
from duly.apps.chat.subscriptions import AGAIN, Subscriber, Subscriptions
from duly.cluster.notifier import HintSender
from duly.core.lifecycle import State
from duly.core.messages import Word
from duly.core.operations import PutNewItem, RewriteEntry, Write
from duly.core.retry import RetryPolicy
from duly.core.steps import Arrived, Effect, Reply
from duly.core.units import MS
from duly.errors import Malformed, NotAllowed
from duly.identity.accounts import LEAVING, Accounts, Principal, Role
from duly.runtime.audit import AuditLog
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger
from duly.wire import frames, outgoing
from duly.wire.fields import NOTHING
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import (
    LineFrame,
    OutgoingFrame,
    PresenceFrame,
    ReceiptFrame,
    ServerAck,
    TypingFrame,
    WelcomeFrame,
    encode,
)
from duly.wire.session import Session

PAGE_LIMIT: Final = 200
"""Most lines on one page of history."""
PAGE_BYTES: Final = 192 * 1024
"""A page fits into a frame."""
RECEIPTS_LIMIT: Final = 50
"""In larger groups receipts are not told one by one: ask."""
BEGUN_KEPT: Final = 100_000

SAYING: Final = frozenset({"one_chat", "group_chat", "edit", "delete"})
ASKING: Final = frozenset({"history", "receipts", "conversations", "group_info", "friends"})
PASSING: Final = frozenset({"ack", "read", "typing", "presence"})


class ChatPolicy(Struct, frozen=True):
    """The settings of a chat."""

    friends_only: bool = False
    """only friends may talk to each other, or bring each other into groups"""
    again: RetryPolicy = AGAIN


class ConversationRequest(Struct, frozen=True):
    """The `data` of a frame about one line."""

    conv: str
    n: int


class EditRequest(Struct, frozen=True):
    """The `data` of an `edit`."""

    conv: str
    n: int
    data: Raw


class HistoryPage(Struct, frozen=True):
    """The `data` of a `history` frame."""

    conv: str
    before: int = c.ALL
    limit: int = 50


class ChatService:
    """One hub's chat, on one ledger."""

    name: Final = "chat"

    roles = frozenset({Role.USER})
    types = SAYING | ASKING | PASSING | GROUPS | FRIENDS

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        audit: AuditLog,
        policy: ChatPolicy | None = None,
        notifier: HintSender | None = None,
    ) -> None:
        self.policy = policy or ChatPolicy()
        self._ledger = ledger
        self._accounts = accounts
        self._audit = audit
        self.subscriptions = Subscriptions(
            ledger,
            self._moved,
            now=self._now,
            nudge=self._nudge,
            again=self.policy.again,
        )
        self.tasks = self.subscriptions.tasks
        self.engine = Engine(LineStore(self.subscriptions), ledger, self._perform)
        self._groups = Groups(ledger, self._may_add)
        self._friends = Friends(ledger, self._knows)
        self.remote: ChatRemote = (
            SingleHubChat()
            if notifier is None
            else ChatRemoteHubs(
                ledger,
                notifier,
                self.subscriptions,
                reached=self._tell_receipt,
                typed=self._tell_typing,
                present=self._tell_presence,
            )
        )
        self._begun: dict[str, None] = {}
        """pairs that have talked before: their conversation is in the buckets of both"""

    async def start(self) -> None:
        """Start the engine, and finish removals that a crash has cut off."""
        await self.engine.start()
        await self.remove_from_chat()

    def _now(self) -> int:
        return self.engine.now()

    def _nudge(self) -> None:
        self.engine.nudge()

    async def stop(self) -> None:
        """Stop storing, then telling."""
        await self.engine.stop()
        await self.subscriptions.close()

    # ── who is here ──────────────────────────────────────────────────────────────────────────────

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        """Welcome a person, and tell them what they missed. `cursors` in the welcome say after which line of
        each conversation that begins."""
        subscriber = self.subscriptions.enter(session, who)
        told = await self.subscriptions.load_subscriptions(subscriber, cursors)
        now = self._ledger.clock.now() // MS
        session.push(WelcomeFrame(who.name, now, told))
        self.subscriptions.begin(subscriber)
        await self._come_or_go(subscriber, online=True)

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Forget a session that has ended, and tell friends if it was the last."""
        subscriber = self.subscriptions.leave(session)
        if subscriber is not None:
            await self._come_or_go(subscriber, online=False)

    def dismiss(self, name: str, device: str = "") -> None:
        """Close the sessions of a person; with `device`, of that login only."""
        for subscriber in list(self.subscriptions.subscribers(name)):
            if device in ("", subscriber.who.device):
                subscriber.session.close("your token is no longer valid")

    async def _come_or_go(self, subscriber: Subscriber, *, online: bool) -> None:
        """Friends see each other come with the first device and go with the last."""
        name = subscriber.who.name
        friends = list(await self._ledger.bucket(c.friends(name)))
        if online:
            for friend in friends:
                if self.subscriptions.subscribers(friend):
                    subscriber.session.push(PresenceFrame(friend, c.ONLINE))
        if len(self.subscriptions.subscribers(name)) == int(online):
            self._present(name, friends, c.ONLINE if online else c.OFFLINE)

    def _present(self, name: str, friends: list[str], data: Raw) -> None:
        self.remote.presence(name, data)
        self._push_to(friends, PresenceFrame(name, data))

    async def _tell_presence(self, name: str, data: Raw) -> list[str]:
        """Tell friends who are here how a person is present; returns them."""
        friends = [
            one for one in await self._ledger.bucket(c.friends(name)) if self.subscriptions.subscribers(one)
        ]
        self._push_to(friends, PresenceFrame(name, data))
        return friends

    def _push_to(self, names: list[str], frame: OutgoingFrame) -> None:
        for name in names:
            for subscriber in self.subscriptions.subscribers(name):
                subscriber.pass_on(frame)

    # ── what they say ────────────────────────────────────────────────────────────────────────────

    async def receive(self, session: Session, who: Principal, frame: Frame) -> bool:
        """Take a frame of a person; whether it is answered."""
        type_, me = frame.type, who.name
        if type_ == "ack" and frame.conv is not None and frame.n is not None and frame.n >= 0:
            # Half of all frames: a subscriber may acknowledge what it was told.
            subscriber = self.subscriptions.subscriber(session)
            if subscriber is not None and self.subscriptions.acknowledge(subscriber, frame.conv, frame.n):
                return False
        if who.role is not Role.USER or not self._accounts.stands(who):
            raise NotAllowed(f"only people chat; {me} is not one (any more)")
        if type_ == "ack":
            await self._reached(session, who, frame, read=False)
            return False
        if type_ in PASSING:
            await self._pass_on(session, who, frame)
            return False
        if type_ in ASKING:
            await self._accounts.confirm(who)
            data = await self._ask(frame, me)
            session.push(ServerAck(frame.seq_id, _ACCEPTED, data=frames.raw(data)))
            return True
        if type_ == "one_chat":
            request = await self._one_chat(frame, me)
        elif type_ == "group_chat":
            request = self._group_chat(frame, me)
        elif type_ in GROUPS:
            request = await self._groups.request(frame, me)
        elif type_ in FRIENDS:
            request = await self._friends.request(frame, me)
        else:
            request = await (self._edit if type_ == "edit" else self._delete)(frame, me)
        proof = self._accounts.proof(who)
        if proof:
            needed = tuple(Precondition(one.bucket, one.name, one.body, refusal=c.REVOKED) for one in proof)
            request = replace(request, guards=(*needed, *request.guards))
        await self.engine.put(Arrived(request.message, RequestOrigin(session, request)))
        return True

    async def _one_chat(self, frame: Frame, me: str) -> Request:
        other = frame.to
        if not other:
            raise Malformed("a one_chat needs 'to': the person it is for")
        message = c.message_of(frame, me, other)
        if not await self._knows(other, me):
            raise NotAllowed(NOT_YOURS.reason)
        conv = c.direct(me, other)
        also: tuple[Write, ...] = ()
        if conv not in self._begun:
            also = tuple(PutNewItem(c.convs(name), conv, b"") for name in sorted({me, other}))
        return Request(message, conv, c.line_of(frame, me), self._may_talk(conv, me, other), also)

    def _may_talk(self, conv: str, me: str, other: str) -> tuple[Precondition, ...]:
        guards: tuple[Precondition, ...] = (Precondition(c.BARRED, conv, wanted=False),)
        if self.policy.friends_only and me != other:
            guards = (*guards, Precondition(c.friends(me), other))
        return guards

    def _group_chat(self, frame: Frame, me: str) -> Request:
        group = frame.to
        if not group or not c.is_group(group):
            raise Malformed("a group_chat needs 'to': the group it is for")
        guards = (Precondition(c.members(c.known_form(group)), me),)
        return Request(c.message_of(frame, me, group), group, c.line_of(frame, me), guards)

    async def _edit(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, EditRequest)
        line = await self._line(wanted.conv, wanted.n, me)
        if line.from_ != me:
            raise NotAllowed(NOT_YOURS.reason)
        new = c.line_of(line, me, wanted.data, edited=True)
        told = c.edit_line(frame, me, wanted.n, NOTHING)
        return Request(
            c.message_of(frame, me, wanted.conv),
            wanted.conv,
            told,
            self._may_write(wanted.conv, me),
            (RewriteEntry(c.stream(wanted.conv), wanted.n, encode(new)),),
            live=c.edit_line(frame, me, wanted.n, wanted.data),
        )

    async def _delete(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, ConversationRequest)
        line = await self._line(wanted.conv, wanted.n, me)
        guards = self._may_write(wanted.conv, me)
        if line.from_ != me:
            rank = await self._ledger.item(c.members(wanted.conv), me)
            if rank not in (Rank.OWNER.body, Rank.ADMIN.body):
                raise NotAllowed(NOT_YOURS.reason)
            guards = (Precondition(c.members(wanted.conv), me, rank),)
        erase = RewriteEntry(c.stream(wanted.conv), wanted.n, b"")
        return Request(
            c.message_of(frame, me, wanted.conv), wanted.conv, c.line_of(frame, me), guards, (erase,)
        )

    def _may_write(self, conv: str, me: str) -> tuple[Precondition, ...]:
        if c.is_group(conv):
            return (Precondition(c.members(conv), me),)
        one, other = c.pair_in(conv)
        return self._may_talk(conv, me, other if one == me else one)

    async def _line(self, conv: str, n: int, me: str) -> LineFrame:
        """A line of a conversation. One that `me` cannot see is refused as if it were not there."""
        begins = await self._begins(conv, me)
        found = await self._ledger.entries(c.stream(conv), n - 1, 1) if n >= max(begins, 1) else []
        if not found or found[0].n != n or not found[0].body:
            raise NotAllowed(NOT_YOURS.reason)
        line = c.read_line(found[0])
        if line.type not in c.LINES:
            raise NotAllowed(NOT_YOURS.reason)
        return line

    async def remove_from_chat(self) -> None:
        """Take people whose accounts were removed out of their conversations."""
        for name in await self._ledger.bucket(LEAVING):
            news = await remove_from_chat(self._ledger, name)
            for conv in news:
                self.subscriptions.refresh(conv)
            self.remote.said(tuple(news), ())

    # ── who may ──────────────────────────────────────────────────────────────────────────────────

    async def _knows(self, name: str, asker: str = "") -> bool:
        return await self._accounts.find_role(name, asker) is Role.USER

    async def _may_add(self, me: str, other: str) -> bool:
        if not await self._knows(other, me):
            return False
        if await self._ledger.item(c.BARRED, c.direct(me, other)) is not None:
            return False
        return not self.policy.friends_only or await self._ledger.item(c.friends(me), other) is not None

    async def _begins(self, conv: str, me: str) -> int:
        """The first line that a person may see of a conversation; raises if they are not in it."""
        c.known_form(conv)
        if c.is_group(conv):
            if await self._ledger.item(c.members(conv), me) is not None:
                return await self._ledger.cursor(c.stream(conv), c.begins_for(me))
        elif me in c.pair_in(conv) or conv == c.notes(me):
            return 0
        raise NotAllowed(NOT_YOURS.reason)

    # ── what passes ──────────────────────────────────────────────────────────────────────────────

    async def _pass_on(self, session: Session, who: Principal, frame: Frame) -> None:
        me = who.name
        if frame.type == "read":
            await self._reached(session, who, frame, read=True)
        elif frame.type == "presence":
            friends = list(await self._ledger.bucket(c.friends(me)))
            self._present(me, friends, frame.data or c.ONLINE)
        else:
            conv = frame.conv or ""
            subscriber = self.subscriptions.subscriber(session)
            if subscriber is None or conv not in subscriber.subscriptions:
                raise NotAllowed(NOT_YOURS.reason)
            typing = TypingFrame(me, conv, frame.data)
            self._tell_typing(typing)
            self.remote.typing(typing)

    def _tell_typing(self, typing: TypingFrame) -> None:
        for subscriber in self.subscriptions.here(typing.conv):
            if subscriber.who.name != typing.from_:
                subscriber.pass_on(typing)

    async def _reached(self, session: Session, who: Principal, frame: Frame, *, read: bool) -> None:
        conv, n = frame.conv, frame.n
        if conv is None or n is None or not 0 <= n < c.ALL:
            raise Malformed(f"a {frame.type} needs conv and n: how far you have come in which conversation")
        subscriber = self.subscriptions.subscriber(session)
        if subscriber is None or not self.subscriptions.acknowledge(subscriber, conv, n):
            # By HTTP, or from a person who is not in it.
            await self._begins(conv, who.name)
            self.subscriptions.move(conv, who.name, n)
        if read:
            self.subscriptions.move(conv, c.read_by(who.name), n)

    def _moved(self, conv: str, reader: str, n: int) -> None:
        """Tell the others that a reader has come further, once that is stored."""
        if "/" in reader:
            return
        self._tell_receipt(conv, reader, n)
        self.remote.read(conv, reader)

    def _tell_receipt(self, conv: str, reader: str, n: int) -> None:
        name = reader.removeprefix("r:")
        subscribers = self.subscriptions.here(conv)
        if conv.startswith("~") or len(subscribers) > RECEIPTS_LIMIT:
            return
        receipt = ReceiptFrame(name, conv, n, {"state": "read" if reader != name else "delivered"})
        for subscriber in subscribers:
            if subscriber.who.name != name or reader != name:  # one's own other devices know what was read
                subscriber.pass_on(receipt)

    # ── what is asked ────────────────────────────────────────────────────────────────────────────

    async def _ask(self, frame: Frame, me: str) -> bytes:
        match frame.type:
            case "history":
                return await self._history(frame, me)
            case "receipts":
                return msgspec.json.encode(await self._receipts(frame, me))
            case "conversations":
                return msgspec.json.encode(await self._conversations(me))
            case "group_info":
                return msgspec.json.encode(await self._groups.show(frame, me))
            case _:
                return msgspec.json.encode(await self._friends.of(me))

    async def _history(self, frame: Frame, me: str) -> bytes:
        """A page of lines before a number, oldest first; `first` is the first one they may see."""
        wanted = c.read_data(frame, HistoryPage)
        if not 1 <= wanted.limit <= PAGE_LIMIT or wanted.before < 1:
            raise Malformed(f"a page has 1 to {PAGE_LIMIT} lines, before a number from 1")
        stream = c.stream(c.known_form(wanted.conv))
        extent = await self._ledger.extent(stream)
        before = min(wanted.before, extent.last + 1)
        page = await self._ledger.entries(stream, max(0, before - 1 - wanted.limit), wanted.limit)
        # Asked after reading: who was removed meanwhile sees nothing.
        first = max(await self._begins(wanted.conv, me), 1)
        page = [entry for entry in page if first <= entry.n < before]
        lines = await self.subscriptions.show(wanted.conv, page, self._ledger.clock.now())
        shown = [encode(line) for line in lines]
        size = 0
        for i, line in enumerate(reversed(shown)):
            size += len(line) + 1
            if size > PAGE_BYTES and i:
                del shown[: len(shown) - i]
                break
        return msgspec.json.encode(
            {"first": first, "last": extent.last, "lines": [Raw(line) for line in shown]}
        )

    async def _receipts(self, frame: Frame, me: str) -> dict[str, Any]:
        """How far a line has come: delivered to k of n, read by m of n."""
        wanted = c.read_data(frame, ConversationRequest)
        begins = await self._begins(wanted.conv, me)
        found = await self._ledger.entries(c.stream(wanted.conv), wanted.n - 1, 1) if wanted.n >= 1 else []
        if not found or found[0].n != wanted.n or wanted.n < begins:
            raise NotAllowed(NOT_YOURS.reason)
        others = await receipts.recipients(self._ledger, wanted.conv, found[0])
        read = [one.name for one in others if one.state == "read"]
        have = [one.name for one in others if one.state in ("delivered", "read")]
        attempts = [one.attempts for one in others]
        shown: dict[str, Any] = {
            "conv": wanted.conv, "n": wanted.n, "state": "accepted", "of": len(others),
            "delivered": len(have), "read": len(read),
            # Who is here is known better than what the ledger has heard of them.
            "attempts": max(self.subscriptions.attempts(wanted.conv, wanted.n), *attempts, 0),
        }  # fmt: skip
        if others and len(have) == len(others):
            shown["state"] = "read" if len(read) == len(others) else "delivered"
        if len(others) <= RECEIPTS_LIMIT:
            shown |= {"delivered_to": have, "read_by": read}
        return shown

    async def _conversations(self, me: str) -> dict[str, Any]:
        """The conversations of a person: how many lines each has, how far they have read, and how many lines
        of others are new to them."""
        known = list(await self._ledger.bucket(c.convs(me)))
        found = await self._ledger.standing(
            [(c.stream(conv), reader) for conv in known for reader in (me, c.read_by(me))]
        )
        shown = []
        for conv, have, read in zip(known, found[::2], found[1::2], strict=True):
            name = await self._groups.name_of(conv) if c.is_group(conv) else ""
            shown.append(
                {"conv": conv, "last": have.last, "delivered": have.cursor or 0, "read": read.cursor or 0}
                | {"unread": await receipts.unread(self._ledger, conv, me, read.cursor or 0, have.last)}
                | ({"name": name} if name else {"with": _other(conv, me)})
            )
        return {"conversations": shown}

    # ── effects ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        assert isinstance(effect, Reply)
        asked, message, verdict = effect.origin, effect.message, effect.verdict
        assert isinstance(asked, RequestOrigin)
        request = asked.request
        if verdict.answer is None:
            asked.session.push(outgoing.server_ack(message.id, verdict))
            return
        n = int(verdict.answer.data)
        asked.session.push(_ack(message.id, request, n, repeated=verdict.word is not Word.FRESH))
        if verdict.word is not Word.FRESH:
            return
        conv = request.conv
        if self._audit.watchers:
            self._audit.see(
                "line", scope=message.scope, id=message.id, kind=message.kind, to=message.recipient, n=n
            )
        if message.kind == "one_chat" and len(self._begun) < BEGUN_KEPT:
            self._begun[conv] = None
        for name in request.joins:
            self.subscriptions.join(name, conv, n - 1)
        at = self._ledger.clock.now()
        self.subscriptions.tell(conv, n, c.show(conv, n, request.live or request.line, at), asked.session, at)
        for name in request.parts:
            self.subscriptions.part(name, conv)
        begun = c.pair_in(conv) if n == 1 else ()
        self.remote.said((conv, *request.news), (*request.joins, *begun))
        for other in request.news:
            self.subscriptions.refresh(other)


_ACCEPTED: Final = int(ServerCode.ACCEPTED)
_DUPLICATE: Final = int(ServerCode.DUPLICATE)
_DONE: Final = State.DONE.word


def _ack(seq_id: str, request: Request, n: int, *, repeated: bool) -> ServerAck:
    """It is stored, now or before: where."""
    return ServerAck(
        seq_id,
        code=_DUPLICATE if repeated else _ACCEPTED,
        state=_DONE if repeated else None,
        conv=request.conv if request.shown else None,
        n=n if request.shown else None,
        data=frames.raw(request.data),
    )


def _other(conv: str, me: str) -> str:
    one, other = c.pair_in(conv)
    return other if one == me else one
