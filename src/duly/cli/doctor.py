"""`duly doctor`: is everything as it should be here?

The law: it looks and changes nothing. Each line is a fact and whether it is well; what is not well says what
to do, and then it exits with 1.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import typer

from duly.cli.common import (
    Data,
    Exit,
    Hub,
    Json,
    LedgerUrl,
    Token,
    Trouble,
    Url,
    count,
    find_hub,
    open_to_read,
    print_json,
    say,
    settings_of,
    style,
    took,
)
from duly.errors import DulyError, LedgerUnavailable, Malformed

if TYPE_CHECKING:
    from duly.settings import Settings

GB: Final = 1 << 30
ENOUGH_DISK: Final = GB
SKEW_SECONDS: Final = 2.0
SQLITE: Final = (3, 50, 0)
"""Older ones had a bug by which two writers could damage a WAL."""

_MARKS: Final = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}


class _Findings:
    def __init__(self) -> None:
        self.all: list[dict[str, str]] = []

    def add(self, what: str, fact: str, how: str = "ok") -> None:
        self.all.append({"what": what, "is": how, "fact": fact})

    @property
    def bad(self) -> bool:
        return any(one["is"] == "bad" for one in self.all)


def doctor(
    data: Data = None, ledger: LedgerUrl = None, url: Url = None, token: Token = None, json: Json = False
) -> None:
    """Check versions, hub, clock, disk, ledger and margins."""
    found = _Findings()
    _versions(found)
    try:
        settings = settings_of(data, ledger)
    except Malformed as problem:
        found.add("settings", str(problem), "bad")
    else:
        _hub(found, data, url, token, settings)
        _disk(found, settings)
        if settings.ledger or (Path(settings.data) / "ledger.db").exists():
            asyncio.run(_ledger(found, data, ledger, settings))
        else:
            found.add("ledger", "there is none yet; the first 'duly up' or 'duly add' makes it")
        _windows(found, settings)
    if json:
        print_json({"ok": not found.bad, "findings": found.all})
    else:
        width = max(len(one["what"]) for one in found.all)
        for one in found.all:
            mark, colour = _MARKS[one["is"]]
            say(f"{style(mark, colour)} {one['what'].ljust(width)}  {one['fact']}")
    raise typer.Exit(Exit.FAILED if found.bad else Exit.OK)


def _versions(found: _Findings) -> None:
    from importlib.metadata import version

    import apsw

    found.add("duly", version("duly"))
    found.add("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    sqlite = apsw.sqlite_lib_version()
    old = tuple(int(part) for part in sqlite.split(".")[:3]) < SQLITE
    hint = f"; upgrade apsw: before {'.'.join(map(str, SQLITE))} a WAL could be damaged" if old else ""
    found.add("sqlite", f"{sqlite}, through apsw {apsw.apsw_version()}{hint}", "warn" if old else "ok")


def _hub(found: _Findings, data: str | None, url: str | None, token: str | None, settings: Settings) -> None:
    hub = find_hub(data, url, token)
    if hub is None:
        found.add("hub", f"none runs in {settings.data}; start one with 'duly up'", "warn")
        return
    try:
        offset, way = asyncio.run(_offset(hub))
        state: dict[str, Any] = {}
        try:
            state = hub.ask("/v1/state")
        except Trouble as problem:
            if problem.code is not Exit.NOT_ALLOWED:  # only an admin may see it
                raise
    except Trouble as problem:
        found.add("hub", str(problem), "bad")
        return
    devices = state.get("devices")
    online = "" if devices is None else f", {count(len(devices), 'device')} online"
    found.add("hub", f"runs at {hub.url}{online}")
    if state.get("down"):
        found.add("storing", f"the hub cannot store anything now: {state['down']}", "bad")
    _broker(found, state.get("mqtt"))
    far = abs(offset) > SKEW_SECONDS
    hint = "; set the clock of one of them" if far else ""
    found.add(
        "clock",
        f"{took(abs(offset) * 1000)} {'ahead of' if offset < 0 else 'behind'} the hub's "
        f"(answer in {took(way * 1000)}){hint}",
        "bad" if far else "ok",
    )
    if state.get("unforgotten"):
        found.add("retention", state["unforgotten"], "warn")


def _broker(found: _Findings, mqtt: dict[str, Any] | None) -> None:
    if mqtt is None:
        return
    if mqtt["problem"] is not None:
        found.add("broker", mqtt["problem"], "bad")
        return
    durable = "what it has acknowledged survives kill -9" if mqtt["embedded"] else "what it keeps is up to it"
    found.add("broker", f"{mqtt['url']}: {durable}; what nobody answers is sent again")


async def _offset(hub: Hub) -> tuple[float, float]:
    """How far the hub's clock is ahead of ours, and how long it took to ask, in seconds."""
    import aiohttp

    from duly.cli.common import Unreachable
    from duly.dialects import frames

    try:
        async with (
            asyncio.timeout(5),
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{hub.url}/v1/ws", ssl=hub.tls or True) as socket,
        ):
            began = time.time()
            await socket.send_str(frames.encode(frames.Frame("auth", token=hub.token)).decode())
            message = await socket.receive()
            welcome = frames.decode(message.data if message.type is aiohttp.WSMsgType.TEXT else b"")
            ended = time.time()
    except (aiohttp.ClientError, OSError, TimeoutError) as problem:
        raise Unreachable(hub.url, str(problem) or "no answer") from None
    if welcome.time is None:
        raise Trouble(Exit.NOT_ALLOWED, welcome.detail or "the hub does not know this token")
    return welcome.time / 1000 - (began + ended) / 2, ended - began


def _disk(found: _Findings, settings: Settings) -> None:
    place = Path(settings.data).absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    little = usage.free < ENOUGH_DISK
    free = f"{usage.free / GB:.1f}" if usage.free >= GB / 10 else f"{usage.free / GB:.3f}"
    found.add("disk", f"{free} GB free" + ("; make room" if little else ""), "warn" if little else "ok")


async def _ledger(found: _Findings, data: str | None, ledger: str | None, settings: Settings) -> None:
    url = settings.ledger_url
    try:
        async with await open_to_read(data, ledger) as book:
            size = await book.size()
    except DulyError as problem:
        found.add("ledger", str(problem), "warn" if isinstance(problem, LedgerUnavailable) else "bad")
        return
    mb = size.bytes / (1 << 20)
    found.add("ledger", f"{count(size.messages, 'message')} remembered, {mb:.1f} MB")
    if url.startswith("sqlite:"):
        problem_found = await asyncio.to_thread(_check, url)
        found.add(
            "soundness",
            f"damaged: {problem_found}; stop the hub and restore a backup"
            if problem_found
            else "checked, sound",
            "bad" if problem_found else "ok",
        )


def _check(url: str) -> str | None:
    """What SQLite finds wrong with the file; None if nothing."""
    import apsw

    path = unquote(urlsplit(url).path[1:])
    try:
        db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            db.set_busy_timeout(5_000)
            (word,) = db.execute("PRAGMA quick_check(1)").fetchone() or ("no answer",)
        finally:
            db.close()
    except apsw.Error as problem:
        return str(problem)
    return None if word == "ok" else str(word)


def _windows(found: _Findings, settings: Settings) -> None:
    from duly.core.units import show
    from duly.hub import control_policy

    try:
        policy = control_policy(settings)
    except Malformed as problem:
        found.add("windows", str(problem), "bad")
        return
    span = policy.resend.span() or 0
    needed = policy.max_age + span + policy.skew
    found.add(
        "windows",
        f"ids are remembered for {show(policy.remember)}; age {show(policy.max_age)} + resends {show(span)} "
        f"+ clock skew {show(policy.skew)} need {show(needed)}: {show(policy.remember - needed)} to spare",
    )
    found.add(
        "order",
        f"a gap waits {show(policy.window)}; a device has {show(policy.patience)} to answer",
    )
