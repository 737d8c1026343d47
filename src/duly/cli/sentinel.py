"""`duly sentinel`: reads signals, one on a line, and prints what becomes of them.

The law: an event that is shown as stored is stored. A malformed line is answered with a sentence and changes
nothing; when the input ends, the events it caused are still sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duly.cli.alert_outcome import URGENT_SECONDS, AlertOutcome, wait_until_told
from duly.cli.common import (
    CommandFailed,
    Exit,
    HubClient,
    HubUnreachable,
    JsonObject,
    clock,
    count,
    find_hub,
    need_hub,
    note,
    print_json,
    say,
    settings_of,
    took,
)
from duly.cli.options import DataFolder, Json, Token, Url, grouped, length
from duly.cli.temporary_token import access_source, check_account, roles
from duly.errors import DulyError, Malformed

if TYPE_CHECKING:
    from duly.clients.sentinel import Sentinel
    from duly.clients.sentinel_alerts import Alert, SentinelNews

STORED_EVERY = 500
"""Lines between two waits for the disk."""

STAND_DOWN_SECONDS = 10.0
"""How long `stand-down` waits for the tower."""

sentinel = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True)
class SentinelOptions:
    """The options that select the tower, the sentinel and its memory. They may come before or after
    `trigger`."""

    url: Url = None
    token: Token = None
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="NAME", help="The profile at the tower that says who is told. [default]"
        ),
    ] = None
    session: Annotated[
        str | None,
        typer.Option(
            "--session", metavar="ID", help="The session that is guarded. [a random one, made once]"
        ),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="FILE",
            help="The file of its queue and memory. [in the data folder; with --url sentinel.db]",
        ),
    ] = None
    http: Annotated[bool | None, typer.Option("--http", help="Use plain HTTP instead of a WebSocket.")] = None
    countdown: Annotated[
        float | None, length("--countdown", "How long an event can be cancelled before it goes out. [15s]")
    ] = None
    as_: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NAME",
            help="The sentinel, by its name at the hub on this machine. [the only one]",
        ),
    ] = None
    folder: DataFolder = None

    def and_then(self, later: SentinelOptions) -> SentinelOptions:
        """Return these options, overridden by later ones."""
        said = {field.name: getattr(later, field.name) for field in fields(later)}
        return replace(self, **{name: value for name, value in said.items() if value is not None})


@dataclass(frozen=True)
class LimitOptions:
    """The limits of a sentinel that watches; those not given are from [sentinel] in duly.toml."""

    debounce: Annotated[
        float | None, length("--debounce", "Repeats within this time are one event. [30s]")
    ] = None
    per_hour: Annotated[
        int | None,
        typer.Option("--per-hour", metavar="N", help="The most events of one device in an hour. [10]"),
    ] = None
    cooldown: Annotated[
        float | None,
        length("--cooldown", "After a cancel, only critical events pass for this time. [5m]"),
    ] = None
    keep: Annotated[
        float | None, length("--keep", "An event that cannot be sent for this time expires. [7d]")
    ] = None
    summary: Annotated[
        float | None,
        length("--summary", "Events over the limit are summed up after this time. [5m]"),
    ] = None
    heartbeat: Annotated[
        float | None,
        length(
            "--heartbeat",
            "How often to send the tower a heartbeat; if it stops, people are told. [none]",
            metavar="60s",
        ),
    ] = None


class _Who:
    """A sentinel's tower, account and memory."""

    def __init__(self, given: SentinelOptions, limits: LimitOptions | None = None) -> None:
        self.given, self.limits = given, limits or LimitOptions()
        hub = find_hub(given.folder, given.url, given.token) if given.url else need_hub(given.folder)
        assert hub is not None
        self.hub: HubClient = hub
        self.name = _named(hub, given.as_) if hub.local and given.token is None else ""
        folder = Path(settings_of(given.folder).data)
        self.store = given.store or (
            folder / f"sentinel-{self.name}.db" if self.name else Path("sentinel.db")
        )

    def open(self) -> Sentinel:
        """Make the sentinel."""
        from duly.clients.sentinel import Sentinel
        from duly.clients.websocket_link import Access
        from duly.core.monitor.signals import SentinelPolicy
        from duly.settings import section

        given, hub = self.given, self.hub
        policy = section("sentinel", SentinelPolicy, asdict(self.limits) | {"countdown": given.countdown})
        token = given.token or hub.token
        if self.name and given.http:
            token = hub.temporary_token(self.name)
        return Sentinel(
            hub.url,
            token,
            store=str(self.store.absolute()),
            profile=given.profile or "default",
            session=given.session or "",
            policy=policy,
            transport="http" if given.http else "websocket",
            access=Access(access_source(hub, self.name, given.folder) if self.name else None, hub.tls),
        )


def _named(hub: HubClient, as_: str | None) -> str:
    if as_ is not None:
        check_account(hub, as_, "sentinel")
        return as_
    names = [name for name, role in roles(hub).items() if role == "sentinel"]
    if len(names) != 1:
        known = (
            f"say which with --as: {', '.join(names)}" if names else "make one with: duly add sentinel NAME"
        )
        raise CommandFailed(Exit.USAGE, f"the hub here has {count(len(names), 'sentinel')}; {known}")
    return names[0]


@sentinel.callback()
@grouped
def watch(
    context: typer.Context, *, given: SentinelOptions, limits: LimitOptions, json: Json = False
) -> None:
    """Watch devices, and report each event once, also over a bad network.

    Reads signals from its input, one on a line:

    \b
        disconnect DEVICE
        reconnect DEVICE
        trigger REASON DEVICE [{"severity":"critical","location":…,"meta":…,"countdown":0}]
        cancel DEVICE
        stand-down

    and shows what becomes of them. An event waits for its countdown (15 s), during which 'cancel' ends it;
    then it goes to the tower, as soon as that can be reached. Everything is in the file --store: kill it,
    start it again, and it continues. When the input ends it sends what is left, and ends. Limits are options,
    or [sentinel] in duly.toml. Without --url and --token it uses the hub on this machine.
    """
    context.obj = (given, limits)
    if context.invoked_subcommand is None:
        asyncio.run(_watch(_Who(given, limits), json))


@sentinel.command("trigger")
@grouped
def trigger(
    context: typer.Context,
    reason: Annotated[str, typer.Argument(metavar="REASON")],
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    more: Annotated[
        str | None,
        typer.Argument(metavar="JSON", help='{"severity":"critical","location":…,"meta":…}'),
    ] = None,
    wait: Annotated[
        float | None, length("--wait", "How long to wait until the tower has it. [10s]", metavar="10s")
    ] = None,
    *,
    later: SentinelOptions,
    json: Json = False,
) -> None:
    """Report one event: store it, send it, and say how it ended.

    It goes out at once, unless there is a --countdown.

    Exits with 0 if the tower has it, 6 if it was held back or refused, 4 if the token is not known, 3 if the
    tower cannot be reached and 5 if it did not answer; in the last three cases it is stored and goes out with
    the next one. For a critical event it then waits (10 s) until a person is told: 0 if so, 1 if not, 5 if
    that is not known yet. With --json, `told` says the same: true, false or null.
    """
    before: SentinelOptions
    before, limits = context.obj
    given = before.and_then(later)
    options = _options(more or "")
    options.setdefault("countdown", given.countdown or 0.0)
    patience = 10.0 if wait is None else wait
    raise typer.Exit(asyncio.run(_trigger(_Who(given, limits), reason, device, options, patience, json)))


async def _trigger(who: _Who, reason: str, device: str, options: JsonObject, wait: float, json: bool) -> Exit:
    async with who.open() as watcher:
        alert = watcher.trigger(reason, device, **options)
        limit = wait + float(options["countdown"] or 0)
        await _stored_or_sent(alert, limit, who.store)
        trying = asyncio.ensure_future(_first_try(watcher, alert.id))
        sent = alert.sent
        either: set[asyncio.Future[Any]] = {sent, trying}
        await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        end = sent.result() if sent.done() else None
        code, denied = trying.result() if trying.done() else (Exit.OK, "")
        for one in either:
            one.cancel()
    detail = denied if end is None else end.reason
    if end is not None and not json:
        mark = f"   [{alert.id}]" if alert.id else ""
        say(f"{_WORDS.get(end.state, end.state)}{f': {detail}' if detail else ''}{mark}")
    urgent = end is not None and end.done and options.get("severity") == "critical"
    told = await asyncio.to_thread(_told, who.hub, alert.id) if urgent else None
    if json:
        shown = {"event": alert.id, "state": "stored" if end is None else end.state, "detail": detail}
        print_json(shown if told is None else shown | told.as_json)
    elif told is not None and told.problem:
        note(f"duly: {told.problem}")
    if told is not None:
        return told.exit
    if end is not None:
        return Exit.OK if end.done else Exit.REFUSED if end.state in ("held", "failed") else Exit.FAILED
    kept = f"the event is stored in {who.store} and goes out with the next one"
    if denied:
        raise CommandFailed(code, f"{denied}; {kept}")
    if not watcher.name and not who.given.http:
        raise CommandFailed(Exit.UNREACHABLE, f"{HubUnreachable(who.hub.url, 'no connection')}; {kept}")
    raise CommandFailed(Exit.UNKNOWN, f"the tower has not answered; {kept}")


async def _stored_or_sent(alert: Alert, limit: float, store: Path) -> None:
    """Wait until the event is on the disk, or with the tower: a critical one is sent though it cannot be
    stored."""
    stored = asyncio.ensure_future(alert.stored())
    sent = alert.sent
    sent.add_done_callback(lambda _: stored.cancel())
    done, _ = await asyncio.wait({stored}, timeout=limit)
    sent.cancel()
    if not done:
        raise CommandFailed(
            Exit.FAILED, f"the event is lost: {store} cannot be written, and the tower does not have it"
        )


def _told(hub: HubClient, event: str) -> AlertOutcome:
    """Return whether a person was told of a critical event that the tower has."""
    try:
        return wait_until_told(hub, event, URGENT_SECONDS)
    except CommandFailed as problem:
        return AlertOutcome(None, f"the tower has it; whether a person was told is not known: {problem}")


async def _first_try(watcher: Sentinel, event: str) -> tuple[Exit, str]:
    """Return why the tower refuses the token, or this event for now; wait for ever if it does not. Older
    events that wait in the file go out first, and may be refused for reasons of their own."""
    async for news in watcher.news():
        if news.what == "denied":
            return Exit.NOT_ALLOWED, news.detail
        if news.what == "refused" and news.event == event:
            return Exit.REFUSED, news.detail
    return Exit.OK, ""


# ── lines ────────────────────────────────────────────────────────────────────────────────────────


async def _watch(who: _Who, json: bool) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    async with who.open() as watcher:
        showing = loop.create_task(_show(watcher, json))
        working = loop.create_task(_work(watcher, json))
        stopping = loop.create_task(told.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        left = watcher.waiting
        for task in (working, stopping):
            task.cancel()
        problems = await asyncio.gather(working, stopping, return_exceptions=True)
    await showing
    for problem in problems:
        if isinstance(problem, Exception):
            raise problem
    if not json:
        counts = watcher.counts
        held = counts.debounced + counts.cooling + counts.limited
        note(
            f"{count(counts.signals, 'signal')}: {held} held back, {counts.cancelled} cancelled, "
            f"{counts.sent} sent"
        )
    if left and not json:
        note(f"{count(left, 'event')} not at the tower yet; stored in {who.store} for the next start")


async def _work(watcher: Sentinel, json: bool) -> None:
    """Carry out every line, then wait until the tower has everything."""
    lines = _lines()
    alert: Alert | None = None
    for_the_disk = 0
    undone: str | None = None
    while (line := await lines.get()) is not None:
        try:
            if line.strip() == "stand-down":
                undone = await _stand_down(watcher)
                if undone:
                    _complain(undone, line, json)
                continue
            alert = _obey(watcher, line) or alert
        except DulyError as problem:
            _complain(str(problem), line, json)
        for_the_disk += 1
        if alert is not None and for_the_disk % STORED_EVERY == 0:
            await alert.stored()
    if undone and watcher.waiting:
        await watcher.drained()
        undone = await _stand_down(watcher)
    if undone:
        raise CommandFailed(Exit.UNREACHABLE, f"stand-down: {undone}")
    await watcher.drained()


async def _stand_down(watcher: Sentinel) -> str | None:
    """Withdraw the promise of heartbeats once the tower can be reached; return why that failed."""
    try:
        async with asyncio.timeout(STAND_DOWN_SECONDS):
            await watcher.ready()
            await watcher.stand_down()
    except TimeoutError:
        return "the tower has not answered; it expects heartbeats until a stand-down reaches it"
    except DulyError as problem:
        return str(problem)
    return None


def _lines() -> asyncio.Queue[str | None]:
    """Return a queue of the input's lines, then None. A thread reads it: not every input can be polled."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _obey(watcher: Sentinel, line: str) -> Alert | None:
    verb, *rest = line.split(maxsplit=1)[:2] if line.strip() else ("",)
    words = rest[0].strip() if rest else ""
    match verb:
        case "" | "#":
            return None
        case "disconnect" if words:
            return watcher.disconnect(words)
        case "reconnect" if words:
            watcher.reconnect(words)
            return None
        case "cancel" if words:
            watcher.cancel(words)
            return None
        case "trigger" if len(words.split()) > 1:
            reason, device, *more = words.split(maxsplit=2)
            return watcher.trigger(reason, device, **_options(more[0] if more else ""))
        case _:
            raise Malformed(
                "write: disconnect DEVICE, reconnect DEVICE, trigger REASON DEVICE [JSON], cancel DEVICE or "
                "stand-down"
            )


def _options(text: str) -> JsonObject:
    import msgspec

    if not text:
        return {}
    try:
        options = msgspec.json.decode(text, type=JsonObject)
    except msgspec.DecodeError as problem:
        raise Malformed(f"{text[:80]!r} is not a JSON object: {problem}") from None
    unknown = sorted(options.keys() - {"severity", "location", "meta", "countdown"})
    if unknown:
        raise Malformed(f"{', '.join(unknown)}: not known; use severity, location, meta or countdown")
    lasts = options.get("countdown")
    if lasts is not None and not isinstance(lasts, int | float):
        raise Malformed(f"countdown is a number of seconds, not {lasts!r}")
    return options


# ── showing ──────────────────────────────────────────────────────────────────────────────────────

_WORDS = {
    "done": "the tower has it",
    "held": "held back",
    "sent": "sent: the tower has it",
    "trouble": "TROUBLE, nothing can be stored",
    "unstored": "NOT STORED",
}


async def _show(watcher: Sentinel, json: bool) -> None:
    async for news in watcher.news():
        if json:
            print_json(news)
        else:
            say(f"{clock(news.time)}  {_sentence(news, watcher)}")


def _sentence(news: SentinelNews, watcher: Sentinel) -> str:
    what = f"{news.device} {news.reason}".strip()
    mark = f"   [{news.event[:8]}]" if news.event else ""
    left = took(max(0, news.until - news.time))
    match news.what:
        case "online" | "offline":
            name = f" as {watcher.name}" if watcher.name and news.what == "online" else ""
            return f"{news.what}{name}"
        case "denied":
            return f"refused by the tower: {news.detail}"
        case "countdown":
            said = f"countdown: goes out in {left} unless cancelled"
        case "held":
            said = f"held back ({news.detail}) for {left}" if news.until else f"held back ({news.detail})"
        case _:
            said = _WORDS.get(news.what, news.what) + (f": {news.detail}" if news.detail else "")
    return f"{what}: {said}{mark}" if what else f"{said}{mark}"


def _complain(sentence: str, line: str, json: bool) -> None:
    if json:
        print_json({"what": "error", "detail": sentence, "line": line.rstrip("\n")[:200]})
    else:
        note(f"{line.strip()[:80]!r}: {sentence}")
