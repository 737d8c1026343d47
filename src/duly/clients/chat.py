"""`duly.Chat`: sends and receives chat lines, each once and in order.

The laws. A line is stored before it is sent (in memory, or in a file with `store=`), and sent again with the
same id until the hub has accepted or refused it, also across a restart. Lines to one person or group go out
one after the other, so they arrive in order. Lines from others arrive once, in order; a line is acknowledged
when the program asks for the next one, so that it is delivered again after a crash in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final, TypeVar

import aiohttp
import msgspec

from duly.clients.base import OutboxClient, fail, settle
from duly.clients.chat_positions import ChatPositions
from duly.clients.chat_requests import ChatRequests
from duly.clients.chat_types import (
    JsonObject,
    Line,
    News,
    Presence,
    Receipt,
    Receipts,
    SentLine,
    Typing,
    line_of,
    receipt_of,
)
from duly.clients.local_ledger import MINTED
from duly.clients.news_feed import NewsFeed
from duly.clients.websocket_link import Access, hubs
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Verdict, key_of
from duly.core.outbox import Outbox, OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import Answered, Arrived, Reachable
from duly.core.units import DAY, MS, SECOND, seconds
from duly.errors import LedgerUnavailable, NotAuthenticated, Refused, Stopped, Unknown
from duly.runtime.engine import Engine
from duly.wire import frames
from duly.wire.frames import Frame, ServerCode

RESEND: Final = RetryPolicy.exponential(3 * SECOND, 30 * SECOND)
PATIENCE: Final = 7 * DAY
"""The time for which a hub remembers ids."""
CHANNEL: Final = "hub"
ANSWER_SECONDS: Final = 10.0

T = TypeVar("T")

__all__ = ["Chat", "Line", "News", "Presence", "Receipt", "Receipts", "SentLine", "Typing"]


class Chat(OutboxClient, ChatRequests):
    """A person in chat.

    token = await duly.Chat.log_in("http://127.0.0.1:7800", "ann", password)
    async with duly.Chat("http://127.0.0.1:7800", token) as chat:
        await chat.send("bob", "hello")
        async for line in chat.lines():
            print(line.sender, line.text)

    `url` may name several hubs, separated by commas. `store` is a file that keeps unsent lines and the
    position in each conversation across restarts; without it both are lost with the process.
    """

    def __init__(
        self, url: str, token: str, *, store: str | None = None, access: Access | None = None
    ) -> None:
        super().__init__(url, token, store, access)
        self._sending: dict[bytes, asyncio.Future[SentLine]] = {}
        self._refused: dict[bytes, Refused] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._earlier: dict[str, list[asyncio.Future[SentLine]]] = {}
        """lines that an earlier run left under way, by recipient; they are sent before new ones"""
        self._unsure: dict[str, list[bytes]] = {}
        """lines that the local ledger may or may not have stored, by recipient"""
        self._asked: dict[str, tuple[bytes, asyncio.Future[Frame]]] = {}
        self._news: NewsFeed[tuple[int, News]] = NewsFeed()
        """news, each with the number of the hub's restores until it arrived"""
        self._at = ChatPositions(self._acknowledge, lambda: self._save_cursors(self._at.read_to))
        self._questions = 0

    # ── accounts ─────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    async def register(url: str, name: str, password: str) -> None:
        """Create an account, if the hub allows registration."""
        await _post(url, "people", {"name": name, "password": password})

    @staticmethod
    async def log_in(url: str, name: str, password: str, device: str = "") -> str:
        """Log in; returns a token for this device."""
        answer = await _post(url, "login", {"name": name, "password": password, "device": device})
        return str(answer["token"])

    async def log_out(self, *, everywhere: bool = False) -> None:
        """End this login, or with `everywhere` all logins of the account."""
        await _post(self._url, "logout", {"everywhere": everywhere}, self._token)

    @property
    def denied(self) -> str:
        """Why the hub refuses this login now (logged out, or the account was removed); empty if it does not.
        Lines sent meanwhile go out only if the hub accepts the login again."""
        return "" if self._running is None else str(self._link.denial or "")

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    def _build_outbox(self) -> Outbox:
        policy = OutboxPolicy(CHANNEL, RESEND, patience=PATIENCE)
        return Outbox(policy, self._ledger.worker, minted=MINTED)

    async def _build_engine(self) -> Engine:
        self._at.load(await self._load_cursors())
        for left in await self._ledger.open_deliveries(CHANNEL):
            sending = self._sending[left.message.key] = asyncio.get_running_loop().create_future()
            self._earlier.setdefault(left.message.recipient, []).append(sending)
        return await super()._build_engine()

    async def stop(self) -> None:
        """Acknowledge the lines that were read, and disconnect. Every caller that still waits gets
        `Stopped`."""
        if self._running is not None:
            self._at.acknowledge()
        self._at.cancel()
        await super().stop()

    def _open_news(self) -> None:
        self._news.open()

    def _abandon(self) -> None:
        self._news.close()
        closed = Stopped("the chat was closed before the hub answered")
        for sending in self._sending.values():
            fail(sending, closed)
        for _, answer in self._asked.values():
            fail(answer, closed)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    async def _submit_line(
        self, kind: str, to: str | None, data: object, expires: float | None = None, id: str | None = None
    ) -> SentLine:
        self._check_running()
        recipient = to or CHANNEL
        async with self._turns.setdefault(recipient, asyncio.Lock()):
            if earlier := self._earlier.pop(recipient, None):
                await asyncio.wait(earlier)
            while unsure := self._unsure.get(recipient):
                await self._await_unsure(unsure[0])
                del unsure[0]
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

    async def _await_unsure(self, key: bytes) -> None:
        """Wait for a line that may be stored: if it is, it is under way and goes first."""
        sending = self._sending[key] = asyncio.get_running_loop().create_future()
        record = await self._ledger.find(key)
        if record is None or record.state.terminal:
            self._sending.pop(key, None)
        else:
            await asyncio.wait([sending])

    async def _submit(self, message: Message) -> None:
        await self._engine.put(Arrived(message))

    def read(self, conv: str, n: int) -> None:
        """Tell the others that everything up to `n` was read."""
        self._check_running()
        self._link.send(frames.encode(Frame("read", conv=conv, n=n)))

    def typing(self, conv: str) -> None:
        """Tell the others that you are typing."""
        self._check_running()
        self._link.send(frames.encode(Frame("typing", conv=conv)))

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, kind: str, data: object, as_: type[T]) -> T:
        """Ask the hub. Questions need no outbox: they are asked again on the next connection."""
        self._check_running()
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

    # ── receiving ────────────────────────────────────────────────────────────────────────────────

    async def news(self) -> AsyncIterator[News]:
        """Yield everything as it arrives: lines, receipts, typing, friends going online and offline; until
        the chat is stopped. A line is acknowledged when the next item is asked for."""
        async for restores, news in self._news.read():
            yield news
            if isinstance(news, Line) and restores == self._at.restores:
                self._at.read(news.conv, news.n)

    async def lines(self) -> AsyncIterator[Line]:
        """Yield lines, each once, in each conversation's order, including those missed while offline; until
        the chat is stopped."""
        async for news in self.news():
            if isinstance(news, Line):
                yield news

    def _acknowledge(self, conv: str, n: int) -> None:
        self._link.send(frames.encode(Frame("ack", conv=conv, n=n)))

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def _positions(self) -> dict[str, int]:
        return self._at.heard_to

    def _up(self, welcome: Frame) -> None:
        super()._up(welcome)
        for frame, _ in self._asked.values():
            self._link.send(frame)
        self._at.reconnected(welcome.cursors or {})
        self._offer(Reachable(""))

    def _heard(self, frame: Frame) -> None:
        match frame.type:
            case "server_ack" if frame.seq_id is not None:
                self._server_ack(frame.seq_id, frame)
            case "receipt" if frame.conv is not None and frame.n is not None:
                self._tell(receipt_of(frame))
            case "typing" if frame.conv is not None:
                self._tell(Typing(frame.conv, frame.from_ or ""))
            case "presence":
                self._tell(Presence(frame.from_ or "", frames.load(frame.data)))
            case _ if frame.conv is not None and frame.n is not None:
                if self._at.arrived(frame.conv, frame.n):
                    self._tell(line_of(frame))

    def _tell(self, news: News) -> None:
        self._news.add((self._at.restores, news))

    def _server_ack(self, seq_id: str, frame: Frame) -> None:
        if seq_id in self._asked:
            settle(self._asked[seq_id][1], frame)
            return
        key = key_of(self.name, seq_id)
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                if frame.conv is not None and frame.n is not None:
                    self._at.sent(frame.conv, frame.n)
                sent = SentLine(frame.conv or "", frame.n or 0, frames.load(frame.data))
                self._offer(Answered(key, State.DONE, Answer(0, msgspec.json.encode(sent))))
            case ServerCode.INTERNAL | None:
                pass  # the resend tries again
            case code:
                refusal = self._refused[key] = Refused(code, frame.error or "", frame.detail or "")
                self._offer(Answered(key, State.FAILED, Answer(code, b"", str(refusal)), burn=False))

    # ── answers of the outbox ────────────────────────────────────────────────────────────────────

    def _not_stored(self, message: Message, verdict: Verdict) -> None:
        if not verdict.retry:
            self._refused[message.key] = Refused(ServerCode.BAD_PARAMETERS, verdict.named, verdict.reason)
            self._end(message.key, State.FAILED, Answer())
            return
        # The local ledger failed, perhaps after storing the line, so that it may still go out. A second try
        # under the same id is harmless.
        self._unsure.setdefault(message.recipient, []).append(message.key)
        sending = self._sending.pop(message.key, None)
        if sending is not None and not sending.done():
            sending.set_exception(LedgerUnavailable(verdict.reason))

    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        sending, refusal = self._sending.pop(key, None), self._refused.pop(key, None)
        if sending is None or sending.done():
            return
        if state is State.DONE:
            sending.set_result(msgspec.json.decode(answer.data, type=SentLine))
            return
        if refusal is None and state is State.UNKNOWN:
            fail(sending, Unknown(answer.reason))
        else:
            fail(sending, refusal or Refused(answer.code, state.word, answer.reason))


async def _post(url: str, path: str, body: object, token: str = "") -> JsonObject:
    """Post to the first hub that is reachable. Once a hub has the request no other one is tried, since it may
    have been carried out."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    *others, last = hubs(url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as http:
        for hub in others:
            with suppress(aiohttp.ClientConnectorError):
                return await _post_to(http, f"{hub}/v1/{path}", body, headers)
        return await _post_to(http, f"{last}/v1/{path}", body, headers)


async def _post_to(
    http: aiohttp.ClientSession, url: str, body: object, headers: dict[str, str]
) -> JsonObject:
    async with http.post(url, data=msgspec.json.encode(body), headers=headers) as answer:
        said = msgspec.json.decode(await answer.read(), type=JsonObject)
        if answer.status == 401:
            raise NotAuthenticated(said["detail"])
        if answer.status >= 400:
            raise Refused(answer.status, said.get("error", ""), said.get("detail", ""))
        return said
