"""`duly sentinel`: signals in, one line each; what becomes of them out, as it happens.

The law: what is said to be stored is stored. A line that makes no sense is answered with a sentence and costs
nothing else; when the lines end, what they brought about is still seen through.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duly.cli.common import (
    CommandFailed,
    Data,
    Exit,
    HubClient,
    HubUnreachable,
    Json,
    Token,
    Url,
    clock,
    count,
    duration,
    find_hub,
    need_hub,
    note,
    print_json,
    say,
    settings_of,
    took,
)
from duly.cli.temporary_token import borrower, check_account, roles
from duly.errors import DulyError, Malformed

if TYPE_CHECKING:
    from duly.clients.sentinel import Alert, Sentinel, SentinelNews

STORED_EVERY = 500
"""Lines that are read before the disk is waited for."""

As = Annotated[str | None, typer.Option("--as", metavar="NAME", help="Which sentinel of the hub here.")]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Who is told, at the tower. [default]")
]
Session = Annotated[
    str | None, typer.Option("--session", metavar="ID", help="What is guarded. [drawn once and kept]")
]
Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="FILE", help="Its queue and memory. [in the data folder; sentinel.db]"),
]
Http = Annotated[bool | None, typer.Option("--http", help="Plain HTTP instead of a WebSocket.")]
Countdown = Annotated[
    float | None,
    typer.Option(
        "--countdown", parser=duration, metavar="30s", help="How long an event can be called off. [15s]"
    ),
]

sentinel = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True)
class _Given:
    """What was said on the command line. Options may stand before and behind `trigger`."""

    url: str | None = None
    token: str | None = None
    profile: str | None = None
    session: str | None = None
    store: Path | None = None
    http: bool | None = None
    debounce: float | None = None
    per_hour: int | None = None
    cooldown: float | None = None
    countdown: float | None = None
    keep: float | None = None
    summary: float | None = None
    heartbeat: float | None = None
    as_: str | None = None
    data: str | None = None

    def and_then(self, later: _Given) -> _Given:
        said = {field.name: getattr(later, field.name) for field in fields(later)}
        return replace(self, **{name: value for name, value in said.items() if value is not None})


class _Who:
    """Which tower, as whom, with what memory."""

    def __init__(self, given: _Given) -> None:
        self.given = given
        hub = find_hub(given.data, given.url, given.token) if given.url else need_hub(given.data)
        assert hub is not None
        self.hub: HubClient = hub
        self.name = _named(hub, given.as_) if hub.local and given.token is None else ""
        folder = Path(settings_of(given.data).data)
        self.store = given.store or (
            folder / f"sentinel-{self.name}.db" if self.name else Path("sentinel.db")
        )

    def open(self) -> Sentinel:
        from duly.clients.sentinel import Sentinel
        from duly.clients.websocket_link import Access
        from duly.core.monitor.signals import SentinelPolicy
        from duly.settings import section

        given, hub = self.given, self.hub
        limits = ("debounce", "per_hour", "cooldown", "countdown", "keep", "summary", "heartbeat")
        policy = section("sentinel", SentinelPolicy, {name: getattr(given, name) for name in limits})
        token = given.token or hub.token
        if self.name and given.http:
            token = hub.borrow(self.name)
        return Sentinel(
            hub.url,
            token,
            data=str(self.store.absolute()),
            profile=given.profile or "default",
            session=given.session or "",
            policy=policy,
            transport="http" if given.http else "websocket",
            access=Access(borrower(hub, self.name, given.data) if self.name else None, hub.tls),
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
def watch(
    context: typer.Context,
    url: Url = None,
    token: Token = None,
    profile: Profile = None,
    session: Session = None,
    store: Store = None,
    http: Http = None,
    debounce: Annotated[
        float | None,
        typer.Option(
            "--debounce", parser=duration, metavar="30s", help="Repeats within this are one event. [30s]"
        ),
    ] = None,
    per_hour: Annotated[
        int | None, typer.Option("--per-hour", metavar="N", help="Most events of one device. [10]")
    ] = None,
    cooldown: Annotated[
        float | None,
        typer.Option(
            "--cooldown",
            parser=duration,
            metavar="30s",
            help="Nothing but what is critical after a cancel. [5m]",
        ),
    ] = None,
    countdown: Countdown = None,
    keep: Annotated[
        float | None,
        typer.Option(
            "--keep", parser=duration, metavar="30s", help="What cannot be sent for so long expires. [7d]"
        ),
    ] = None,
    summary: Annotated[
        float | None,
        typer.Option(
            "--summary",
            parser=duration,
            metavar="30s",
            help="What the limit holds back is told by then. [5m]",
        ),
    ] = None,
    heartbeat: Annotated[
        float | None,
        typer.Option(
            "--heartbeat",
            parser=duration,
            metavar="60s",
            help="Promise the tower a sign of life so often; when it stops, people are told. [none]",
        ),
    ] = None,
    as_: As = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Watch devices: report signals, once each, also over a bad network.

    Reads signals from its input, one a line:

    \b
        disconnect DEVICE
        reconnect DEVICE
        trigger REASON DEVICE [{"severity":"critical","location":…,"meta":…,"countdown":0}]
        cancel DEVICE
        stand-down

    and shows what becomes of them. An event waits out its countdown (15 s), in which 'cancel' calls it off;
    then it goes to the tower, at once or when that can be reached. Everything is in its file: kill it, start
    it again, and it goes on. When the input ends it sends what is left, and ends. Limits are flags, or
    [sentinel] in duly.toml. Without --url and --token it uses the hub on this machine.
    """
    context.obj = _Given(
        url, token, profile, session, store, http, debounce, per_hour, cooldown, countdown, keep,
        summary, heartbeat, as_, data,
    )  # fmt: skip
    if context.invoked_subcommand is None:
        asyncio.run(_watch(_Who(context.obj), json))


@sentinel.command("trigger")
def trigger(
    context: typer.Context,
    reason: Annotated[str, typer.Argument(metavar="REASON")],
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    more: Annotated[
        str | None,
        typer.Argument(metavar="JSON", help='{"severity":"critical","location":…,"meta":…}'),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option("--wait", parser=duration, metavar="10s", help="For the tower to have it. [10s]"),
    ] = None,
    url: Url = None,
    token: Token = None,
    profile: Profile = None,
    session: Session = None,
    store: Store = None,
    http: Http = None,
    countdown: Countdown = None,
    as_: As = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Report one signal: store it, send it, and say how it ended.

    It goes out at once, unless there is a --countdown.

    Exits with 0 if the tower has it, 6 if it was held back or refused, 4 if the token is not known, 3 if the
    tower cannot be reached and 5 if it did not answer; in the last three cases it is stored and goes out with
    the next one.
    """
    before: _Given = context.obj
    given = before.and_then(
        _Given(url, token, profile, session, store, http, countdown=countdown, as_=as_, data=data)
    )
    options = _options(more or "")
    options.setdefault("countdown", given.countdown or 0.0)
    patience = 10.0 if wait is None else wait
    raise typer.Exit(asyncio.run(_trigger(_Who(given), reason, device, options, patience, json)))


async def _trigger(
    who: _Who, reason: str, device: str, options: dict[str, Any], wait: float, json: bool
) -> Exit:
    async with who.open() as watcher:
        alert = watcher.trigger(reason, device, **options)
        await alert.stored()
        trying = asyncio.ensure_future(_first_try(watcher))
        sent = alert.sent
        either: set[asyncio.Future[Any]] = {sent, trying}
        limit = wait + float(options["countdown"] or 0)
        await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        end = sent.result() if sent.done() else None
        code, denied = trying.result() if trying.done() else (Exit.OK, "")
        for one in either:
            one.cancel()
    detail = denied if end is None else end.reason
    if json:
        print_json({"event": alert.id, "state": "stored" if end is None else end.state, "detail": detail})
    if end is not None:
        if not json:
            mark = f"   [{alert.id}]" if alert.id else ""
            say(f"{_WORDS.get(end.state, end.state)}{f': {detail}' if detail else ''}{mark}")
        return Exit.OK if end.done else Exit.REFUSED if end.state in ("held", "failed") else Exit.FAILED
    kept = f"the event is stored in {who.store} and goes out with the next one"
    if denied:
        raise CommandFailed(code, f"{denied}; {kept}")
    if not watcher.name and not who.given.http:
        raise CommandFailed(Exit.UNREACHABLE, f"{HubUnreachable(who.hub.url, 'no connection')}; {kept}")
    raise CommandFailed(Exit.UNKNOWN, f"the tower has not answered; {kept}")


async def _first_try(watcher: Sentinel) -> tuple[Exit, str]:
    """Why the tower does not let us in, or does not take the event for now; waits for ever if it does."""
    async for news in watcher.news():
        if news.what == "denied":
            return Exit.NOT_ALLOWED, news.detail
        if news.what == "refused":
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
        note(f"{count(left, 'event')} not with the tower yet: in {who.store}, for the next start")


async def _work(watcher: Sentinel, json: bool) -> None:
    """Every line; then until the tower has everything."""
    lines = _lines()
    alert: Alert | None = None
    for_the_disk = 0
    while (line := await lines.get()) is not None:
        try:
            alert = _obey(watcher, line) or alert
        except DulyError as problem:
            _complain(str(problem), line, json)
        for_the_disk += 1
        if alert is not None and for_the_disk % STORED_EVERY == 0:
            await alert.stored()
    await watcher.drained()


def _lines() -> asyncio.Queue[str | None]:
    """The lines of the input, then None. Whatever the input is, only a thread can wait for it."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
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
        case "stand-down":
            watcher.stand_down()
            return None
        case "trigger" if len(words.split()) > 1:
            reason, device, *more = words.split(maxsplit=2)
            return watcher.trigger(reason, device, **_options(more[0] if more else ""))
        case _:
            raise Malformed(
                "write: disconnect DEVICE, reconnect DEVICE, trigger REASON DEVICE [JSON], cancel DEVICE or "
                "stand-down"
            )


def _options(text: str) -> dict[str, Any]:
    import msgspec

    if not text:
        return {}
    try:
        options = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as problem:
        raise Malformed(f"{text[:80]!r} is not a JSON object: {problem}") from None
    unknown = sorted(options.keys() - {"severity", "location", "meta", "countdown"})
    if unknown:
        raise Malformed(f"{', '.join(unknown)}: not known; there are severity, location, meta and countdown")
    lasts = options.get("countdown")
    if lasts is not None and not isinstance(lasts, int | float):
        raise Malformed(f"countdown is a number of seconds, not {lasts!r}")
    return options


# ── showing ──────────────────────────────────────────────────────────────────────────────────────

_WORDS = {"done": "the tower has it", "held": "held back", "sent": "sent: the tower has it"}


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
            return f"not let in: {news.detail}"
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
