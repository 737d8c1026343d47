"""`duly doctor`: checks a hub, or a data folder, and says what is wrong.

The law: it reads and changes nothing. A running hub is asked for the settings in force, and tries its ledger,
notifier and broker itself; without one the folder and the ledger are read. Each line states a fact and
whether it is good; a line that is not says what to do, and the exit code is then 1.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import msgspec
import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    HubClient,
    HubUnreachable,
    JsonObject,
    count,
    print_json,
    say,
    style,
    took,
)
from duly.cli.options import Json, LedgerOptions, grouped
from duly.errors import DulyError, LedgerInUse, Malformed, SecretKeyMissing

if TYPE_CHECKING:
    from duly.core.trusted_time import Floor
    from duly.settings import Settings
    from duly.storage.ledger import Ledger

GB: Final = 1 << 30
ENOUGH_DISK: Final = GB
SKEW_SECONDS: Final = 2.0
SQLITE: Final = (3, 50, 0)
"""The oldest version without a bug by which two writers could damage a WAL."""

_MARKS: Final = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}


class _Findings:
    """The findings of a check, in order."""

    def __init__(self) -> None:
        self.all: list[dict[str, str]] = []

    def add(self, what: str, fact: str, how: str = "ok") -> None:
        """Add what was found: `how` is "ok", "warn" or "bad"."""
        self.all.append({"what": what, "is": how, "fact": fact})

    @property
    def bad(self) -> bool:
        """Whether any finding is bad."""
        return any(one["is"] == "bad" for one in self.all)


@grouped
def doctor(*, at: LedgerOptions, json: Json = False) -> None:
    """Check versions, hub, clock, disk, ledger, notifier, broker and margins.

    A running hub is asked for the settings in force; without one, the data folder or the ledger is read.
    Exits with 1 if something is wrong.
    """
    found = _Findings()
    _versions(found)
    try:
        hub = at.find_hub()
        if hub is None or not _hub(found, hub):
            _folder(found, at, hub)
    except Malformed as problem:
        found.add("settings", str(problem), "bad")
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


# ── a hub that runs ──────────────────────────────────────────────────────────────────────────────


def _hub(found: _Findings, hub: HubClient) -> bool:
    """Add what the hub says; return whether it could be asked."""
    try:
        offset, way = asyncio.run(_offset(hub))
        told = _ask(hub)
    except CommandFailed as problem:
        found.add("hub", str(problem), "bad")
        return not hub.local
    devices = told.get("devices")
    online = "" if devices is None else f", {count(len(devices), 'device')} online"
    found.add("hub", f"runs at {hub.url}{online}" + ("" if told else "; only an admin is told more"))
    if told.get("down"):
        found.add("storing", f"the hub takes nothing new now: {told['down']}", "bad")
    _clock(found, offset, way)
    if "settings" in told:
        _what_it_says(found, hub, told)
    return True


def _ask(hub: HubClient) -> JsonObject:
    """Return the answer of the hub to an admin; nothing if the token is not an admin's."""
    try:
        told: JsonObject = hub.ask("/v1/admin/doctor", {})
    except CommandFailed as problem:
        if problem.code is Exit.NOT_ALLOWED:
            return {}
        if problem.code is Exit.USAGE:  # a hub that is older than this command line
            return dict(hub.ask("/v1/state"))
        raise
    return told


def _what_it_says(found: _Findings, hub: HubClient, told: JsonObject) -> None:
    from duly.core.units import MINUTE, seconds
    from duly.server.floor_watch import floor_ahead

    settings, book = told["settings"], told["ledger"]
    found.add("settings", _settings(settings))
    _disk(found, told["disk"]["free"])
    where = settings["ledger"]
    if book["problem"]:
        found.add("ledger", f"{where}: {book['problem']}; start it, or repair the connection to it", "bad")
    else:
        found.add(
            "ledger", f"{where}, {_book(book['engine'], book['schema'])}, {_size(book)}, {book['ms']} ms"
        )
        if hub.local and where.startswith("sqlite:"):
            _soundness(found, where)
    _notifier(found, told["notifier"], told.get("hubs") or [])
    _broker(found, told.get("mqtt"))
    for sentence in told.get("conflicts") or []:
        found.add("clients", sentence, "bad")
    _windows(found, told["margins"])
    _limits(found, told.get("limits"), told["disk"]["free"])
    _thresholds(found, told.get("thresholds") or [])
    if told.get("unforgotten"):
        found.add("retention", f"old messages cannot be forgotten now: {told['unforgotten']}", "warn")
    floor = told.get("floor") or {"ahead": 0, "tolerated": 0}
    ahead, tolerated = seconds(floor["ahead"]), seconds(floor["tolerated"])
    if ahead > MINUTE:
        found.add("floor", floor_ahead(ahead), "bad" if ahead > tolerated else "warn")
    _lanes(found, book.get("lanes_ahead") or 0)
    for part, problem in (told.get("problems") or {}).items():
        found.add(part, f"does not run, and is started again: {problem}", "bad")


def _limits(found: _Findings, limits: JsonObject | None, free: int) -> None:
    """Add what one account may do, what was refused for that, and whether the disk has room for it."""
    if limits is None:  # a hub that is older than this command line
        return
    most = limits["in_force"]
    kinds = [kind for kind in most if kind not in ("groups", "queue", "stored")]
    rates = ", ".join(f"{most[kind]:,} {kind}" if most[kind] else f"any number of {kind}" for kind in kinds)
    stored = f"{most['stored']:,} MB a day" if most["stored"] else "any number of bytes"
    if "groups" in most:  # otherwise the hub is older
        stored += f"; {most['groups']:,} new groups a day" if most["groups"] else "; any number of groups"
    fact = f"one account: {rates} a minute; {stored}; {most['queue']:,} commands waiting"
    if most["stored"] << 20 > free:
        found.add("limits", f"{fact}; the disk has less room than that: lower stored_mb_per_day", "warn")
    else:
        found.add("limits", fact)
    refused = {kind: n for kind, n in limits["refused"].items() if n}
    if refused:
        names = ", ".join(f"{name} ({n:,})" for name, n in limits["accounts"].items())
        counts = ", ".join(f"{n:,} {kind}" for kind, n in refused.items())
        fact = f"refused since the start: {counts}" + (f"; most of {names}" if names else "")
        found.add("limited", fact, "warn")


def _settings(settings: JsonObject) -> str:
    """Return the settings that differ from their defaults, as `duly.toml` writes them."""
    from duly.settings import Settings

    usual = msgspec.to_builtins(Settings()) | {"ledger": settings["ledger"]}
    others = [f"{name} = {value}" for name, value in settings.items() if value != usual.get(name) and value]
    return "in force there: " + (", ".join(others) or "all as they are by default")


def _notifier(found: _Findings, notifier: JsonObject | None, hubs: list[str] | None = None) -> None:
    """Add whether the notifier works, and how many hubs a running one has found."""
    if notifier is None:
        return
    others = "" if hubs is None else f"; {count(len(hubs), 'hub')} on this ledger"
    if notifier["problem"]:
        found.add(
            "notifier",
            f"{notifier['url']}: {notifier['problem']}; nothing is lost, but other hubs are up to seconds "
            f"slower: start it, or give the hubs another --notifier{others}",
            "bad",
        )
    else:
        found.add("notifier", f"{notifier['url']}: heard after {notifier['ms']} ms{others}")


def _clock(found: _Findings, offset: float, way: float) -> None:
    far = abs(offset) > SKEW_SECONDS
    hint = "; correct one of the two clocks" if far else ""
    found.add(
        "clock",
        f"{took(abs(offset) * 1000)} {'ahead of' if offset < 0 else 'behind'} the hub's "
        f"(answer in {took(way * 1000)}){hint}",
        "bad" if far else "ok",
    )


def _broker(found: _Findings, mqtt: JsonObject | None) -> None:
    if mqtt is None:
        return
    if mqtt["problem"] is not None:
        found.add("broker", mqtt["problem"], "bad")
        return
    durable = (
        "what it has acknowledged survives kill -9"
        if mqtt["embedded"]
        else "what it keeps depends on its settings"
    )
    version = {3: "MQTT 3.1.1; ", 5: "MQTT 5; "}.get(mqtt.get("version") or 0, "")
    found.add("broker", f"{mqtt['url']}: {version}{durable}; what is not answered is sent again")


async def _offset(hub: HubClient) -> tuple[float, float]:
    """Return how far the hub's clock is ahead of ours, and how long it took to ask, in seconds."""
    import aiohttp

    from duly.wire import frames

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
        raise HubUnreachable(hub.url, str(problem) or "no answer") from None
    if welcome.time is None:
        raise CommandFailed(Exit.NOT_ALLOWED, welcome.detail or "the hub does not know this token")
    return welcome.time / 1000 - (began + ended) / 2, ended - began


# ── a folder, or a ledger ────────────────────────────────────────────────────────────────────────


def _folder(found: _Findings, at: LedgerOptions, hub: HubClient | None) -> None:
    from duly.server.diagnostics import margins
    from duly.server.policies import command_timing

    settings = at.settings
    if hub is None and at.ledger is None:
        found.add("hub", f"none runs in {settings.data}; start one with 'duly up'", "warn")
    folder = Path(settings.data).absolute()
    while not folder.exists():
        folder = folder.parent
    _disk(found, shutil.disk_usage(folder).free)
    try:
        asyncio.run(_ledger(found, at))
    except DulyError as problem:
        found.add("ledger", str(problem), "warn" if isinstance(problem, LedgerInUse) else "bad")
    if settings.notifier and settings.shared:
        _notifier(found, asyncio.run(_try_notifier(settings)))
    try:
        _windows(found, margins(command_timing(settings)))
    except Malformed as problem:
        found.add("windows", str(problem), "bad")


async def _try_notifier(settings: Settings) -> JsonObject | None:
    """Return whether the notifier that hubs with these settings would use carries a hint."""
    from duly.cluster.notifiers import open_notifier
    from duly.server.diagnostics import check_notifier

    notifier = open_notifier(settings.notifier, "doctor", settings.ledger_url)
    await notifier.start()
    try:
        return await check_notifier(notifier, settings.notifier)
    finally:
        await notifier.stop()


async def _ledger(found: _Findings, at: LedgerOptions) -> None:
    from duly.server.diagnostics import address
    from duly.server.floor_watch import lanes_ahead
    from duly.server.policies import floor_tolerance

    settings = at.settings
    if settings.shared:
        from duly.storage.postgres.ledger import inspect

        about, size = await inspect(settings.ledger)
        where = address(settings.ledger)
        if about is None:
            found.add("ledger", f"{where} answers; it has no ledger yet, the first 'duly up' makes it")
        elif size is None:
            found.add(
                "ledger", f"{where}, {_book(about.engine, about.schema)}: not the schema of this duly", "warn"
            )
        else:
            told = _size(msgspec.to_builtins(size))
            found.add("ledger", f"{where}, {_book(about.engine, about.schema)}, {told}")
        return
    if not settings.ledger and not (Path(settings.data) / "ledger.db").exists():
        found.add("ledger", "there is none yet; the first 'duly up' or 'duly add' makes it")
        return
    async with await at.open(reads=True) as book:
        about, size = await book.describe(), await book.size()
        await _secrets(found, book, settings)
        _floor(found, await book.floor(), floor_tolerance(settings))
        _lanes(found, await lanes_ahead(book))
    found.add("ledger", f"{_book(about.engine, about.schema)}, {_size(msgspec.to_builtins(size))}")
    if settings.ledger_url.startswith("sqlite:"):
        await asyncio.to_thread(_soundness, found, settings.ledger_url)


# ── what both have ───────────────────────────────────────────────────────────────────────────────


def _book(engine: str, schema: int) -> str:
    return f"{engine}, schema {schema}" if schema else engine


def _size(size: JsonObject) -> str:
    return f"{count(size['messages'], 'message')} remembered, {size['bytes'] / (1 << 20):.1f} MB"


def _disk(found: _Findings, free: int) -> None:
    little = free < ENOUGH_DISK
    shown = f"{free / GB:.1f}" if free >= GB / 10 else f"{free / GB:.3f}"
    found.add("disk", f"{shown} GB free" + ("; make room" if little else ""), "warn" if little else "ok")


def _soundness(found: _Findings, url: str) -> None:
    problem = _check(url)
    found.add(
        "soundness",
        f"damaged: {problem}; stop the hub and restore a backup" if problem else "checked, sound",
        "bad" if problem else "ok",
    )


def _lanes(found: _Findings, ahead: int) -> None:
    from duly.server.floor_watch import senders_ahead

    if ahead:
        found.add("lanes", senders_ahead(ahead), "bad")


def _floor(found: _Findings, floor: Floor, tolerated: int) -> None:
    from duly.core.units import MINUTE, show
    from duly.runtime.clock import SystemClock
    from duly.server.floor_watch import floor_ahead

    ahead = floor.until - SystemClock().now()
    if ahead > MINUTE:
        found.add("floor", floor_ahead(ahead), "bad" if ahead > tolerated else "warn")
    elif floor.until:
        found.add("floor", f"ids that had to be remembered until {show(-ahead)} ago may be forgotten")


async def _secrets(found: _Findings, book: Ledger, settings: Settings) -> None:
    from duly.storage.secret_box import open_box

    try:
        box = await open_box(book, Path(settings.data), settings.secret_key, reading=True)
    except (SecretKeyMissing, Malformed) as problem:
        found.add("encryption", str(problem), "bad")
    else:
        fact = "there is no key yet" if box is None else f"by key {box.id}, which is here"
        found.add("encryption", fact)


def _check(url: str) -> str | None:
    """Return what SQLite finds wrong with the file; None if nothing."""
    import apsw

    from duly.storage.sqlite.file import connect

    try:
        db = connect(Path(unquote(urlsplit(url).path[1:])), readonly=True)
        try:
            (word,) = db.execute("PRAGMA quick_check(1)").fetchone() or ("no answer",)
        finally:
            db.close()
    except apsw.Error as problem:
        return str(problem)
    return None if word == "ok" else str(word)


def _thresholds(found: _Findings, judged: list[JsonObject]) -> None:
    """Add the metrics that have a threshold, and what to do about those that are above it."""
    if judged:
        found.add("metrics", " · ".join(f"{_metric(one)}, at most {_amount(one, 'most')}" for one in judged))
    for one in judged:
        if one["above"]:
            found.add("metrics", f"{_metric(one)} is too much: {one['advice']}", "warn")


def _metric(one: JsonObject) -> str:
    name = one["metric"].removeprefix("duly_").removesuffix("_seconds").replace("_", " ")
    return f"{name} {_amount(one, 'value')}"


def _amount(one: JsonObject, which: str) -> str:
    return f"{one[which]:g} {one['unit']}".rstrip()


def _windows(found: _Findings, given: dict[str, int]) -> None:
    from duly.core.units import show

    spare = given["remember"] - given["needed"]
    found.add(
        "windows",
        f"ids are remembered for {show(given['remember'])}; age {show(given['max_age'])} + resends "
        f"{show(given['resends'])} + clock skew {show(given['skew'])} need {show(given['needed'])}: "
        f"{show(spare)} to spare",
    )
    found.add(
        "order",
        f"a gap waits {show(given['window'])}; a device has {show(given['patience'])} to answer",
    )
