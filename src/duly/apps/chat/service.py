"""The chat service: conversations of people and groups, whose members all see the same lines in the same
order.

The laws. The client creates the id; `server_ack` is sent after the line is stored, with its conversation and
its number, and a repeat gets the same answer. A line is one row, however many people read it: readers have
cursors. A person cannot see a conversation they are not in, nor whether it exists. Typing and presence are
sent to connected people and not stored.

`line_requests`, `groups`, `friends` and `queries` define what a frame means; `line_store` stores lines,
`subscriptions` sends them, and `broadcast` sends what is not stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from msgspec import Raw, Struct
from msgspec.structs import replace

from duly.apps.chat import conversations as c
from duly.apps.chat.account_removal import remove_from_chat
from duly.apps.chat.broadcast import Broadcast
from duly.apps.chat.connections import Connections, Subscriber
from duly.apps.chat.conversations import NOT_YOURS, Precondition, Request
from duly.apps.chat.friends import FRIENDS, Friends
from duly.apps.chat.groups import GROUPS, Groups
from duly.apps.chat.line_requests import LINES, LineRequests
from duly.apps.chat.line_store import LineStore, RequestOrigin
from duly.apps.chat.permissions import ChatPermissions
from duly.apps.chat.queries import QUERIES, ChatQueries
from duly.apps.chat.reader_cursors import ReaderCursors
from duly.apps.chat.receipts import note_receipts
from duly.apps.chat.remote_hubs import ChatRemote, ChatRemoteHubs, SingleHubChat
from duly.apps.chat.subscriptions import AGAIN, Subscriptions
from duly.cluster.notifier import HintSender
from duly.core.account_limits import AccountLimits, CountedBytes
from duly.core.lifecycle import State
from duly.core.messages import VerdictKind
from duly.core.retry import RetryPolicy
from duly.core.steps import Arrived, MachineEffect, Reply
from duly.core.units import MS
from duly.errors import Malformed, NotAllowed, Overloaded, RateLimited, SenderError
from duly.identity.accounts import LEAVING, Accounts, Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import Engine, no_effect
from duly.runtime.limited_repeats import LimitedRepeats
from duly.runtime.tasks import Supervisor
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger
from duly.wire import frames, outgoing
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import PresenceFrame, ServerAck, TypingFrame, WelcomeFrame
from duly.wire.session import Session

PASSING: Final = frozenset({"ack", "read", "typing", "presence"})
UNLIMITED: Final = frozenset({"ack", "read"})
"""The types that are not counted against the limit of an account, because they finish work."""


class ChatPolicy(Struct, frozen=True):
    """The settings of a chat."""

    friends_only: bool = False
    """only friends may talk to each other, or bring each other into groups"""
    again: RetryPolicy = AGAIN


class ChatService:
    """One hub's chat, on one ledger."""

    name: Final = "chat"

    roles = frozenset({Role.USER})
    types = LINES | QUERIES | PASSING | GROUPS | FRIENDS
    prompt: Final[frozenset[str]] = frozenset()
    open: Final = False

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        activity: ActivityLog,
        policy: ChatPolicy | None = None,
        notifier: HintSender | None = None,
        trail: Trail | None = None,
        limits: AccountLimits | None = None,
    ) -> None:
        self.policy = policy or ChatPolicy()
        limits = limits or AccountLimits()
        self._limit, self._new_groups = limits.lines, limits.groups
        self._counted = CountedBytes(self._limit)
        self._repeats = LimitedRepeats(ledger)
        self._ledger = ledger
        self._accounts = accounts
        self._activity = activity
        self._trail = Trail(ledger) if trail is None else trail
        self.tasks = Supervisor()
        self.connections = Connections()
        self._cursors = ReaderCursors(self._moved, self._nudge)
        self.subscriptions = Subscriptions(
            ledger,
            self.connections,
            self._cursors,
            self.tasks,
            now=self._now,
            nudge=self._nudge,
            again=self.policy.again,
            trail=self._trail,
        )
        self.engine = Engine(
            LineStore(self.subscriptions, self._cursors),
            ledger,
            no_effect,
            performers={Reply: self._reply, MachineEffect: self._cursors.perform},
        )
        self._broadcast = Broadcast(ledger, self.connections)
        self._permissions = ChatPermissions(ledger, accounts, friends_only=self.policy.friends_only)
        self._lines = LineRequests(ledger, self._permissions)
        self._groups = Groups(ledger, self._permissions.may_add)
        self._friends = Friends(ledger, self._permissions.knows)
        self._queries = ChatQueries(ledger, self._permissions, self.connections, self._groups, self._friends)
        self.remote: ChatRemote = (
            SingleHubChat()
            if notifier is None
            else ChatRemoteHubs(
                ledger,
                notifier,
                self.connections,
                self.subscriptions,
                self.tasks,
                reached=self._broadcast.receipts,
                typed=self._broadcast.typing,
                present=self._broadcast.presence,
            )
        )

    async def start(self) -> None:
        """Start the engine, and finish removals that a crash has interrupted."""
        await self.engine.start()
        await self.remove_from_chat()

    def _now(self) -> int:
        return self.engine.now()

    def _nudge(self) -> None:
        self.engine.nudge()

    async def stop(self) -> None:
        """Stop storing, then sending; acknowledgements are stored before."""
        self._cursors.stop()
        await self.engine.stop()
        await self.tasks.finish()
        await self.tasks.stop()

    def kill(self) -> None:
        """Cancel the jobs, as a crash would."""
        self.tasks.kill()

    # ── who is here ──────────────────────────────────────────────────────────────────────────────

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        """Welcome a person, and send what they missed. `cursors` in the welcome contains the line of each
        conversation after which that begins."""
        subscriber = self.connections.add(session, who)
        told = await self.subscriptions.load_subscriptions(subscriber, cursors)
        now = self._ledger.clock.now() // MS
        session.push(WelcomeFrame(who.name, now, told))
        self.subscriptions.begin(subscriber)
        await self._come_or_go(subscriber, online=True)

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Forget a session that has ended, and tell friends if it was the person's last."""
        subscriber = self.subscriptions.end(session)
        if subscriber is not None:
            await self._come_or_go(subscriber, online=False)

    def refused(self, who: Principal, seq_id: str) -> None:
        """Do nothing: no line waits for the numbers before its own."""

    def dismiss(self, name: str, device: str = "") -> None:
        """Close the sessions of a person; with `device`, only those of that login."""
        for subscriber in list(self.connections.of_person(name)):
            if device in ("", subscriber.who.device):
                subscriber.session.close("your token is no longer valid")

    async def _come_or_go(self, subscriber: Subscriber, *, online: bool) -> None:
        """Tell friends when a person's first device connects or their last one disconnects."""
        name = subscriber.who.name
        friends = list(await self._ledger.bucket(c.friends(name)))
        if online:
            for friend in friends:
                if self.connections.of_person(friend):
                    subscriber.session.push(PresenceFrame(friend, c.ONLINE))
        if len(self.connections.of_person(name)) == int(online):
            self._present(name, friends, c.ONLINE if online else c.OFFLINE)

    def _present(self, name: str, friends: list[str], data: Raw) -> None:
        self.remote.presence(name, data)
        self._broadcast.presence_to(friends, name, data)

    # ── what they say ────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Handle a frame of a person; return whether it is answered. Most are handled at once:
        acknowledgements, and new lines if their recipient is in memory and the engine has room."""
        if frame.type == "ack" and frame.conv is not None and frame.n is not None and frame.n >= 0:
            # Half of all frames: a subscriber acknowledges lines.
            subscriber = self.connections.of_session(session)
            if subscriber is not None and self.subscriptions.acknowledge(subscriber, frame.conv, frame.n):
                return False
        if who.role is not Role.USER or not self._accounts.is_current(who):
            raise NotAllowed(f"only people can chat; {who.name} is not the account of a person (any more)")
        counted = frame.type not in UNLIMITED
        if counted:
            c.check_size(frame)  # before it is counted: what is refused uses up no allowance
            refusal = self._limit.excess(who.name, len(frame.data), self._ledger.clock.now())
            if refusal is not None:
                return self._take_repeat(session, who, frame, refusal)
        try:
            request = self._lines.request_at_once(frame, who.name)
        except SenderError:
            if counted:
                self._limit.give_back(who.name, len(frame.data))
            raise
        if request is None:
            later = self._receive_counted if counted else self._receive_later
            return later(session, who, frame)
        if counted:
            self._counted.begin(request.message.key, len(frame.data))
        event = self._event(session, who, request)
        try:
            self.engine.offer(event)
        except Overloaded:
            return self._put(event)
        return True

    async def _take_repeat(
        self, session: Session, who: Principal, frame: Frame, refusal: RateLimited
    ) -> bool:
        """Handle a frame beyond its sender's limit if it is a repeat, which is only answered."""
        if not await self._repeats.is_repeat(who.name, frame.seq_id):
            raise self._limit.refuse(who.name, refusal)
        return await self._receive_later(session, who, frame)

    async def _receive_counted(self, session: Session, who: Principal, frame: Frame) -> bool:
        """Handle a frame that was counted; if it is refused, its bytes are given back."""
        try:
            return await self._receive_later(session, who, frame, counted=True)
        except SenderError:
            self._limit.give_back(who.name, len(frame.data))
            raise

    async def _put(self, event: Arrived) -> bool:
        await self.engine.put(event)
        return True

    def _event(self, session: Session, who: Principal, request: Request) -> Arrived:
        """Return the event of a request; where other processes write to the ledger, with the condition that
        its sender may send."""
        proof = self._accounts.proof(who)
        if proof:
            needed = tuple(Precondition(one.bucket, one.name, one.body, refusal=c.REVOKED) for one in proof)
            request = replace(request, guards=(*needed, *request.guards))
        return Arrived(request.message, RequestOrigin(session, request))

    async def _receive_later(
        self, session: Session, who: Principal, frame: Frame, *, counted: bool = False
    ) -> bool:
        """Handle a frame for which the ledger may have to be read."""
        type_, me = frame.type, who.name
        if type_ == "ack":
            await self._reached(session, who, frame, read=False)
            return False
        if type_ in PASSING:
            await self._pass_on(session, who, frame)
            return False
        if type_ in QUERIES:
            await self._accounts.confirm(who)
            data = await self._queries.answer(frame, me)
            session.push(ServerAck(frame.seq_id, _ACCEPTED, data=frames.raw(data)))
            return True
        source = self._groups if type_ in GROUPS else self._friends if type_ in FRIENDS else self._lines
        request = await source.request(frame, me)
        if type_ == "group_create" and not await self._repeats.is_repeat(me, frame.seq_id):
            # A stranger who makes groups fills the lists of all their members.
            self._new_groups.take(me, 0, self._ledger.clock.now())
        if counted:
            self._counted.begin(request.message.key, len(frame.data))
        return await self._put(self._event(session, who, request))

    async def remove_from_chat(self) -> None:
        """Take people whose accounts were removed out of their conversations."""
        for name in await self._ledger.bucket(LEAVING):
            news = await remove_from_chat(self._ledger, name)
            for conv in news:
                self.subscriptions.refresh(conv)
            self.remote.said(tuple(news), ())

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
            subscriber = self.connections.of_session(session)
            if subscriber is None or conv not in subscriber.subscriptions:
                raise NotAllowed(NOT_YOURS.reason)
            typing = TypingFrame(me, conv, frame.data)
            self._broadcast.typing(typing)
            self.remote.typing(typing)

    async def _reached(self, session: Session, who: Principal, frame: Frame, *, read: bool) -> None:
        conv, n = frame.conv, frame.n
        if conv is None or n is None or not 0 <= n < c.ALL:
            raise Malformed(
                f"a {frame.type} needs conv and n: the conversation, and the last line that you have"
            )
        subscriber = self.connections.of_session(session)
        if subscriber is None or not self.subscriptions.acknowledge(subscriber, conv, n):
            # By HTTP, or from a person who is not in it.
            await self._permissions.first_visible(conv, who.name)
            self._cursors.move(conv, who.name, n)
        if read:
            self._cursors.move(conv, c.read_by(who.name), n)

    def _moved(self, conv: str, readers: Sequence[tuple[str, int]]) -> None:
        """Tell the others that people have read further, once that is stored. The cursors of single devices
        (`ann/phone`) concern no one else."""
        people = [each for each in readers if "/" not in each[0]]
        if people:
            note_receipts(self._trail, conv, people)
            self._broadcast.receipts(conv, people)
            self.remote.read(conv, people)

    # ── effects ──────────────────────────────────────────────────────────────────────────────────

    def _reply(self, effect: Reply) -> None:
        """Acknowledge a request, and send a stored line to the people connected here."""
        asked, message, verdict = effect.origin, effect.message, effect.verdict
        assert isinstance(asked, RequestOrigin)
        request = asked.request
        self._counted.end(message.key, message.scope, stored=verdict.kind is _FRESH)
        if verdict.answer is None:
            self._trail.said(message, verdict, told=asked.session.listening)
            asked.session.push(outgoing.server_ack(message.id, verdict))
            return
        n = int(verdict.answer.data)
        repeated = verdict.kind is not _FRESH
        asked.session.push(_ack(message.id, request, n, repeated=repeated))
        told = asked.session.listening
        if repeated:
            self._trail.said(message, verdict, told=told)
            return
        conv = request.conv
        if self._activity.watchers:
            self._activity.see(
                "line", scope=message.scope, id=message.id, kind=message.kind, to=message.recipient, n=n
            )
        self._lines.stored(message.kind, conv)
        for name in request.joins:
            self.subscriptions.join(name, conv, n - 1)
        shown = c.show(conv, n, request.live or request.line, asked.at)
        sent = self.subscriptions.tell(conv, n, shown, asked.session, self._ledger.clock.now())
        self._trail.stored(message, verdict, _ENDED, told=told, sent=sent)
        for name in request.parts:
            self.subscriptions.part(name, conv)
        begun = c.pair_in(conv) if n == 1 else ()
        self.remote.said((conv, *request.news), (*request.joins, *begun))
        for other in request.news:
            self.subscriptions.refresh(other)


_ACCEPTED: Final = int(ServerCode.ACCEPTED)
_DUPLICATE: Final = int(ServerCode.DUPLICATE)
_ENDED: Final = State.DONE  # reading a member from its class takes nine times as long
_DONE: Final = State.DONE.word
_FRESH: Final = VerdictKind.FRESH


def _ack(seq_id: str, request: Request, n: int, *, repeated: bool) -> ServerAck:
    """Return the `server_ack` of a stored line: where it is stored."""
    return ServerAck(
        seq_id,
        code=_DUPLICATE if repeated else _ACCEPTED,
        state=_DONE if repeated else None,
        conv=request.conv if request.shown else None,
        n=n if request.shown else None,
        data=frames.raw(request.data),
    )
