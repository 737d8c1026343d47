"""Nonsense by the thousand.

The law: whatever is sent, the hub answers with a code or closes that one connection. It stays up, its memory
stays bounded, it complains about nothing of its own, and everybody else is served as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.processes import HubProcess
from tests.end_to_end.raw import Json, Peer, bare, curl, dial, handshake, join, ws_frame
from tests.proof import TWO_SIZES, count
from tests.stopwatch import Stopwatch

MEMORY = 64 * 1024 * 1024
"""How much a hub may grow under all that: its own caches, and no more."""

FIELDS = [
    "type", "seq_id", "to", "from", "data", "exp", "queue", "order", "code", "state", "error", "detail",
    "cursor", "token", "cursors", "you", "time",
]  # fmt: skip
WRONG: list[Any] = [
    None, True, 0, -1, 2**63, 10**40, 1.5, 1e308, "", "x", "\0", "\ud800", "é" * 300, [], [[]], {}, {"a": {}},
    {"key": "\ud800", "mode": "latest"}, {"key": 5}, {"mode": None}, {"key": "k" * 300}, {"after": 2**70},
    {"lock": 2**70}, {"lock": "x"},
]  # fmt: skip
TYPES = ["lock_control", "media_download_chunk", "ack", "event_report", "device_status", "auth", "watch"]

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
frame_like = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES) | anything},
    optional={name: st.sampled_from(WRONG) | anything for name in FIELDS if name != "type"},
)
bytes_of_frames = (
    st.binary(max_size=60)
    | st.text(max_size=60).map(lambda text: text.encode(errors="surrogatepass"))
    | anything.map(lambda value: json.dumps(value).encode())
    | frame_like.map(lambda value: json.dumps(value).encode())
    | frame_like.map(lambda value: json.dumps(value).encode()[:-2])
)


class World:
    """A hub in a process of its own, and a witness: a phone and a lock that must not notice anything."""

    def __init__(self, hub: HubProcess, tokens: dict[str, str], phone: Peer, lock: Peer) -> None:
        self.hub, self.tokens, self._phone, self._lock = hub, tokens, phone, lock

    async def witness(self) -> None:
        took = Stopwatch(self.hub.pid)
        seq_id = await self._phone.command("lock", data={"open": True})
        assert (await self._lock.obey())["seq_id"] == seq_id
        ack = await self._phone.first(lambda f: f["type"] == "ack" and f["seq_id"] == seq_id)
        assert ack["state"] == "done"
        assert took.seconds < 3
        self._phone._ahead.clear()


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    hub = HubProcess(folder)
    tokens = await hub.prepare(["phone", "tablet"], ["lock", "lamp"])
    await hub.start()
    try:
        async with join(hub.url, tokens["phone"]) as phone, join(hub.url, tokens["lock"]) as lock:
            it = World(hub, tokens, phone, lock)
            await it.witness()
            before = hub.memory
            yield it
            await it.witness()
            assert hub.alive
            assert hub.memory - before < MEMORY
            assert hub.errors == "", "it answered, but was surprised"
    finally:
        await hub.kill()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def throw(peer: Peer, texts: list[str]) -> list[Json]:
    """Send them all; as many answers as an app gets."""
    for text in texts:
        await peer.say_text(text)
    answers: list[Json] = []
    while len(answers) < len(texts):
        answers.append(await peer.first(lambda f: f["type"] == "server_ack"))
    return answers


async def attack(at: World, who: str, frames: list[bytes]) -> None:
    """One connection that sends these as text frames, whatever is in them."""
    async with bare(at.hub.url) as raw:
        await raw.send(handshake(at.hub.url))
        auth = json.dumps({"type": "auth", "token": at.tokens[who]}).encode()
        await raw.send(ws_frame(auth) + b"".join(map(ws_frame, frames)) + ws_frame(b"", 8))
        said = await raw.gone()
    assert b'"welcome"' in said
    assert b'"code":0' not in said


def examples(whole: bool, most: int) -> settings:
    """So many examples in all, a fifth of them in one round."""
    most = most if whole else most // 5
    return settings(max_examples=most, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@TWO_SIZES
@pytest.mark.parametrize("who", ["tablet", "lamp"])
def test_what_hypothesis_thinks_of(tmp_path: Path, runner: asyncio.Runner, who: str, whole: bool) -> None:
    with contextlib.ExitStack() as stack:
        context = world(tmp_path / "hub")
        at = runner.run(context.__aenter__())
        stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))

        @examples(whole, 60)
        @given(st.lists(bytes_of_frames, min_size=20, max_size=40))
        def throw_it(frames: list[bytes]) -> None:
            count("hostile input", len(frames))
            runner.run(attack(at, who, frames))
            runner.run(at.witness())

        throw_it()


@TWO_SIZES
def test_strangers_are_told_code_3_or_hung_up_on(tmp_path: Path, runner: asyncio.Runner, whole: bool) -> None:
    async def introduce(at: World, frame: bytes) -> None:
        async with bare(at.hub.url) as raw:
            await raw.send(handshake(at.hub.url) + ws_frame(frame) + ws_frame(b"", 8))
            said = await raw.gone()
        assert b'"welcome"' not in said
        assert b'"code":3' in said or said.count(b"{") == 0

    with contextlib.ExitStack() as stack:
        context = world(tmp_path / "hub")
        at = runner.run(context.__aenter__())
        stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))

        @examples(whole, 150)
        @given(
            bytes_of_frames
            | anything.map(lambda value: json.dumps({"type": "auth", "token": value}).encode())
        )
        def throw_it(frame: bytes) -> None:
            count("hostile input", 1)
            runner.run(introduce(at, frame))

        throw_it()


@TWO_SIZES
def test_http_bodies_keys_and_queries(tmp_path: Path, runner: asyncio.Runner, whole: bool) -> None:
    async def post(at: World, body: bytes, key: str, query: dict[str, str]) -> None:
        headers = {"Authorization": f"Bearer {at.tokens['tablet']}"} | (
            {"Idempotency-Key": key} if key else {}
        )
        async with aiohttp.ClientSession(at.hub.url, headers=headers) as http:
            async with http.post("/v1/messages", data=body) as answer:
                assert answer.status in (200, 202, 400, 403, 409, 413, 422, 503), await answer.text()
                await answer.json()
            async with http.get("/v1/messages", params=query) as answer:
                assert answer.status in (200, 400), await answer.text()
            async with http.get(f"/v1/messages/tablet/{quote(key or 'x', safe='')}") as answer:
                assert answer.status in (200, 400, 404, 413), await answer.text()

    with contextlib.ExitStack() as stack:
        context = world(tmp_path / "hub")
        at = runner.run(context.__aenter__())
        stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))

        @examples(whole, 150)
        @given(
            bytes_of_frames | st.lists(frame_like, max_size=3).map(lambda value: json.dumps(value).encode()),
            st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=20).map(str.strip),
            st.dictionaries(st.sampled_from(["limit", "before", "open", "scope"]), st.text(max_size=8)),
        )
        def throw_it(body: bytes, key: str, query: dict[str, str]) -> None:
            count("hostile input", 3)
            runner.run(post(at, body, key, query))

        throw_it()


async def test_every_field_with_every_wrong_value(tmp_path: Path) -> None:
    """Each frame of an app gets an answer with a code, and none of them says that it is our fault."""
    async with world(tmp_path / "hub") as at, join(at.hub.url, at.tokens["tablet"]) as peer:
        thrown = 0
        for type, field in itertools.product(TYPES, FIELDS):
            frame = {"type": type, "to": "lamp", "code": 0, "order": False}
            texts = [json.dumps(frame | {"seq_id": peer.ids(), field: wrong}) for wrong in WRONG]
            answers = await throw(peer, texts)
            assert {answer["code"] for answer in answers} <= {0, 1, 2, 3, 5}, (type, field)
            thrown += len(texts)
        assert await peer.hears_nothing(0.05), "one answer each"
        assert thrown > 2_500


async def test_every_field_of_a_device_with_every_wrong_value(tmp_path: Path) -> None:
    async with world(tmp_path / "hub") as at, join(at.hub.url, at.tokens["lamp"]) as peer:
        for type, field in itertools.product(TYPES, FIELDS):
            frame = {"type": type, "seq_id": "1_1", "to": "phone", "code": 0}
            for wrong in WRONG:
                await peer.say_text(json.dumps(frame | {field: wrong}))
            await peer.say("No-Such-Type", seq_id="the end")
            await peer.hear_of("the end")
            codes = {said["code"] for said in peer._ahead if said["type"] == "server_ack"}
            # A push with an id that can be one is stored; everything else is refused.
            stored = {0, 5} if type == "event_report" or field == "type" else set()
            assert codes <= {2, 3} | stored, (type, field)
            peer._ahead.clear()


BROKEN_FRAMES: Final = [
    ws_frame(b"{", final=False) * 3,  # a new message inside another
    ws_frame(b"x", 0),  # the rest of nothing
    ws_frame(b"x", 3), ws_frame(b"x", 11),  # no such opcode
    ws_frame(b"x" * 200, 9),  # a ping that is too long
    ws_frame(b"x", 8),  # half a close code
    b"\x71\x81abcdx",  # reserved bits
    b"\x81\xff" + b"\xff" * 8,  # 2^64 bytes to come
    ws_frame(b"y" * 100_000, final=False) + ws_frame(b"y" * 100_000, 0, final=False) * 12,
    bytes(range(256)) * 40,
]  # fmt: skip
"""Bytes after an upgrade that are no WebSocket frames."""
NO_HTTP: Final = [
    b"\0" * 100_000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000,
    b"GET /v1/ws HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    b"POST /v1/messages HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/messages HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    b"GET http://[::1 HTTP/1.1\r\n\r\n",
]
"""Bytes on a new connection that are no HTTP request."""


async def test_huge_deep_binary_and_broken(tmp_path: Path) -> None:
    """What is over a limit is refused with a word; far beyond it the connection is closed with a reason."""
    async with world(tmp_path / "hub") as at:
        deep = '{"type":"query","seq_id":"%s","to":"lamp","data":%s}'
        async with join(at.hub.url, at.tokens["tablet"]) as peer:
            for depth in (33, 1_000, 40_000):
                texts = [deep % (peer.ids(), "[" * depth + "]" * depth), deep % (peer.ids(), '{"a":' * depth)]
                assert [a["error"] for a in await throw(peer, texts)] == ["malformed"] * 2
            flat = deep % (peer.ids(), json.dumps("[{" * 50_000))
            assert [a["error"] for a in await throw(peer, [flat])] == ["offline"], "text is not depth"
            for _ in range(3):
                await peer.socket.send_bytes(b"\x00\xff{}")
                answer = await peer.hear()
                assert (answer["code"], answer["error"]) == (2, "malformed")
            await peer.socket.send_frame(b'{"type":"\xff\xfe\xfa"}', aiohttp.WSMsgType.TEXT)
            assert "UTF-8" in (await peer.hear())["detail"]
        async with join(at.hub.url, at.tokens["tablet"]) as peer:
            for size in (256 * 1024, 300 * 1024, 1024 * 1024 - 100):
                await peer.say_text(deep % ("the-id", json.dumps("x" * size)))
                said = await peer.hear()
                assert (said["seq_id"], said["code"], said["error"]) == ("the-id", 2, "too_large")
            await peer.say("query", to="lamp", seq_id=peer.ids())
            assert (await peer.hear())["error"] == "offline", "the connection has survived it"
        async with bare(at.hub.url) as raw:
            await raw.upgrade(at.hub.url, at.tokens["tablet"])
            await raw.send(ws_frame(b"x" * (1024 * 1024 + 1))[:1_000])  # what it announces is enough
            said_at_last = await raw.gone()
            assert b"\x03\xf1a frame of more than 1048576 bytes; the limit is 262144" in said_at_last, "1009"
        largest = deep % ("%s", json.dumps("x" * (256 * 1024 - 200)))
        async with join(at.hub.url, at.tokens["tablet"]) as peer:
            assert [a["error"] for a in await throw(peer, [largest % peer.ids()])] == ["offline"]
        for junk in BROKEN_FRAMES:
            async with bare(at.hub.url) as raw:
                await raw.upgrade(at.hub.url, at.tokens["tablet"])
                await raw.send(junk)
                await raw.gone()
        for junk in NO_HTTP:
            async with bare(at.hub.url) as raw:
                await raw.send(junk)
                assert b" 4" in (await raw.gone())[:13]


async def test_connections_that_come_and_go(tmp_path: Path) -> None:
    """Cut at any byte of a session, hundreds of times."""
    async with world(tmp_path / "hub") as at:
        session = handshake(at.hub.url) + ws_frame(
            json.dumps({"type": "auth", "token": at.tokens["lamp"]}).encode()
        )
        session += ws_frame(b'{"type":"event_report","data":1}') * 3

        async def cut(at_byte: int) -> None:
            async with bare(at.hub.url) as raw:
                await raw.send(session[:at_byte])

        for start in range(0, len(session), 40):
            await asyncio.gather(*(cut(n) for n in range(start, min(start + 40, len(session)), 2)))
        await at.witness()


async def test_wrong_tokens_from_one_address_lock_no_other_out(tmp_path: Path) -> None:
    """One device with an old token, behind the same router as everybody else."""
    async with world(tmp_path / "hub") as at:
        said = []
        for n in range(30):
            async with dial(at.hub.url) as stranger:
                await stranger.say("auth", token=f"duly_{n}")
                said.append((await stranger.hear())["detail"])
        assert "too many" in said[-1], "guessing is slowed down"
        async with join(at.hub.url, at.tokens["tablet"]):
            pass
        assert (await curl(f"{at.hub.url}/v1/messages", at.tokens["tablet"])).status == 200
