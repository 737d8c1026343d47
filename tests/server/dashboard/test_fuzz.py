"""Nothing that a visitor sends to the page's API is answered with 500, and text stays text."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.local_hub import LocalHub
from tests.server.dashboard.visiting import PageVisitor

TEXTS = (
    "", "x", "0", "-1", "1" * 30, "null", "\u0000", "\ud83d\ude00", "é" * 300, "<script>alert(1)</script>",
    "' OR 1=1 --", "../../etc/passwd", "{", "[" * 2_000, "a/b", "%2e%2e", "9" * 400, "true",
    "1794900000000_1",
    "0190a0c0-0000-7000-8000-000000000000", "inf", "nan", "1e400", "open", "dead", "done",
)  # fmt: skip
FIELDS = (
    "id", "scope", "to", "kind", "state", "since", "until", "limit", "before", "after", "name", "only",
    "span",
    "sentinel", "event", "status", "recipient", "url", "device", "type", "data", "queue", "why", "note", "as",
    "new_id", "lasts", "reason", "profile", "silence", "session", "critical", "by", "draft",
)  # fmt: skip
ROUNDS = 40


@pytest.fixture
async def ann(local: LocalHub) -> AsyncIterator[PageVisitor]:
    async with PageVisitor(local) as visitor:
        yield visitor


def some(draw: random.Random) -> dict[str, str]:
    return {draw.choice(FIELDS): draw.choice(TEXTS) for _ in range(draw.randrange(6))}


@pytest.mark.parametrize("seed", range(3))
async def test_no_question_is_answered_with_500(local: LocalHub, ann: PageVisitor, seed: int) -> None:
    draw = random.Random(seed)
    for view in local.hub.dashboard.views:
        for _ in range(ROUNDS):
            query = some(draw)
            async with ann.http.get(f"/{view}.json", params=query) as answer:
                assert answer.status in (200, 400, 404), (view, query, await answer.text())


@pytest.mark.parametrize("seed", range(3))
async def test_no_action_is_answered_with_500(local: LocalHub, ann: PageVisitor, seed: int) -> None:
    draw = random.Random(seed)
    for action in local.hub.dashboard.actions:
        for _ in range(ROUNDS):
            wanted = some(draw)
            status, said = await ann.act(action, **wanted)
            assert status in (200, 400, 404, 413, 429), (action, wanted, said)


BODIES: tuple[Any, ...] = (
    b"", b"{", b"[]", b"null", b'{"a":1}', b'{"a":[]}', b"\xff\xfe", b'"x"', b"{" * 50_000, b"0" * 20_000,
    json.dumps({"link": "x" * 15_000}).encode(), b'{"link":1}', b'{"name":"\\ud800","password":"x"}',
)  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/page/login", "/page/logout", "/page/do/alert.ack", "/page/do/nonsense", "/ack"]
)
async def test_no_body_is_answered_with_500(local: LocalHub, ann: PageVisitor, path: str) -> None:
    for body in BODIES:
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
            heads = {"X-CSRF-Token": ann.csrf, "Content-Type": kind}
            async with ann.http.post(path, data=body, headers=heads) as answer:
                assert answer.status < 500, (path, body[:50], await answer.text())


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../access.py", "/static/%2e%2e/access.py", "/static/x", "/static/vendor"]
)
async def test_only_the_files_of_the_page_are_served(ann: PageVisitor, path: str) -> None:
    async with ann.http.get(path) as answer:
        assert answer.status == 404


@pytest.mark.parametrize("cookie", ["", "x", "\xe4" * 10, "a" * 5_000])
async def test_no_cookie_is_answered_with_500(local: LocalHub, ann: PageVisitor, cookie: str) -> None:
    heads = {"Cookie": f"duly_session_{local.port}={cookie}"}
    ann.http.cookie_jar.clear()
    async with ann.http.get("/overview.json", headers=heads) as answer:
        assert answer.status in (400, 401)
