"""`duly.Chat`: talk, and miss nothing.

The laws. What is said is stored before it is sent (in memory, or in a file with `data=`), and sent again with
the same id until the hub has taken or refused it, also across a restart. What is said to one person or group
goes out one line after the other, so it arrives in the order it was said. What others say arrives once, in
order; a line is acknowledged when the next one is asked for, so that a crash in between brings it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from duly.clients.local_ledger import MINTED, minted_ids, open_memory
from duly.clients.websocket_link import WebSocketLink, hubs
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Word, key_of
from duly.core.operations import PutItem
from duly.core.outbox import Outbox, OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import Answered, Arrived, Effect, Reachable, Reply, ReportOutcome, Transmit
from duly.core.units import DAY, MS, SECOND, seconds
from duly.errors import DulyError, LedgerUnavailable, NotAuthenticated, Refused, Stopped, Unknown
from duly.runtime.engine import Engine
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.frames import Frame, ServerCode

RESEND: Final = RetryPolicy.exponential(3 * SECOND, 30 * SECOND)
PATIENCE: Final = 7 * DAY
"""As long as a hub remembers ids."""
CURSORS: Final = "cursors"
CHANNEL: Final = "hub"
ACK_SECONDS: Final = 0.05
"""Of many lines in a row not each is acknowledged, but how far we have come, so often …"""
ACK_LINES: Final = 200
"""… and after so many: the hub waits for our word after a thousand."""
HERE: Final = 10.0


class SentLine(Struct, frozen=True):
    """A line has its place."""

    conv: str
    n: int
    data: Any = None


class Line(Struct, frozen=True):
    """Something in a conversation: `one_chat`, `group_chat`, `edit`, `delete`, `group_join` …; what was
    deleted or has expired is `deleted` or `expired`."""

    conv: str
    n: int
    type: str
    sender: str
    data: Any = None
    time: int = 0
    """milliseconds since 1970"""
    id: str = ""
    edited: bool = False

    @property
    def text(self) -> str:
        """What was said, if it was said in words."""
        return str(self.data.get("text", "")) if isinstance(self.data, dict) else str(self.data or "")


class Receipt(Struct, frozen=True):
    """Somebody has everything up to `n`, or has read it."""

    conv: str
    n: int
    reader: str
    state: Literal["delivered", "read"]


class Typing(Struct, frozen=True):
    conv: str
    sender: str


class Presence(Struct, frozen=True):
    """A friend has come or gone."""

    sender: str
    data: Any


class Receipts(Struct, frozen=True):
    """How far a line has come."""

    conv: str
    n: int
    state: Literal["accepted", "delivered", "read"]
    of: int
    delivered: int
    read: int
    attempts: int = 0
    delivered_to: list[str] = []
    read_by: list[str] = []


class _Page(Struct, frozen=True):
    lines: list[Frame]


T = TypeVar("T")
News: TypeAlias = Line | Receipt | Typing | Presence


class Chat:
    """A person's side of the wire.

    token = await duly.Chat.log_in("http://127.0.0.1:7800", "ann", password)
    async with duly.Chat("http://127.0.0.1:7800", token) as chat:
        await chat.send("bob", "hello")
        async for line in chat.lines():
            print(line.sender, line.text)
    """

    def __init__(self, url: str, token: str, *, data: str | None = None) -> None:
        self._url, self._token, self._data = url, token, data
        self._sending: dict[bytes, asyncio.Future[SentLine]] = {}
        self._refused: dict[bytes, Refused] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._earlier: dict[str, list[asyncio.Future[SentLine]]] = {}
        """what an earlier run left under way, by whom it is for: it goes before anything new"""
        self._doubtful: dict[str, list[bytes]] = {}
        """what our own store may or may not have stored, likewise"""
        self._asked: dict[str, tuple[bytes, asyncio.Future[Frame]]] = {}
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._heard_to: dict[str, int] = {}
        """the last line of each conversation that has arrived"""
        self._done_to: dict[str, int] = {}
        """the last one that was made use of, and so may be acknowledged"""
        self._dirty: dict[str, int] = {}
        """what is still to be acknowledged"""
        self._said: dict[str, int] = {}
        """what was acknowledged on this connection: it may be lost with it"""
        self._acking: asyncio.TimerHandle | None = None
        """what else we make use of meanwhile is acknowledged when it ends"""
        self._unsaid = 0
        self._questions = 0
        self.tasks = Supervisor()
        self._saving: asyncio.Task[None] | None = None
        self.name = ""

    # ── who you are ──────────────────────────────────────────────────────────────────────────────

    @staticmethod
    async def register(url: str, name: str, password: str) -> None:
        """Become somebody, where the hub lets strangers in."""
        await _post(url, "people", {"name": name, "password": password})

    @staticmethod
    async def log_in(url: str, name: str, password: str, device: str = "") -> str:
        """A token of your own for this device."""
        answer = await _post(url, "login", {"name": name, "password": password, "device": device})
        return str(answer["token"])

    async def log_out(self, *, everywhere: bool = False) -> None:
        """End this login, or all of yours."""
        await _post(self._url, "logout", {"everywhere": everywhere}, self._token)

    @property
    def denied(self) -> str:
        """Why the hub does not let us in any more, if it has said so: we were logged out, or removed. What is
        said now goes out only if it does again."""
        return str(self._link.denial or "")

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        self.tasks = Supervisor()
        self._ledger = await self._open_ledger()
        self._ids = await minted_ids(self._ledger)
        self._done_to = {conv: int(n) for conv, n in (await self._ledger.bucket(CURSORS)).items()}
        self._heard_to = dict(self._done_to)
        for left in await self._ledger.open_deliveries(CHANNEL):
            sending = self._sending[left.message.key] = asyncio.get_running_loop().create_future()
            self._earlier.setdefault(left.message.recipient, []).append(sending)
        policy = OutboxPolicy(CHANNEL, RESEND, patience=PATIENCE)
        self._engine = Engine(Outbox(policy, self._ledger.worker, minted=MINTED), self._ledger, self._perform)
        self._link = self._open_link()
        try:
            await self._link.start()
            self.name = (await self._link.ready()).you or ""
            await self._engine.start()
            self.tasks.spawn("engine", self._engine.live, tries=ENGINE_TRIES)
        except BaseException:
            await self._close()
            raise
        return self

    async def _open_ledger(self) -> Ledger:
        return await open_memory(self._data)

    def _open_link(self) -> WebSocketLink:
        return WebSocketLink(
            self._url, self._token, up=self._up, heard=self._heard, cursors=lambda: self._heard_to
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._acknowledge()
        await self._engine.stop()
        await self.tasks.finish()
        await self._link.stop()
        if self._acking is not None:
            self._acking.cancel()
        await self.tasks.stop()
        await self._ledger.close()
        closed = Stopped("the chat was closed before the hub answered")
        waiting: list[asyncio.Future[Any]] = [*self._sending.values()]
        for future in waiting + [asked for _, asked in self._asked.values()]:
            if not future.done():
                future.set_exception(closed)
                future.exception()

    @property
    def connected(self) -> bool:
        return self._link.connected

    # ── saying ───────────────────────────────────────────────────────────────────────────────────

    async def send(
        self, to: str, what: object, *, expires: float | None = None, id: str | None = None
    ) -> SentLine:
        """Say something to a person or a group ("#…"); its conversation and number, once it is stored. Text
        goes as `{"text": …}`, anything else as it is. `expires`: seconds after which nobody is shown it."""
        kind = "group_chat" if to.startswith("#") else "one_chat"
        return await self._say(kind, to, {"text": what} if isinstance(what, str) else what, expires, id)

    async def edit(self, conv: str, n: int, what: object) -> SentLine:
        """Say a line of yours differently."""
        data = {"text": what} if isinstance(what, str) else what
        return await self._say("edit", None, {"conv": conv, "n": n, "data": data})

    async def delete(self, conv: str, n: int) -> SentLine:
        return await self._say("delete", None, {"conv": conv, "n": n})

    async def create_group(
        self, name: str, *members: str, history: Literal["all", "joined"] = "all", open: bool = False
    ) -> str:
        """Make a group; its id. `history`: what those who join later may see of what was said before."""
        wanted = {"name": name, "members": members, "history": history, "open": open}
        return str((await self._say("group_create", None, wanted)).data["group"])

    async def invite(self, group: str, user: str) -> None:
        await self._say("group_invite", None, {"group": group, "user": user})

    async def join(self, group: str) -> None:
        await self._say("group_join", None, {"group": group})

    async def leave(self, group: str) -> None:
        await self._say("group_leave", None, {"group": group})

    async def remove(self, group: str, user: str) -> None:
        await self._say("group_remove", None, {"group": group, "user": user})

    async def set_role(self, group: str, user: str, role: Literal["owner", "admin", "member"]) -> None:
        await self._say("group_role", None, {"group": group, "user": user, "role": role})

    async def ask_friend(self, user: str) -> None:
        await self._say("friend_ask", None, {"user": user})

    async def accept_friend(self, user: str) -> None:
        await self._say("friend_accept", None, {"user": user})

    async def remove_friend(self, user: str) -> None:
        await self._say("friend_remove", None, {"user": user})

    async def block(self, user: str) -> None:
        await self._say("block", None, {"user": user})

    async def unblock(self, user: str) -> None:
        await self._say("unblock", None, {"user": user})

    async def _say(
        self, kind: str, to: str | None, data: object, expires: float | None = None, id: str | None = None
    ) -> SentLine:
        recipient = to or CHANNEL
        async with self._turns.setdefault(recipient, asyncio.Lock()):
            if earlier := self._earlier.pop(recipient, None):
                await asyncio.wait(earlier)
            while doubtful := self._doubtful.get(recipient):
                await self._clear_up(doubtful[0])
                del doubtful[0]
            now = self._ledger.clock.now()
            seq_id = id or str(self._ids.next(now))
            exp = None if expires is None else (now + seconds(expires)) // MS
            body = frames.encode(Frame(kind, seq_id, to, data=frames.dump(data), exp=exp))
            frames.check(body)
            end = 0 if exp is None else exp * MS
            message = Message(
                self.name, seq_id, kind, recipient, body, expires=end, order=Order("", Mode.ANY)
            )
            sending = self._sending.get(message.key)
            if sending is None:
                sending = self._sending[message.key] = asyncio.get_running_loop().create_future()
                await self._submit(message)
            return await asyncio.shield(sending)

    async def _clear_up(self, key: bytes) -> None:
        """If it was stored after all it is on its way, and goes first."""
        sending = self._sending[key] = asyncio.get_running_loop().create_future()
        record = await self._ledger.find(key)
        if record is None or record.state.terminal:
            self._sending.pop(key, None)
        else:
            await asyncio.wait([sending])

    async def _submit(self, message: Message) -> None:
        await self._engine.put(Arrived(message))

    def read(self, conv: str, n: int) -> None:
        """Say that everything up to `n` was read."""
        self._link.send(frames.encode(Frame("read", conv=conv, n=n)))

    def typing(self, conv: str) -> None:
        self._link.send(frames.encode(Frame("typing", conv=conv)))

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    async def history(self, conv: str, *, before: int | None = None, limit: int = 50) -> list[Line]:
        """Lines before a number (or the newest), oldest first."""
        wanted = {"conv": conv, "limit": limit} | ({} if before is None else {"before": before})
        return [_line(frame) for frame in (await self._ask("history", wanted, _Page)).lines]

    async def receipts(self, conv: str, n: int) -> Receipts:
        """How far a line has come: delivered to k of n, read by m of n."""
        return await self._ask("receipts", {"conv": conv, "n": n}, Receipts)

    async def conversations(self) -> list[dict[str, Any]]:
        """Where you can talk: `conv`, `last`, `delivered`, `read`, `with` somebody or a group's `name`."""
        found = await self._ask("conversations", {}, dict[str, list[dict[str, Any]]])
        return found["conversations"]

    async def group(self, group: str) -> dict[str, Any]:
        """Its `name` and `members`, with their roles."""
        return await self._ask("group_info", {"group": group}, dict[str, Any])

    async def friends(self) -> dict[str, list[str]]:
        """`friends`, those who are `asking` to be, and those you have `blocked`."""
        return await self._ask("friends", {}, dict[str, list[str]])

    async def _ask(self, kind: str, data: object, as_: type[T]) -> T:
        """A question needs no outbox: it is asked again on the next connection."""
        self._questions += 1
        seq_id = f"q{self._questions}"
        frame = frames.encode(Frame(kind, seq_id, data=frames.dump(data)))
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._asked[seq_id] = (frame, answer)
        try:
            self._link.send(frame)
            said = await answer
        finally:
            del self._asked[seq_id]
        if said.code != ServerCode.ACCEPTED:
            raise Refused(said.code or 0, said.error or "", said.detail or "")
        return msgspec.json.decode(said.data, type=as_)

    # ── hearing ──────────────────────────────────────────────────────────────────────────────────

    async def news(self) -> AsyncIterator[News]:
        """Everything as it comes: lines, receipts, who is typing, friends coming and going. A line is
        acknowledged when you ask for what comes after it."""
        while True:
            news = await self._news.get()
            yield news
            if isinstance(news, Line):
                self._made_use_of(news.conv, news.n)

    async def lines(self) -> AsyncIterator[Line]:
        """What is said, each once, in each conversation's order, also what was missed while away."""
        async for news in self.news():
            if isinstance(news, Line):
                yield news

    def _made_use_of(self, conv: str, n: int) -> None:
        self._done_to[conv] = self._dirty[conv] = max(n, self._done_to.get(conv, 0))
        self._unsaid += 1
        if self._acking is None or self._unsaid >= ACK_LINES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Say how far we have come: the first at once, what follows it together."""
        if self._acking is not None:
            self._acking.cancel()
        self._acking, self._unsaid = None, 0
        if not self._dirty:
            return
        self._acking = asyncio.get_running_loop().call_later(ACK_SECONDS, self._acknowledge)
        dirty, self._dirty = self._dirty, {}
        for conv, n in dirty.items():
            self._link.send(frames.encode(Frame("ack", conv=conv, n=n)))
        self._said |= dirty
        if self._data is not None and self._saving is None:
            self._saving = self.tasks.do("saving cursors", self._save_cursors())

    async def _save_cursors(self) -> None:
        """How far we have come; a cursor that is not saved costs a repeat, never a line."""
        try:
            await self._ledger.write(
                *(PutItem(CURSORS, conv, b"%d" % n) for conv, n in self._done_to.items())
            )
        except DulyError:
            return
        finally:
            self._saving = None

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────

    def _up(self, welcome: Frame) -> None:
        self.name = welcome.you or self.name
        for conv, n in (welcome.cursors or {}).items():
            self._heard_to[conv] = max(n, self._heard_to.get(conv, 0))
        for frame, _ in self._asked.values():
            self._link.send(frame)
        self._dirty, self._said = self._said | self._dirty, {}
        self._acknowledge()
        self._offer(Reachable(""))

    def _heard(self, frame: Frame) -> None:
        match frame.type:
            case "server_ack" if frame.seq_id is not None:
                self._server_ack(frame.seq_id, frame)
            case "receipt" if frame.conv is not None and frame.n is not None:
                state = frames.load(frame.data)["state"]
                self._news.put_nowait(Receipt(frame.conv, frame.n, frame.from_ or "", state))
            case "typing" if frame.conv is not None:
                self._news.put_nowait(Typing(frame.conv, frame.from_ or ""))
            case "presence":
                self._news.put_nowait(Presence(frame.from_ or "", frames.load(frame.data)))
            case _ if frame.conv is not None and frame.n is not None:
                self._told(frame.conv, frame.n, frame)

    def _told(self, conv: str, n: int, frame: Frame) -> None:
        heard = self._heard_to.get(conv, n - 1)
        if n == heard + 1:
            self._heard_to[conv] = n
            self._news.put_nowait(_line(frame))
        elif n <= self._done_to.get(conv, 0):
            self._dirty.setdefault(conv, self._done_to[conv])  # our word was lost
            self._acknowledge()

    def _server_ack(self, seq_id: str, frame: Frame) -> None:
        if seq_id in self._asked:
            answer = self._asked[seq_id][1]
            if not answer.done():
                answer.set_result(frame)
            return
        key = key_of(self.name, seq_id)
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                if frame.conv is not None and frame.n is not None:
                    self._said_ourselves(frame.conv, frame.n)
                sent = SentLine(frame.conv or "", frame.n or 0, frames.load(frame.data))
                self._offer(Answered(key, State.DONE, Answer(0, msgspec.json.encode(sent))))
            case ServerCode.INTERNAL | None:
                pass  # try again: the resend does
            case code:
                refusal = self._refused[key] = Refused(code, frame.error or "", frame.detail or "")
                self._offer(Answered(key, State.FAILED, Answer(code, b"", str(refusal)), burn=False))

    def _said_ourselves(self, conv: str, n: int) -> None:
        """Our own line has its number; it is not told to us again, if it comes next."""
        if self._heard_to.get(conv, n - 1) == n - 1:
            self._heard_to[conv] = n
            if self._done_to.get(conv, n - 1) == n - 1:
                self._done_to[conv] = n

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                self._link.send(message.body)
            case ReportOutcome(key=key, state=state, answer=answer):
                self._end(key, state, answer)
            case Reply(message=message, verdict=verdict):
                if verdict.state is not None and verdict.state.terminal:
                    self._end(message.key, verdict.state, verdict.answer or Answer())
                elif verdict.retry:
                    self._unsure(message, verdict.reason)
                elif verdict.word not in (Word.FRESH, Word.DUPLICATE):
                    self._refused[message.key] = Refused(
                        ServerCode.BAD_PARAMETERS, verdict.named, verdict.reason
                    )
                    self._end(message.key, State.FAILED, Answer())

    def _unsure(self, message: Message, reason: str) -> None:
        """Our own store failed, perhaps after it had stored: it may yet go out. Under the same id that is
        harmless."""
        self._doubtful.setdefault(message.recipient, []).append(message.key)
        sending = self._sending.pop(message.key, None)
        if sending is not None and not sending.done():
            sending.set_exception(LedgerUnavailable(reason))

    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        sending, refusal = self._sending.pop(key, None), self._refused.pop(key, None)
        if sending is None or sending.done():
            return
        if state is State.DONE:
            sending.set_result(msgspec.json.decode(answer.data, type=SentLine))
            return
        if refusal is None and state is State.UNKNOWN:
            sending.set_exception(Unknown(answer.reason))
        else:
            sending.set_exception(refusal or Refused(answer.code, state.word, answer.reason))
        sending.exception()  # of what an earlier run left under way nobody may be waiting

    def _offer(self, event: Answered | Reachable) -> None:
        try:
            self._engine.offer(event)
        except DulyError:
            return  # we are stopping, or full: the hub says it again


def _line(frame: Frame) -> Line:
    return Line(
        frame.conv or "",
        frame.n or 0,
        frame.type,
        frame.from_ or "",
        frames.load(frame.data),
        frame.time or 0,
        frame.seq_id or "",
        frame.edited,
    )


async def _post(url: str, path: str, body: object, token: str = "") -> Any:
    """Ask the first hub that is there. What was asked is not asked of the next: it may have been done."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    *others, last = hubs(url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HERE)) as http:
        for hub in others:
            with suppress(aiohttp.ClientConnectorError):
                return await _post_to(http, f"{hub}/v1/{path}", body, headers)
        return await _post_to(http, f"{last}/v1/{path}", body, headers)


async def _post_to(http: aiohttp.ClientSession, url: str, body: object, headers: dict[str, str]) -> Any:
    async with http.post(url, data=msgspec.json.encode(body), headers=headers) as answer:
        said = msgspec.json.decode(await answer.read())
        if answer.status == 401:
            raise NotAuthenticated(said["detail"])
        if answer.status >= 400:
            raise Refused(answer.status, said.get("error", ""), said.get("detail", ""))
        return said
