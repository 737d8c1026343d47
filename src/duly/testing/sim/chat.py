"""Worlds of chat: the production `ChatService` of the hub and `duly.Chat` of its people, with simulated
sockets.

Each person writes to others or to the group that all are in, and keeps a view: what it was shown of every
conversation, and where its own lines went. Whatever breaks meanwhile, in the end all views are the same,
complete, in order and without repeats; a checker compares them with the hub's streams. Some
acknowledgements are lost although the connection stays: their lines have to be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from duly.apps.chat import conversations as c
from duly.apps.chat.service import ChatService as ChatApplication
from duly.clients.chat import Chat
from duly.core import operations as w
from duly.core.ids import SeqId
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Order
from duly.core.steps import Effect, Reply
from duly.core.units import SECOND
from duly.errors import DulyError
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.server.router import Router
from duly.storage.ledger import Ledger
from duly.storage.memory import Disk
from duly.testing.sim.checkers import CHECKERS, Checker, Finding
from duly.testing.sim.gateway import GatewayHub, GatewayWorld, SimLink, end_client
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.world import SeenMessage
from duly.wire import frames
from duly.wire.session import Session

if TYPE_CHECKING:
    from duly.clients.base import HubLink

DIRECT, IN_GROUP = "one_chat", "group_chat"
GROUP: Final = "#everybody"
AGAIN_WITHIN: Final = 20.0
"""Seconds within which an unacknowledged line is sent again for the first time: five, plus the time that a
hub may need to recover from a disk failure."""


class _OpenChatAccounts(Accounts):
    """Accounts in which every name is a user: these worlds are not about logins."""

    def __init__(self, names: list[str]) -> None:
        self._names = frozenset(names)

    def stored_role(self, name: str) -> Role | None:
        """Return the role of a user for every name of the world, and none for an unknown name."""
        return Role.USER if name in self._names else None

    async def find_role(self, name: str, asker: str = "") -> Role | None:
        """Return the same as `stored_role`: no other hub could know more."""
        return self.stored_role(name)

    def is_current(self, principal: Principal) -> bool:
        """Return whether the account has the role that the principal was given."""
        return self.stored_role(principal.name) is principal.role

    def proof(self, principal: Principal, device: str = "") -> tuple[w.CheckItem, ...]:
        """Nothing to check at the commit, since no account is removed."""
        return ()

    async def confirm(self, principal: Principal) -> None:
        """Do nothing, since no account is removed."""
        pass


class _SeenChat(ChatApplication):
    """The production chat, with its replies noted in the log."""

    node: SimProcess

    def _reply(self, effect: Reply) -> None:
        if self.node.alive:
            self.node.world.log.replied(self.node, effect.message, effect.verdict)
            super()._reply(effect)


class ChatHub(GatewayHub):
    """A hub with the production chat."""

    world: ChatWorld

    async def begin(self) -> None:
        """Start the chat service with one group of which every person is a member."""
        self.wires = []
        self.greeting = {}
        self.recorded = getattr(self, "recorded", [])
        names = [name for name in self.world.nodes if name != self.name]
        buckets = self.disk.buckets
        buckets.setdefault(c.GROUPS, {})[GROUP] = b'{"name":"everybody","made_by":"founder"}'
        for name in names:
            buckets.setdefault(c.members(GROUP), {})[name] = c.Rank.MEMBER.body
            buckets.setdefault(c.convs(name), {})[GROUP] = b""
        activity = ActivityLog(self.ledger)
        self.chat = _SeenChat(self.ledger, _OpenChatAccounts(names), activity)
        self.chat.node = self
        self.router = Router(activity, [self.chat])
        self.engine = self.chat.engine
        await self.chat.start()

    def principal(self, name: str) -> Principal:
        """Return a person's account."""
        return Principal(name, Role.USER)

    def hear(self, session: Session, name: str, raw: bytes) -> None:
        """Handle a frame; now and then an acknowledgement of a reader is lost."""
        world = self.world
        frame = frames.decode(raw)
        if frame.type == "ack" and frame.conv is not None and self.alive:
            if world.faulty and world.deaf.random() < world.plan.drop:
                world.faults += 1
                return
            world.hear_ack(session, frame.conv, frame.n or 0)
        super().hear(session, name, raw)

    def lost(self, session: Session, name: str) -> None:
        """Forget what was shown over the connection."""
        self.world.talks.pop(session, None)
        super().lost(session, name)

    def die(self) -> None:
        """End the chat service at once, with all connections."""
        super().die()
        self.world.talks.clear()
        if hasattr(self, "chat"):
            self.chat.kill()


class _SimChat(Chat):
    def __init__(self, node: Person) -> None:
        super().__init__("", "", store="kept")
        self.node = node

    async def _open_ledger(self) -> Ledger:
        return self.node.ledger

    def _open_link(self) -> HubLink:
        return SimLink(self.node, self._up, self._heard, self._positions)

    async def _submit(self, message: Message) -> None:
        frame = frames.decode(message.body)
        meant = c.message_of(frame, self.name, frame.to or "")
        self.node.world.log.submitted(self.node, meant, SeqId.parse(message.id))
        await super()._submit(message)

    def _perform(self, effect: Effect) -> None:
        if self.node.alive:
            super()._perform(effect)

    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        log = self.node.world.log
        want = log.wanted.get(key)
        if want is not None:
            said = want.message.body if state is State.DONE else b""
            log.outcome(self.node.name, key, state, Answer(answer.code, said, answer.reason))
        super()._end(key, state, answer)


class Person(SimProcess):
    """A person with the production chat client."""

    async def begin(self) -> None:
        """Connect the chat client and read what it is shown."""
        self.chat = chat = _SimChat(self)
        await chat.__aenter__()
        if self.chat is chat:
            self.engine = chat._engine
            self.spawn(self._listen())

    def die(self) -> None:
        """End the chat client without closing its connection."""
        end_client(self.chat)

    async def _listen(self) -> None:
        async for line in self.chat.lines():
            self.world.log.saw(self, line.conv, line.n, line.sender, line.id)

    async def submit(self, recipient: str, kind: str, order: Order | None, lasts: int) -> None:
        """Send a line to another person or to the group."""
        to = GROUP if kind == IN_GROUP else recipient
        try:
            sent = await self.chat.send(to, "wanted", expires=lasts / SECOND if lasts else None)
        except DulyError:
            return
        self.world.log.own[self.name, sent.conv, sent.n] = self.incarnation


class Talk(Struct):
    """How far one connection was sent one conversation, and has acknowledged it."""

    who: str
    told: int = 0
    acked: int = 0
    since: float = 0.0
    """the time of the last new line or acknowledgement"""
    again: bool = False
    """whether a line was sent again since: the next repeat may come much later"""


class ChatWorld(GatewayWorld):
    """A world of people who chat at one hub."""

    sender = Person
    receiver = Person
    hub = ChatHub
    kinds = (DIRECT, IN_GROUP)
    at_most_once = frozenset({DIRECT, IN_GROUP})

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.deaf = Random(f"deaf {plan.seed}")
        """draws which acknowledgements are lost; separate, so that the rest of a seed does not depend on
        it"""
        self.talks: dict[object, dict[str, Talk]] = {}
        self.forgotten: list[tuple[str, str, int]] = []
        """(person, conversation, number) of lines that were not sent again"""

    def pushed(self, client: str, session: object, frame: bytes) -> None:
        """Note which line a reader was shown, and judge a little later whether it was repeated."""
        shown = frames.decode(frame)
        if shown.conv is None or shown.n is None or shown.type in ("server_ack", "receipt"):
            return
        talk = self.talks.setdefault(session, {}).setdefault(shown.conv, Talk(client))
        if not talk.told:
            talk.acked = shown.n - 1
        talk.again = shown.n <= talk.told
        talk.told = max(talk.told, shown.n)
        talk.since = self.loop.time()
        self.loop.call_later(AGAIN_WITHIN, self._judge, session, shown.conv, talk.since)

    def hear_ack(self, session: object, conv: str, n: int) -> None:
        """Note an acknowledgement that has arrived at the hub."""
        talk = self.talks.get(session, {}).get(conv)
        if talk is not None and n > talk.acked:
            talk.acked, talk.since, talk.again = n, self.loop.time(), False
            self.loop.call_later(AGAIN_WITHIN, self._judge, session, conv, talk.since)

    def _judge(self, session: object, conv: str, since: float) -> None:
        """Note a line that is still unacknowledged after a while and was not sent again."""
        talk = self.talks.get(session, {}).get(conv)
        if talk is not None and talk.since == since and talk.acked < talk.told and not talk.again:
            self.forgotten.append((talk.who, conv, talk.acked + 1))

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        """Count a line that was stored in its conversation as the effect of its message."""
        super().committed(node, disk, write, result)
        if isinstance(write, w.AppendEntry) and write.ends:
            want = self.log.wanted[write.key]
            now = asyncio.get_running_loop().time()
            # The effect of a message is the line stored in its conversation.
            self.log.effect_at(now, want.message.recipient, node.incarnation, want.message)

    def views(self) -> dict[str, dict[str, list[SeenMessage]]]:
        """Return the lines that each person was shown, by conversation."""
        found: dict[str, dict[str, list[SeenMessage]]] = {name: {} for name in self.nodes if name != "hub"}
        for stream in self.settled_disks["hub"].streams:
            conv = stream.removeprefix("chat/")
            for name, convs in found.items():
                if conv == GROUP or name in c.pair_in(conv):
                    convs[conv] = []
        for seen in self.log.seen:
            found[seen.who].setdefault(seen.conv, []).append(seen)
        return found


def lines_sent_again(world: ChatWorld) -> Iterator[Finding]:
    """A line that is not acknowledged is sent again, even if no client connects and no line is written."""
    for who, conv, n in world.forgotten:
        yield f"{who} has not acknowledged {conv} {n}, which was not sent again", b""


CHAT_CHECKERS: Final[tuple[Checker[ChatWorld], ...]] = (*CHECKERS, lines_sent_again)
