"""No input yields a 500: every endpoint with odd heads, paths, tokens, queries and bodies; odd first frames.

`DULY_FUZZ=100000` makes it go on for so many requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest

from duly.identity.accounts import Role
from tests.end_to_end.raw import bare, handshake, join, ws_frame
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.servers import Postgres

REQUESTS = int(os.environ.get("DULY_FUZZ", "1500"))
AT_ONCE = 50

PATHS = [
    "/v1/messages", "/v1/messages/{0}/{1}", "/v1/refusals", "/v1/state", "/v1/health", "/v1/openapi.json",
    "/metrics", "/healthz", "/readyz", "/v1/metrics", "/v1/metrics/{0}",
    "/v1/people", "/v1/login", "/v1/logout", "/v1/password", "/v1/alerts", "/v1/alerts/{0}/{1}", "/duly.js",
    "/duly_device.py", "/v1/ws", "/v1/admin/{0}", "/v1/admin/list", "/v1/admin/add",
    "/v1/admin/temporary_token", "/v1/admin/profile.set", "/v1/admin/alert.list", "/v1/admin/prune",
    "/v1/admin/grant", "/{0}", "*", "//", "/v1/alertmanager", "/v1/grafana", "/v1/cloudevents", "/v1/devices",
    "/v1/asyncapi.json", "/v1/schemas.json", "/duly_mqtt.py", "/page/session", "/page/login", "/page/logout",
    "/page/do/{0}", "/page/live", "/static/{0}", "/overview.json",
    "/%",
]  # fmt: skip
METHODS = ["GET"] * 6 + ["POST"] * 8 + ["PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW", "get"]
ODD = [
    b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"..", b"%00", b"%ff", b"%ud800", b"a" * 300,
    b"1" * 400,
    b"-1", b"1e999", b"NaN", b"phone", b"lock", b"1700000000000_1", b"9" * 30, b"\x1b[2J", b"'; --",
    b"\xc0\x80", b"\r", b"\t",
]  # fmt: skip
FIELDS = [
    "type", "seq_id", "to", "data", "exp", "queue", "order", "name", "password", "device", "old", "new",
    "code",
    "everywhere", "token", "cursors", "conv", "n", "state", "from", "profile", "role", "key", "limit", "urls",
]  # fmt: skip
TYPES = [
    "lock_control",
    "query",
    "one_chat",
    "history",
    "alert_event",
    "ack",
    "auth",
    "read",
    "group_create",
    "watch",
]
VALUES: list[object] = [
    None, True, 0, -1, 10**30, 1e308, "", "\0", "\ud800", "x" * 500, [], {}, [[]], {"a": None}, "phone",
    "lock",
    "1700000000000_1", 1700000000000, "\u202e", {"key": "k", "mode": "latest"}, {"profile_id": "home"},
]  # fmt: skip


class Fuzz:
    def __init__(self, rng: random.Random, tokens: list[bytes]) -> None:
        self.rng, self.tokens = rng, tokens

    def odd(self) -> bytes:
        rng = self.rng
        return rng.choice(ODD) if rng.random() < 0.8 else rng.randbytes(rng.randrange(1, 20))

    def body(self) -> bytes:
        rng = self.rng
        if rng.random() < 0.15:
            return self.odd()
        made = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(6))}
        if rng.random() < 0.7:
            made["type"] = rng.choice(TYPES)
        if rng.random() < 0.3:
            made = {name: str(value) for name, value in made.items()}
        text = json.dumps([made] * rng.choice((0, 1, 3)) if rng.random() < 0.1 else made).encode()
        if rng.random() < 0.1:
            cut = rng.randrange(len(text) + 1)
            text = text[:cut] + self.odd() + text[cut:]
        return text

    def request(self) -> bytes:
        rng = self.rng
        path = rng.choice(PATHS)
        for slot in ("{0}", "{1}"):
            path = path.replace(slot, quote_from_bytes(self.odd()))
        if rng.random() < 0.5:
            name = rng.choice(["limit", "before", "scope", "open", "wait", "status", "sentinel", "x"])
            path += f"?{name}={quote_from_bytes(self.odd(), safe='%')}"
        heads = [b"Host: localhost"] if rng.random() < 0.95 else [b"Host: " + self.odd()]
        token = rng.random()
        if token < 0.75:
            heads.append(b"Authorization: Bearer " + rng.choice(self.tokens))
        elif token < 0.9:
            heads.append(b"Authorization: " + rng.choice([b"Bearer ", b"", b"Basic "]) + self.odd())
        heads += [
            name + b": " + rng.choice([self.odd(), b"websocket", b"gzip", b"100-continue"])
            for name in (b"Idempotency-Key", b"Origin", b"Upgrade", b"Expect", b"Content-Encoding")
            if rng.random() < 0.05
        ]
        body = self.body() if rng.random() < 0.7 else b""
        length = b"%d" % len(body) if rng.random() < 0.97 else self.odd()
        heads.append(b"Content-Length: " + length)
        heads.append(b"Connection: close")
        return b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b" % (
            rng.choice(METHODS).encode(), path.encode(), b"\r\n".join(heads), body,
        )  # fmt: skip


@pytest.fixture(params=["sqlite", "postgres"])
async def local(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalHub]:
    more = {}
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres_server")
        more["ledger"] = server.create_database()
    it = LocalHub(tmp_path / "hub", **more)
    await it.start()
    for role, name in (
        (Role.APP, "phone"),
        (Role.DEVICE, "lock"),
        (Role.USER, "ann"),
        (Role.SENTINEL, "gate"),
    ):
        await it.add(role, name)
    await it.add(Role.ADMIN, "root")
    yield it
    await it.stop()


async def test_no_request_is_answered_with_500(local: LocalHub, caplog: pytest.LogCaptureFixture) -> None:
    fuzz = Fuzz(random.Random(7), [token.encode() for token in local.tokens.values()])
    statuses: dict[bytes, int] = {}

    async def send(raw: bytes) -> None:
        async with bare(local.url) as one:
            await one.send(raw)
            try:
                async with asyncio.timeout(3):
                    status = (await one.reader.read(64)).split(b" ")[1:2]
            except (TimeoutError, ConnectionError):
                status = [b"none"]
            word = status[0] if status else b"none"
            statuses[word] = statuses.get(word, 0) + 1
            assert word != b"500", raw

    with caplog.at_level(logging.ERROR):
        for _ in range(0, REQUESTS, AT_ONCE):
            await asyncio.gather(*(send(fuzz.request()) for _ in range(AT_ONCE)))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text[:4000]
    assert len(statuses) > 5, statuses
    async with join(local.url, await local.hub.accounts.add(Role.APP, "witness")):
        pass


async def test_every_endpoint_is_fuzzed(local: LocalHub) -> None:
    async with bare(local.url) as one:
        await one.send(b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(GUARD):
            _, _, body = (await one.reader.read()).partition(b"\r\n\r\n")
    documented = {re.sub(r"\{\w+\}", "{}", path) for path in json.loads(body)["paths"]}
    assert documented <= {re.sub(r"\{\w+\}", "{}", path) for path in PATHS}


async def test_no_first_frame_harms_another_client(local: LocalHub, caplog: pytest.LogCaptureFixture) -> None:
    fuzz = Fuzz(random.Random(8), [b"x"])

    async def send(n: int) -> None:
        async with bare(local.url) as one:
            await one.send(handshake(local.url))
            auth = json.dumps(
                {"type": "auth", "token": fuzz.rng.choice(VALUES), "cursors": fuzz.rng.choice(VALUES)}
            )
            body = fuzz.body() if fuzz.rng.random() < 0.6 else auth.encode()
            await one.send(ws_frame(body, fuzz.rng.choice((1, 1, 1, 1, 2, 9, 0, 3))) + ws_frame(b"", 8))
            said = await one.gone()
            assert b" 101 " in said or not said

    for _ in range(0, REQUESTS // 5, AT_ONCE):
        await asyncio.gather(*(send(n) for n in range(AT_ONCE)))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text[:4000]


@pytest.mark.parametrize("token", [b"\xff", b"\0", b"\xed\xa0\x80", b"a\x01b", "ü".encode()])
async def test_an_odd_token_is_an_unknown_one_and_the_guard_counts_it(local: LocalHub, token: bytes) -> None:
    heads = b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n" % token
    said = set()
    async with bare(local.url) as one:
        for _ in range(100):
            await one.send(heads)
            async with asyncio.timeout(GUARD):
                head = await one.reader.readuntil(b"\r\n\r\n")
                said.add(head.split(b" ")[1])
                if b" 400 " in head:
                    break  # not even HTTP
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await one.reader.readexactly(length)
            if b"429" in said:
                break
    assert said in ({b"401", b"429"}, {b"400"})


@pytest.mark.parametrize(
    "body", [b'{"a":' * 2000, b'{"name":"ann","a":' + b"[" * 8000], ids=["objects", "arrays"]
)
async def test_a_deeply_nested_body_is_malformed_at_every_endpoint(
    local: LocalHub, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    said = {}
    for path in (path for path in PATHS if "{" not in path and path.startswith("/v1/")):
        for token in (local.tokens["phone"], local.tokens["root"]):
            heads = b"POST %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n" % (
                path.encode(), token.encode(),
            )  # fmt: skip
            kind = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            async with bare(local.url) as one:
                await one.send(heads + kind + body)
                async with asyncio.timeout(GUARD):
                    said[path, token] = (await one.reader.read(64)).split(b" ")[1]
    assert b"500" not in said.values(), said
    assert said["/v1/login", local.tokens["phone"]] == b"400"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text[:4000]
