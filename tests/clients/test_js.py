"""`duly.js` in a real browser, against a real hub and a real device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from duly.clients.device import Command, Device
from duly.errors import DeviceError
from duly.identity.accounts import Role
from duly.server.hub import Hub
from tests import servers
from tests.browsers import browser
from tests.end_to_end.many import LocalCluster
from tests.guard import GUARD
from tests.local_hub import LocalHub

__all__ = ["browser"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = """<!doctype html><meta charset="utf-8"><script type="module">
const hub = new URLSearchParams(location.search).get("hub");
const { App, Chat, Sentinel } = await import(`${hub}/duly.js`);
Object.assign(globalThis, { hub, Chat, Sentinel });
globalThis.open = (token, options, hubs = hub) => {
  globalThis.app = new App(hubs, token, options);
  globalThis.told = [];
  for (const event of ["push", "gap", "end", "down"]) app.on(event, (what) => told.push([event, what]));
  return app.ready;
};
// What a promise came to, as something that can leave the page.
globalThis.seen = (promise) => promise.then(
  (value) => value, ({ name, code, error, message }) => ({ name, code, error, message }));
globalThis.loaded = true;
</script>"""


class LockAtWork:
    """A device: what it has done, and a door in the middle of doing it."""

    def __init__(self, local: LocalHub) -> None:
        self.effects: list[str] = []
        self.free = asyncio.Event()
        self.free.set()
        self.device = Device(local.url, local.tokens["lock"])

        @self.device.on("lock_control")
        async def lock_control(command: Command) -> dict[str, Any]:
            self.effects.append(command.id)
            await self.free.wait()
            return {"open": command.data["open"]}

        @self.device.on("query")
        async def query(command: Command) -> None:
            raise DeviceError(3, "the sensor is broken")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site() -> AsyncIterator[str]:
    """The app's own web server: not the hub, and up while the hub is down."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=PAGE if request.path == "/" else "", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/empty", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path, site: str) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", origins=[site])
    await it.start()
    await it.add(Role.APP, "phone", "tablet")
    await it.add(Role.DEVICE, "lock")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def lock(local: LocalHub) -> AsyncIterator[LockAtWork]:
    it = LockAtWork(local)
    async with it.device:
        yield it


class Tab:
    """A page of the app."""

    def __init__(self, page: Any, site: str, local: LocalHub | Hub) -> None:
        self.page = page
        self._site = site
        self._place = local
        page.set_default_timeout(20_000)

    async def load(self) -> None:
        await self.page.goto(f"{self._site}/?hub={self._place.url}")
        await self.page.wait_for_function("globalThis.loaded")

    async def open(self, name: str = "phone", **options: Any) -> Any:
        assert isinstance(self._place, LocalHub)
        return await self.do(f"seen(open({json.dumps(self._place.tokens[name])}, {json.dumps(options)}))")

    async def do(self, script: str) -> Any:
        async with asyncio.timeout(GUARD):
            return await self.page.evaluate(f"async () => await ({script})")

    async def until(self, condition: str) -> None:
        await self.page.wait_for_function(condition, polling=10)

    async def told(self, *events: str) -> list[Any]:
        """What the app was told, except that the device comes and goes."""
        told = [what for event, what in await self.do("told") if event in events]
        return [what for what in told if what.get("type") != "device_status"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def first_page(browser: Any) -> Any:
    """A page that the tests use one after the other: a process of the browser takes a second to start."""
    return await (await browser.new_context()).new_page()


@pytest_asyncio.fixture(loop_scope="module")
async def kept(first_page: Any, site: str, local: LocalHub) -> AsyncIterator[Any]:
    """That page, which leaves the hub before it is stopped, and forgets what it has stored."""
    yield first_page
    for page in first_page.context.pages[1:]:
        await page.close()
    await first_page.goto(f"{site}/empty")
    tools = await first_page.context.new_cdp_session(first_page)
    await tools.send("Storage.clearDataForOrigin", {"origin": site, "storageTypes": "all"})
    await tools.detach()


@pytest_asyncio.fixture(loop_scope="module")
async def tab(kept: Any, site: str, local: LocalHub) -> Tab:
    tab = Tab(kept, site, local)
    await tab.load()
    return tab


async def test_the_hub_serves_the_module(local: LocalHub) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{local.url}/duly.js") as answer:
        assert answer.content_type == "text/javascript"
        assert await answer.read() == files("duly").joinpath("clients/js/duly.js").read_bytes()


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_is_done_and_its_answer_comes_back(tab: Tab, lock: LockAtWork) -> None:
    await tab.open()
    ack = await tab.do("app.send('lock', 'lock_control', {open: true})")
    assert (ack["state"], ack["code"], ack["data"]) == ("done", 0, {"open": True})
    assert len(lock.effects) == 1


async def test_a_devices_failure_has_its_code_and_reason(tab: Tab, lock: LockAtWork) -> None:
    await tab.open()
    ack = await tab.do("app.send('lock', 'query')")
    assert (ack["state"], ack["code"], ack["detail"]) == ("failed", 3, "the sensor is broken")


async def test_an_offline_device_is_refused_and_the_same_id_may_be_tried_again(
    tab: Tab, local: LocalHub
) -> None:
    await tab.open()
    refused = await tab.do(
        "app.post('lock', 'lock_control', {open: true})"
        ".then(async (command) => [command.id, await seen(command.ended)])"
    )
    assert (refused[1]["name"], refused[1]["code"], refused[1]["error"]) == ("Refused", 1, "offline")
    lock = LockAtWork(local)
    async with lock.device:
        ack = await tab.do(f"app.send('lock', 'lock_control', {{open: true}}, {{id: '{refused[0]}'}})")
        assert ack["state"] == "done"
    assert lock.effects == [refused[0]]


async def test_a_queued_command_waits_for_its_device(tab: Tab, local: LocalHub) -> None:
    await tab.open()
    await tab.do("app.post('lock', 'lock_control', {open: true}, {queue: true, expires: 60})"
                 ".then((it) => { globalThis.command = it; return it.accepted; })")  # fmt: skip
    lock = LockAtWork(local)
    async with lock.device:
        assert (await tab.do("command.ended"))["state"] == "done"
    assert len(lock.effects) == 1


async def test_what_is_refused_says_why(tab: Tab, lock: LockAtWork) -> None:
    await tab.open("tablet")
    refused = await tab.do("seen(app.send('lock', 'lock_control', {open: true}))")
    assert (refused["name"], refused["code"]) == ("Refused", 3)
    refused = await tab.do("seen(app.send('lock', 'lock_control', 'x'.repeat(300_000)))")
    assert (refused["code"], refused["error"]) == (2, "too_large")
    refused = await tab.do("seen(app.send('lock', 'lock_control', {}, {expires: -1}))")
    assert lock.effects == []


async def test_a_wrong_token_is_refused(tab: Tab, local: LocalHub) -> None:
    local.tokens["stranger"] = "duly_nonsense"
    assert (await tab.open("stranger"))["code"] == 3
    refused = await tab.do("seen(app.send('lock', 'lock_control', {open: true}))")
    assert (refused["name"], refused["code"]) == ("Refused", 3)


async def test_a_repeat_is_answered_and_not_run(tab: Tab, lock: LockAtWork) -> None:
    await tab.open()
    first = await tab.do(
        "app.post('lock', 'lock_control', {open: true}).then((it) => it.ended.then(() => it.id))"
    )
    ack = await tab.do(f"app.send('lock', 'lock_control', {{open: true}}, {{id: '{first}'}})")
    assert (ack["state"], ack["data"]) == ("done", {"open": True})
    conflict = await tab.do(f"seen(app.send('lock', 'lock_control', {{open: false}}, {{id: '{first}'}}))")
    assert (conflict["code"], conflict["error"]) == (2, "id_conflict")
    assert lock.effects == [first]


async def test_a_restart_of_the_hub_in_the_middle_is_survived(
    tab: Tab, local: LocalHub, lock: LockAtWork
) -> None:
    await tab.open()
    lock.free.clear()
    await tab.do("void (globalThis.ended = app.send('lock', 'lock_control', {open: true}))")
    await _until(lambda: bool(lock.effects))
    await local.stop()
    await tab.until("!app.connected")
    await tab.do("void (globalThis.later = app.send('lock', 'lock_control', {open: false}, {queue: true}))")
    lock.free.set()
    await local.start()
    assert [(await tab.do(which))["data"] for which in ("ended", "later")] == [
        {"open": True},
        {"open": False},
    ]
    assert len(lock.effects) == len(set(lock.effects)) == 2


async def test_a_command_survives_a_reload_of_its_page(tab: Tab, lock: LockAtWork) -> None:
    await tab.open(keep=True)
    lock.free.clear()
    id_ = await tab.do("app.post('lock', 'lock_control', {open: true}).then((it) => it.id)")
    await _until(lambda: bool(lock.effects))
    await tab.load()
    await tab.open(keep=True)
    lock.free.set()
    await tab.until("told.some(([event]) => event === 'end')")
    (end,) = await tab.told("end")
    assert (end["id"], end["device"], end["ack"]["data"]) == (id_, "lock", {"open": True})
    assert lock.effects == [id_]
    assert await tab.do("Object.keys(localStorage).filter((key) => key.includes('command'))") == []


async def test_ids_never_repeat_in_no_tab_and_after_no_reload(
    kept: Any, site: str, local: LocalHub, lock: LockAtWork
) -> None:
    ids: list[str] = []
    tabs = [Tab(page, site, local) for page in (kept, await kept.context.new_page())]
    for _ in range(2):
        for tab in tabs:
            await tab.load()
            await tab.open()
        sending = (
            "Promise.all(Array.from({length: 10}, () => app.post('lock', 'lock_control', {open: true})))"
        )
        for some in await asyncio.gather(
            *(tab.do(f"{sending}.then((all) => all.map((it) => it.id))") for tab in tabs)
        ):
            assert some == sorted(some, key=_number)
            ids += some
    assert sorted(map(_number, ids)) == list(range(40))
    await _until(lambda: sorted(lock.effects) == sorted(ids))


async def test_when_a_hub_goes_a_page_goes_on_at_the_next(
    kept: Any, site: str, tmp_path: Path, postgres_server: servers.Postgres
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server, origins=[site])
    await cluster.start(2)
    nobody = f"http://127.0.0.1:{servers.free_port()}"
    urls = ", ".join([nobody, *(f"{hub.url}/" for hub in cluster.hubs)])
    device = Device(urls, cluster.tokens["lock"])
    done: list[int] = []

    @device.on("lock_control")
    async def lock_control(command: Command) -> int:
        done.append(command.data)
        return int(command.data)

    tab = Tab(kept, site, cluster.hubs[1])
    try:
        async with device:
            await tab.load()
            await tab.do(f"open({json.dumps(cluster.tokens['phone'])}, {{}}, {json.dumps(urls)})")
            for n in range(4):
                if n == 2:
                    await cluster.hubs.pop(0).stop()
                ack = await tab.do(f"app.send('lock', 'lock_control', {n}, {{queue: true, expires: 60}})")
                assert (ack["state"], ack["data"]) == ("done", n)
        assert done == list(range(4))
    finally:
        await cluster.stop()


async def test_a_closed_app_says_so(tab: Tab, lock: LockAtWork) -> None:
    await tab.open()
    lock.free.clear()
    await tab.do("void (globalThis.ended = seen(app.send('lock', 'lock_control', {open: true})))")
    await _until(lambda: bool(lock.effects))
    await tab.do("app.close()")
    assert (await tab.do("ended"))["name"] == "Closed"
    assert (await tab.do("seen(app.send('lock', 'lock_control'))"))["name"] == "Closed"


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


class LossyWire:
    """Between a page and the hub: loses what the page says, loses or repeats what the hub says, or is cut."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.deaf = False
        self.mute = False
        self.cut = False
        self.stutters = False
        self.sent: list[str] = []
        self.connections = 0

    async def connect(self, route: Any) -> None:
        self.connections += 1
        if self.cut:
            await route.close()
            return
        server = route.connect_to_server()

        def up(text: str) -> None:
            frame = json.loads(text)
            if "seq_id" in frame:
                self.sent.append(frame["seq_id"])
            if not self.deaf or frame["type"] == "auth":
                server.send(text)

        def down(text: str) -> None:
            for _ in range(2 if self.stutters else 0 if self.mute else 1):
                route.send(text)

        route.on_message(up)
        server.on_message(down)


@pytest_asyncio.fixture(loop_scope="module")
async def wire(browser: Any, site: str, local: LocalHub) -> AsyncIterator[LossyWire]:
    """With a page of its own: neither the wire nor the clock of a page can be put back."""
    context = await browser.new_context()
    wire = LossyWire(Tab(await context.new_page(), site, local))
    await context.route_web_socket("**/v1/ws", wire.connect)
    await wire.tab.load()
    yield wire
    await context.close()


async def test_a_lost_command_is_sent_again_with_its_id(wire: LossyWire, lock: LockAtWork) -> None:
    tab = wire.tab
    await tab.page.clock.install()
    await tab.open()
    wire.deaf = True
    await tab.do("void (globalThis.ended = app.send('lock', 'lock_control', {open: true}))")
    await _until(lambda: len(wire.sent) == 1)
    wire.deaf = False
    await tab.page.clock.run_for(2_000)  # the page's clock also goes by itself
    assert len(wire.sent) == 1
    await tab.page.clock.run_for(1_100)
    assert (await tab.do("ended"))["state"] == "done"
    assert wire.sent == [wire.sent[0]] * 2
    assert lock.effects == [wire.sent[0]]


async def test_a_connection_that_is_silent_is_made_anew(wire: LossyWire, lock: LockAtWork) -> None:
    tab = wire.tab
    await tab.page.clock.install()
    await tab.open()
    wire.deaf = True
    await tab.do("void (globalThis.ended = app.send('lock', 'lock_control', {open: true}))")
    await _until(lambda: len(wire.sent) == 1)
    await tab.page.clock.run_for(6_100)
    wire.deaf = False
    await tab.page.clock.run_for(300)
    assert (await tab.do("ended"))["state"] == "done"
    assert wire.connections == 2
    assert len(lock.effects) == 1


async def test_what_is_never_answered_is_unknown_and_what_was_never_sent_has_expired(
    wire: LossyWire, local: LocalHub, lock: LockAtWork
) -> None:
    tab = wire.tab
    await tab.page.clock.install()
    await tab.open()
    lock.free.clear()
    await tab.do("void (globalThis.first = app.send('lock', 'lock_control', {open: true}))")
    await _until(lambda: bool(lock.effects))
    await local.stop()
    await tab.until("!app.connected")
    await tab.do("void (globalThis.second = app.send('lock', 'lock_control', {open: false}))")
    await tab.page.clock.run_for(70_000)
    assert (await tab.do("first"))["state"] == "unknown"
    await tab.page.clock.run_for(70_000)  # it may have begun only when the clock had been turned
    assert (await tab.do("second"))["state"] == "expired"
    await local.start()
    await tab.page.clock.run_for(11_000)
    await tab.until("app.connected")
    lock.free.set()
    await tab.until("told.filter(([event]) => event === 'end').length === 3")  # a late answer settles it
    *_, settled = await tab.told("end")
    assert (settled["id"], settled["ack"]["state"]) == (lock.effects[0], "done")
    assert len(lock.effects) == 1


async def test_what_is_unknown_is_asked_for_again_after_a_reconnect(
    wire: LossyWire, local: LocalHub, lock: LockAtWork
) -> None:
    tab = wire.tab
    await tab.page.clock.install()
    await tab.open()
    lock.free.clear()
    await tab.do("void (globalThis.ended = app.send('lock', 'lock_control', {open: true}))")
    await _until(lambda: bool(lock.effects))
    await local.stop()
    await tab.until("!app.connected")
    await tab.page.clock.run_for(70_000)
    assert (await tab.do("ended"))["state"] == "unknown"
    wire.cut = True
    await local.start()
    lock.free.set()
    await local.ended(lock.effects[0])  # and the page has not heard of it
    assert len(await tab.told("end")) == 1
    wire.cut = False
    await tab.page.clock.run_for(11_000)
    await tab.until("told.filter(([event]) => event === 'end').length === 2")
    *_, settled = await tab.told("end")
    assert (settled["id"], settled["ack"]["state"]) == (lock.effects[0], "done")
    await tab.do("void app.send('lock', 'lock_control', {open: false})")
    await tab.until("told.filter(([event]) => event === 'end').length === 3")  # the first is told no more
    assert len(lock.effects) == 2


async def test_what_was_done_while_the_page_heard_nothing_is_asked_for_after_a_reconnect(
    wire: LossyWire, local: LocalHub, lock: LockAtWork
) -> None:
    """The page gave up before the hub's first word reached it: it does not send the command again."""
    tab = wire.tab
    await tab.page.clock.install()
    await tab.open()
    wire.mute = True
    await tab.do("void (globalThis.ended = app.send('lock', 'lock_control', {open: true}))")
    await _until(lambda: bool(lock.effects))
    await local.ended(lock.effects[0])
    wire.cut = True
    local.hub.gateway.dismiss("phone")
    await tab.until("!app.connected")
    await tab.page.clock.run_for(70_000)
    assert (await tab.do("ended"))["state"] == "unknown"
    wire.mute = wire.cut = False
    await tab.page.clock.run_for(11_000)
    await tab.until("told.filter(([event]) => event === 'end').length === 2")
    *_, settled = await tab.told("end")
    assert (settled["id"], settled["ack"]["state"]) == (lock.effects[0], "done")
    assert len(lock.effects) == 1


@pytest.mark.parametrize("years", [50, -50])
async def test_a_clock_that_is_set_while_connected_spoils_no_id(
    tab: Tab, lock: LockAtWork, years: int
) -> None:
    """A wall tablet boots in 1970, connects, and is told the time: its ids were 50 years ahead from then on,
    and were refused, also after a reload."""
    await tab.open()
    await tab.do(f"void ((real) => {{ Date.now = () => real() + {years} * 31_536_000_000; }})(Date.now)")
    for expires in ("undefined", "30"):
        ack = await tab.do(f"seen(app.send('lock', 'lock_control', {{open: true}}, {{expires: {expires}}}))")
        assert ack.get("state") == "done", ack
    await tab.load()  # with a clock that is right
    await tab.open()
    ack = await tab.do("seen(app.send('lock', 'lock_control', {open: true}))")
    assert ack.get("state") == "done", ack
    assert len(lock.effects) == 3


# ── pushes ───────────────────────────────────────────────────────────────────────────────────────


async def test_pushes_come_once_and_in_order_also_after_a_reload(tab: Tab, lock: LockAtWork) -> None:
    await tab.open()
    for n in range(3):
        lock.device.push("event_report", {"n": n})
    await tab.until("told.some(([event, what]) => what.data?.n === 2)")
    await tab.do("app.close()")
    for n in range(3, 6):
        lock.device.push("event_report", {"n": n})
    await tab.load()
    await tab.open()
    lock.device.push("event_report", {"n": 6})
    await tab.until("told.some(([event, what]) => what.data?.n === 6)")
    assert [push["data"]["n"] for push in await tab.told("push")] == [3, 4, 5, 6]


async def test_what_comes_twice_is_told_once(wire: LossyWire, lock: LockAtWork) -> None:
    tab = wire.tab
    await tab.open()
    wire.stutters = True
    lock.device.push("event_report", {"n": 0})
    assert (await tab.do("app.send('lock', 'lock_control', {open: true})"))["state"] == "done"
    lock.device.push("event_report", {"n": 1})
    await tab.until("told.some(([event, what]) => what.data?.n === 1)")
    assert [push["data"]["n"] for push in await tab.told("push")] == [0, 1]
    assert len(await tab.told("end")) == 1


async def test_what_is_gone_is_said_to_be_gone(tab: Tab, local: LocalHub, lock: LockAtWork) -> None:
    await tab.open()
    lock.device.push("event_report", {"n": 0})
    await tab.until("told.some(([event, what]) => what.data?.n === 0)")
    last = (await tab.told("push"))[-1]["cursor"]
    await tab.do("app.close()")
    for n in range(1, 4):
        lock.device.push("event_report", {"n": n})
    stream = "push/lock"
    while (await local.hub.ledger.extent(stream)).last < last + 3:
        await asyncio.sleep(0.01)
    await local.hub.ledger.trim(stream, last + 2)
    await tab.load()
    await tab.open()
    await tab.until("told.some(([event, what]) => what.data?.n === 3)")
    gap, push = await tab.told("gap", "push")
    assert gap == {"device": "lock", "after": last, "first": last + 3}
    assert push["data"] == {"n": 3}


def _number(seq_id: str) -> int:
    return int(seq_id.split("_")[1])


async def _until(true: Any, seconds: float = GUARD) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_device_at_work_is_heard_of_and_ones_own_fields_arrive(
    tab: Tab, local: LocalHub, lock: LockAtWork
) -> None:
    @lock.device.on("set_temperature")
    async def work(command: Command) -> dict[str, Any]:
        for percent in (50, 100):
            command.working(percent)
        return {"fields": command.fields}

    await tab.open()
    options = "{ timeout: 30, fields: { unit: 'C' }, progress: (how) => (globalThis.heard ??= []).push(how) }"
    ack = await tab.do(f"app.send('lock', 'set_temperature', 21, {options})")
    assert (ack["state"], ack["data"]) == ("done", {"fields": {"unit": "C"}})
    assert await tab.do("heard") == [50, 100]
    assert await tab.do("[...app.online]") == ["lock"]
