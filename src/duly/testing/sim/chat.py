"""Worlds of chat: the production `Chat` of the hub and `duly.Chat` of its people, with simulated sockets.

Everybody talks to somebody or to the group that all are in. Each keeps a view: what they were shown of every
conversation, and where their own lines went. Whatever breaks meanwhile, in the end all views are the same,
complete, in order and without repeats; a checker outside the code compares them with the hub's streams.
Some acknowledgements never arrive, though the connection stays: what they were for has to be told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
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
from duly.runtime.audit import AuditLog
from duly.server.router import Router
from duly.storage.ledger import Ledger
from duly.storage.memory import Disk
from duly.testing.sim.checkers import CHECKERS, Finding
from duly.testing.sim.gateway import GatewayHub, GatewayWorld, SimLink, end_client
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.world import SeenMessage, World
from duly.wire import frames
from duly.wire.session import Session

if TYPE_CHECKING:
    from duly.clients.websocket_link import WebSocketLink

ALONE, TOGETHER = "one_chat", "group_chat"
GROUP: Final = "#everybody"
AGAIN_WITHIN: Final = 20.0
"""Seconds in which what was not acknowledged is told again for the first time: five, and what a hub may need
to get over a disk that fails."""


class _ChatHubs(Accounts):
    """Everybody is somebody: who is who is not what these worlds are about."""

    def __init__(self, names: list[str]) -> None:
        self._names = frozenset(names)

    def role_of(self, name: str) -> Role | None:
        return Role.USER if name in self._names else None

    async def find_role(self, name: str, asker: str = "") -> Role | None:
        return self.role_of(name)

    def stands(self, principal: Principal) -> bool:
        return self.role_of(principal.name) is principal.role

    def proof(self, principal: Principal, device: str = "") -> tuple[w.CheckItem, ...]:
        return ()

    async def confirm(self, principal: Principal) -> None:
        pass


class _SeenChat(ChatApplication):
    """The production chat, with an observer at its window."""

    node: SimProcess

    def _perform(self, effect: Effect) -> None:
        if not self.node.alive:
            return
        if isinstance(effect, Reply):
            self.node.world.log.replied(self.node, effect.message, effect.verdict)
        super()._perform(effect)


class ChatHub(GatewayHub):
    async def begin(self) -> None:
        self.wires = []
        self.recorded = getattr(self, "recorded", [])
        names = [name for name in self.world.nodes if name != self.name]
        buckets = self.disk.buckets
        buckets.setdefault(c.GROUPS, {})[GROUP] = b'{"name":"everybody","made_by":"nobody"}'
        for name in names:
            buckets.setdefault(c.members(GROUP), {})[name] = c.Rank.MEMBER.body
            buckets.setdefault(c.convs(name), {})[GROUP] = b""
        journal = AuditLog(self.ledger)
        self.chat = _SeenChat(self.ledger, _ChatHubs(names), journal)
        self.chat.node = self
        self.router = Router(journal, [self.chat])
        self.engine = self.chat.engine
        await self.chat.start()

    def principal(self, name: str) -> Principal:
        return Principal(name, Role.USER)

    def hear(self, session: Session, name: str, raw: bytes) -> None:
        world = self.world
        assert isinstance(world, ChatWorld)
        frame = frames.decode(raw)
        if frame.type == "ack" and frame.conv is not None and self.alive:
            if world.faulty and world.deaf.random() < world.plan.drop:
                world.faults += 1
                return
            world.hear_ack(session, frame.conv, frame.n or 0)
        super().hear(session, name, raw)

    def lost(self, session: Session, name: str) -> None:
        world = self.world
        assert isinstance(world, ChatWorld)
        world.talks.pop(session, None)
        super().lost(session, name)

    def die(self) -> None:
        super().die()
        world = self.world
        assert isinstance(world, ChatWorld)
        world.talks.clear()
        if hasattr(self, "chat"):
            self.chat.subscriptions.kill()


class _SimChat(Chat):
    def __init__(self, node: Person) -> None:
        super().__init__("", "", data="kept")
        self.node = node

    async def _open_ledger(self) -> Ledger:
        return self.node.ledger

    def _open_link(self) -> WebSocketLink:
        return SimLink(self.node, self._up, self._heard, lambda: self._heard_to)  # type: ignore[return-value]

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
    async def begin(self) -> None:
        self.chat = chat = _SimChat(self)
        await chat.__aenter__()
        if self.chat is chat:
            self.engine = chat._engine
            self.spawn(self._listen())

    def die(self) -> None:
        end_client(self.chat)

    async def _listen(self) -> None:
        async for line in self.chat.lines():
            self.world.log.saw(self, line.conv, line.n, line.sender, line.id)

    async def submit(self, recipient: str, kind: str, order: Order | None, lasts: int) -> None:
        to = GROUP if kind == TOGETHER else recipient
        try:
            sent = await self.chat.send(to, "wanted", expires=lasts / SECOND if lasts else None)
        except DulyError:
            return
        self.world.log.own[self.name, sent.conv, sent.n] = self.incarnation


class Talk(Struct):
    """What one connection was told in one conversation, and has acknowledged."""

    who: str
    told: int = 0
    acked: int = 0
    since: float = 0.0
    """when it was last told something new, or acknowledged more"""
    again: bool = False
    """it was told something again since: the next time may be long after"""


class ChatWorld(GatewayWorld):
    sender = Person
    receiver = Person
    hub = ChatHub
    kinds = (ALONE, TOGETHER)
    at_most_once = frozenset({ALONE, TOGETHER})

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.deaf = Random(f"deaf {plan.seed}")
        """draws which acknowledgements are lost, so that the rest of a seed stays what it was"""
        self.talks: dict[object, dict[str, Talk]] = {}
        self.forgotten: list[tuple[str, str, int]] = []
        """(who, conversation, number) of lines that were not told again"""

    def pushed(self, client: str, session: object, frame: bytes) -> None:
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
        talk = self.talks.get(session, {}).get(conv)
        if talk is not None and n > talk.acked:
            talk.acked, talk.since, talk.again = n, self.loop.time(), False
            self.loop.call_later(AGAIN_WITHIN, self._judge, session, conv, talk.since)

    def _judge(self, session: object, conv: str, since: float) -> None:
        """Nothing has happened in a conversation for a while: then nothing is owed there."""
        talk = self.talks.get(session, {}).get(conv)
        if talk is not None and talk.since == since and talk.acked < talk.told and not talk.again:
            self.forgotten.append((talk.who, conv, talk.acked + 1))

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        super().committed(node, disk, write, result)
        if isinstance(write, w.AppendEntry) and write.ends:
            want = self.log.wanted[write.key]
            now = asyncio.get_running_loop().time()
            # The line is where it belongs: that is the effect.
            self.log.effect_at(now, want.message.recipient, node.incarnation, want.message)

    def views(self) -> dict[str, dict[str, list[SeenMessage]]]:
        """What everybody was shown of each conversation they are in."""
        found: dict[str, dict[str, list[SeenMessage]]] = {name: {} for name in self.nodes if name != "hub"}
        for stream in self.settled_disks["hub"].streams:
            conv = stream.removeprefix("chat/")
            for name, convs in found.items():
                if conv == GROUP or name in c.pair_in(conv):
                    convs[conv] = []
        for seen in self.log.seen:
            found[seen.who].setdefault(seen.conv, []).append(seen)
        return found


def told_again(world: World) -> Iterator[Finding]:
    """What was told and is not acknowledged is told again, though nobody comes and nothing is said."""
    assert isinstance(world, ChatWorld)
    for who, conv, n in world.forgotten:
        yield f"{who} has not acknowledged {conv} {n}, and was not told it again", b""


CHAT_CHECKERS: Final[tuple[Callable[[World], Iterator[Finding]], ...]] = (*CHECKERS, told_again)
