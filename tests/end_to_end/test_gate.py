"""Pages of other origins, and names that are not the hub's: a foreign page cannot register, log in, chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.errors import Malformed
from duly.settings import Settings, load
from duly.transports.http.gate import RequestGate
from tests.end_to_end.raw import curl
from tests.local_hub import LocalHub

EVIL = "http://evil.example"
PERSON = {"name": "ann", "password": "correct horse battery"}


def port(local: LocalHub) -> int:
    return int(local.url.rsplit(":", 1)[1])


def origin(value: str) -> list[str]:
    return ["-H", f"Origin: {value}"]


@pytest.mark.parametrize("foreign", [EVIL, "null", "http://127.0.0.1:1", "https://localhost", "file://"])
async def test_a_foreign_page_does_nothing_here(local: LocalHub, foreign: str) -> None:
    for path in ("people", "login", "logout", "password", "messages", "admin/list", "nothing"):
        said = await curl(f"{local.url}/v1/{path}", None, *origin(foreign), body=PERSON)
        assert (said.status, said.json["error"]) == (403, "not_allowed"), path
        assert "access-control-allow-origin" not in said.headers
        preflight = await curl(f"{local.url}/v1/{path}", None, *origin(foreign), "-X", "OPTIONS")
        assert preflight.status == 403
    assert "ann" not in {account.name for account in local.hub.accounts.list()}
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"{local.url}/v1/ws", headers={"Origin": foreign})
        assert refused.value.status == 403


async def test_duly_why_shows_which_page_and_which_name_were_refused(local: LocalHub) -> None:
    for _ in range(3):
        await curl(f"{local.url}/v1/people", None, *origin(EVIL), body=PERSON)
    await curl(f"{local.url}/v1/health", None, "-H", f"Host: evil.example:{port(local)}")
    await local.hub.activity.settle()
    reasons = {one.reason for one in await local.hub.ledger.refusals() if one.id == "page"}
    assert any(f"a page of '{EVIL}' may not use this hub" in reason for reason in reasons)
    assert any("does not answer to 'evil.example'" in reason for reason in reasons)


async def test_what_a_foreign_page_may_get_it_may_not_read_but_for_the_client(local: LocalHub) -> None:
    said = await curl(f"{local.url}/v1/health", None, *origin(EVIL))
    assert said.status == 200
    assert "access-control-allow-origin" not in said.headers
    said = await curl(f"{local.url}/duly.js", None, *origin(EVIL))
    assert said.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_the_hubs_own_page_may(local: LocalHub, name: str) -> None:
    own = f"http://{name}:{port(local)}"
    said = await curl(f"{own}/v1/people", None, *origin(own), body=PERSON)
    assert said.status == 201
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{own}/v1/ws", headers={"Origin": own}) as ws,
    ):
        await ws.send_json({"type": "auth", "token": local.tokens["phone"]})
        assert (await ws.receive_json())["type"] == "welcome"


async def test_a_page_that_the_hub_names_may(tmp_path: Path) -> None:
    local = LocalHub(tmp_path / "hub", origins=["https://app.example"])
    await local.start()
    page = origin("https://app.example")
    said = await curl(f"{local.url}/v1/people", None, *page, body=PERSON)
    assert (said.status, said.headers["access-control-allow-origin"]) == (201, "https://app.example")
    preflight = await curl(f"{local.url}/v1/messages", None, *page, "-X", "OPTIONS")
    assert preflight.status == 204
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert (await curl(f"{local.url}/v1/login", None, *origin(EVIL), body=PERSON)).status == 403
    await local.stop()


async def test_a_hub_on_this_machine_answers_to_no_name_of_a_stranger(local: LocalHub) -> None:
    """DNS rebinding: the page's own name leads to us, so its requests are of its own origin."""
    rebound = f"evil.example:{port(local)}"
    token = local.tokens["phone"]
    for path, more in (("people", PERSON), ("messages", {"type": "query", "seq_id": "1_1", "to": "lock"})):
        for extra in ([], origin(f"http://{rebound}")):
            said = await curl(f"{local.url}/v1/{path}", token, "-H", f"Host: {rebound}", *extra, body=more)
            assert (said.status, said.json["error"]) == (403, "not_allowed")
    assert (await curl(f"{local.url}/v1/health", None, "-H", f"Host: {rebound}")).status == 403
    # a balancer's check of HTTP/1.0 names no host, and is no page
    assert (await curl(f"{local.url}/v1/health", None, "--http1.0", "-H", "Host:")).status == 200


def test_beyond_this_machine_the_own_origin_is_the_host_that_was_asked() -> None:
    gate = RequestGate([], None, lambda part: None, lambda reason: None)
    assert gate.knows("https://hub.example", "hub.example")
    assert gate.knows("https://hub.example:8443", "hub.example:8443")
    assert not gate.knows("https://evil.example", "hub.example")
    assert not gate.knows("null", "hub.example")
    assert not gate.knows("https://hub.example", "")


def test_origins_are_set_by_flag_and_environment_and_checked(tmp_path: Path) -> None:
    two = ["https://a.example", "http://localhost:8080"]
    assert load({}, {"DULY_ORIGINS": ",".join(two)}, tmp_path).origins == two
    assert load({"origins": two[:1]}, {}, tmp_path).origins == two[:1]
    for wrong in ("a.example", "https://a.example/path", "*", "null"):
        with pytest.raises(Malformed, match="an origin looks like"):
            Settings(origins=[wrong])


async def test_who_has_to_wait_is_told_how_long(local: LocalHub) -> None:
    """429 with Retry-After, and the seconds in the body."""
    said: Any = None
    for _ in range(100):
        said = await curl(f"{local.url}/v1/state", "duly_wrong")
        if said.status == 429:
            break
    assert said.status == 429
    assert said.json["error"] == "too_many_logins"
    assert int(said.headers["retry-after"]) >= said.json["retry_after"] > 0
