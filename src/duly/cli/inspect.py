"""`duly outcome trace why watch`: how a message ended, and why nothing happened.

The law: every question has an answer, from the hub if it runs and from its ledger if it does not. An id is
unique only within its sender; if several senders used one, all of them are shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    HubClient,
    HubUnreachable,
    JsonObject,
    clock,
    find_hub,
    note,
    pad,
    print_json,
    say,
    state_code,
    style,
    table,
    tint,
    took,
)
from duly.cli.options import HubOptions, Json, LedgerOptions, Limit, grouped

if TYPE_CHECKING:
    from duly.runtime.timeline import TimelineStep
    from duly.storage.ledger import Ledger

CHAT_LINES: Final = frozenset({"one_chat", "group_chat"})
ATTEMPTS: Final = ("sent", "arrived", "not sent", "in doubt", "refused")
"""Hops that are attempts to hand a message over."""

Id = Annotated[str, typer.Argument(metavar="ID")]
ScopeOption = Annotated[
    str | None, typer.Option("--scope", metavar="APP", help="The account that made the id. [any]")
]


@grouped
def outcome(
    id_: Id,
    scope: ScopeOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show how a message ended.

    Exits with 0 if it was done, 1 if it failed, 5 if that is not known (yet), 6 if it was refused.
    """
    records, refusals = _find(id_, scope, _source(at))
    if json:
        print_json(_single(records) if records else {"id": id_, "state": "refused", "refusals": refusals})
    else:
        for record in records:
            say(_headline(record))
        if not records:
            _show_refusals(refusals)
    raise typer.Exit(state_code(records[0]["state"]) if records else Exit.REFUSED)


@grouped
def trace(
    id_: Id,
    scope: ScopeOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show every hop of a message: times, attempts, reasons."""
    _show(id_, *_find(id_, scope, _source(at)), json)


@grouped
def why(
    id_: Annotated[str | None, typer.Argument(metavar="ID")] = None,
    limit: Limit = 20,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show why nothing happened: what was refused, and the reasons.

    With an ID the same as `duly trace`: the timeline of what was accepted under it, and what was refused.
    """
    source = _source(at)
    if id_ is not None:
        _show(id_, *_find(id_, None, source), json)
        return
    refusals = source.refusals(limit)
    if json:
        print_json(refusals)
    elif refusals:
        _show_refusals(refusals)
    else:
        say("nothing has been refused")


@grouped
def watch(*, at: HubOptions, json: Json = False) -> None:
    """Show what goes through the hub, as it happens. Ctrl-C ends it.

    Needs an admin's token, or the data folder of the hub.
    """
    asyncio.run(_watch(at.need(), lambda: find_hub(at.folder, at.url, at.token), json))


# ── asking ───────────────────────────────────────────────────────────────────────────────────────


T = TypeVar("T")


class _RecordsAtHub:
    """Reads messages from a hub over HTTP."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub

    def scopes(self, id_: str) -> list[str]:
        """Return the senders that used this id."""
        from urllib.parse import quote

        found = self._hub.ask(f"/v1/messages?id={quote(id_, safe='')}")["messages"]
        return [record["scope"] for record in found]

    def one(self, scope: str, id_: str) -> JsonObject | None:
        """Return one message, or None if the hub does not know it."""
        from urllib.parse import quote

        try:
            return self._hub.ask(f"/v1/messages/{quote(scope, safe='')}/{quote(id_, safe='')}")
        except CommandFailed as problem:
            if problem.code is Exit.UNKNOWN:
                return None
            raise

    def refusals(self, limit: int) -> list[JsonObject]:
        """Return the latest refusals."""
        found: list[JsonObject] = self._hub.ask(f"/v1/refusals?limit={limit}")["refusals"]
        return found


class _RecordsInLedger:
    """Reads messages from a ledger, in the form in which a hub returns them."""

    def __init__(self, at: LedgerOptions) -> None:
        self._at = at

    def scopes(self, id_: str) -> list[str]:
        """Return the senders that used this id."""

        async def read(ledger: Ledger) -> list[str]:
            return [record.message.scope for record in await ledger.with_id(id_)]

        return self._with(read, list[str])

    def one(self, scope: str, id_: str) -> JsonObject | None:
        """Return one message, or None if it is not in the ledger."""

        async def read(ledger: Ledger) -> JsonObject | None:
            from duly.apps.chat import receipts
            from duly.core.messages import key_of
            from duly.runtime.trail import Trail
            from duly.transports.http.messages import show, show_delivery

            record = await ledger.outcome(scope, id_)
            if record is None:
                return None
            deliveries = await ledger.deliveries(key_of(scope, id_))
            line = await receipts.trace(ledger, record)
            trail = Trail(ledger)
            hops = [*await trail.of_record(record), *await receipts.hops(trail, record)]
            shown = show(record) | {"deliveries": [show_delivery(one) for one in deliveries], "hops": hops}
            return shown if line is None else shown | {"line": line}

        return self._with(read, JsonObject | None)  # type: ignore[arg-type] # a union is no type to mypy

    def refusals(self, limit: int) -> list[JsonObject]:
        """Return the latest refusals."""

        async def read(ledger: Ledger) -> list[JsonObject]:
            import msgspec

            from duly.core.units import MS

            found = await ledger.refusals(limit)
            return [msgspec.to_builtins(one) | {"at": one.at // MS} for one in found]

        return self._with(read, list[JsonObject])

    def _with(self, read: Callable[[Ledger], Awaitable[T]], as_: type[T]) -> T:
        import msgspec

        async def run() -> bytes:
            async with await self._at.open(reads=True) as ledger:
                return msgspec.json.encode(await read(ledger))

        return msgspec.json.decode(asyncio.run(run()), type=as_)


def _source(at: LedgerOptions) -> _RecordsAtHub | _RecordsInLedger:
    hub = at.find_hub()
    if hub is None:
        return _RecordsInLedger(at)
    if hub.local:
        try:
            hub.ask("/v1/state")
        except HubUnreachable:
            return _RecordsInLedger(at)  # the run file is of a hub that was killed
        except CommandFailed:
            pass
    return _RecordsAtHub(hub)


def _find(
    id_: str, scope: str | None, source: _RecordsAtHub | _RecordsInLedger
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return the messages under an id, and what was refused under it."""
    scopes = [scope] if scope is not None else source.scopes(id_)
    found = [record for one in scopes if (record := source.one(one, id_)) is not None]
    refusals = [one for one in source.refusals(10_000) if one["id"] == id_ and scope in (None, one["scope"])]
    if not found and not refusals:
        raise CommandFailed(
            Exit.UNKNOWN,
            f"nothing is known of {id_}; it never arrived, or it is too old to be remembered",
        )
    return found, refusals


# ── showing ──────────────────────────────────────────────────────────────────────────────────────


def _show(id_: str, records: list[JsonObject], refusals: list[JsonObject], json: bool) -> None:
    """Show the timelines of the messages under an id, and what was refused under it by others."""
    import msgspec

    from duly.core.ids import time_of
    from duly.core.units import MS

    made = (time_of(id_) or 0) // MS
    steps = [_steps(record, made, refusals) for record in records]
    if json:
        messages = [
            record | {"timeline": msgspec.to_builtins(of)} for record, of in zip(records, steps, strict=True)
        ]
        print_json({"id": id_, "made_at": made or None, "messages": messages, "refusals": refusals})
        return
    for record, of in zip(records, steps, strict=True):
        say(_headline(record), *(f"  {line}" for line in _lines(record, of)))
    others = [one for one in refusals if one["scope"] not in {record["scope"] for record in records}]
    if others:
        if records:
            say("", "under this id these were refused:")
        _show_refusals(others)


def _steps(record: JsonObject, made: int, refusals: list[JsonObject]) -> list[TimelineStep]:
    """Return the timeline of a message, the same as on the page."""
    import msgspec

    from duly.runtime.timeline import timeline_of
    from duly.runtime.trail import Hop

    return timeline_of(
        record["state"],
        made=made,
        accepted_at=record["accepted_at"],
        moved_at=record["moved_at"],
        reason=(record.get("ack") or {}).get("detail", ""),
        hops=msgspec.convert(record.get("hops", []), list[Hop]),
        refusals=[
            (one["at"], one["word"], one["reason"]) for one in refusals if one["scope"] == record["scope"]
        ],
    )


def _single(records: list[JsonObject]) -> object:
    return records[0] if len(records) == 1 else records


def _headline(record: JsonObject) -> str:
    ack = record.get("ack")
    return (
        f"{record['id']}  {record['scope']} → {record['to']}  {record['type']}  "
        f"{tint(record['state'])}{_how(ack)}{_result(record)}"
    )


def _how(ack: JsonObject | None) -> str:
    return "" if ack is None else f", code {ack['code']}" + (f": {ack['detail']}" if ack["detail"] else "")


def _result(record: JsonObject) -> str:
    """Return the result of a message: the number of a chat line, or the data of the answer to any other."""
    ack = record.get("ack") or {}
    data = ack.get("data")
    if record["type"] in CHAT_LINES and isinstance(data, int):
        return f", line {data}"
    return _data(ack)


def _data(ack: JsonObject) -> str:
    import msgspec

    data = ack.get("data")
    return "" if data is None else "  " + msgspec.json.encode(data).decode()


def _lines(record: JsonObject, steps: list[TimelineStep]) -> list[str]:
    """Return the timeline of a message in order, followed by what only the ledger knows."""
    accepted, hops = record["accepted_at"], record.get("hops", [])
    lines: list[str] = []
    for step in steps:
        since = step.at - accepted
        sign = "-" if since < 0 else "+"
        after = f"{sign}{took(abs(since))}" if since and step.what != "made" else ""
        at = style(f"  ({step.hub})", "dim") if step.hub else ""
        lines.append(f"{clock(step.at)}  {after:>9}  {_sentence(step, record)}{at}")
    blank = f"{'':12}  {'':9}  "
    lines += [blank + line for one in record.get("deliveries", []) for line in _delivery(one, record, hops)]
    if "line" in record:
        lines += [blank + line for line in _line(record["line"])]
    if record["state"] == "accepted":
        until = f" until {clock(record['exp'])}" if "exp" in record else ""
        lines.append(f"{blank}waiting for its turn or its device{until}")
    return lines


def _delivery(delivery: JsonObject, record: JsonObject, hops: list[JsonObject]) -> Iterator[str]:
    """Yield the state of a delivery in the ledger, where the timeline does not show it."""
    to, tries = f"{delivery['recipient']} ({delivery['channel']})", delivery["attempts"]
    if tries > len({hop["attempt"] for hop in hops if hop["what"] in ATTEMPTS}):
        times = "once" if tries == 1 else f"{tries} times"
        yield f"sent to {to} {times} in all"
    if "next_at" in delivery:
        yield f"next attempt to {to} at {clock(delivery['next_at'])}"
    if delivery["error"] not in ("", (record.get("ack") or {}).get("detail")):
        yield f"the last attempt to {to}: {delivery['error']}"


def _line(line: JsonObject) -> Iterator[str]:
    """Return the receipts of a chat line."""
    of = line["of"]
    yield (
        f"line {line['n']} of {line['conv']}: {line['delivered']} of {of} have it, {line['read']} of {of} "
        "have read it"
    )
    for one in line["recipients"]:
        name, has = one["name"], one.get("acknowledged", 0)
        match one["state"]:
            case "read":
                yield f"read by {name}, up to {one['read']}"
            case "delivered":
                yield f"delivered to {name}: acknowledged up to {has}; read up to {one.get('read', 0)}"
            case "sent":
                times = "once" if one["attempts"] == 1 else f"{one['attempts']} times"
                yield f"sent to {name} {times}, not acknowledged since {clock(one['since'])}; has up to {has}"
            case _:
                yield f"waits for {name} to come or catch up since {clock(one['since'])}; has up to {has}"
    if of > len(line["recipients"]):
        yield f"… and {of - len(line['recipients'])} more"


def _sentence(step: TimelineStep, record: JsonObject) -> str:
    """Return a step of the timeline as a sentence."""
    detail, attempt, scope = step.detail, step.attempt, record["scope"]
    because = f": {detail}" if detail else ""
    if step.what == record["state"] and step.what not in ("accepted", "sent", "delivered"):
        code = (record.get("ack") or {}).get("code")
        return tint(step.what) + ("" if code is None else f", code {code}") + because + _result(record)
    match step.what:
        case "made":
            return f"made by {scope}, by its own clock"
        case "stored":
            return "accepted: stored by the hub"
        case "sent":
            to = detail or record["to"]
            return f"sent to {to}, attempt {attempt}" if attempt else f"sent to {to}"
        case "fresh":
            return f"told {scope}: accepted"
        case "duplicate":
            return f"{scope} asked again, and was told how far it is"
        case "delivered":
            return f"{detail or record['to']} has it"
        case "read":
            return f"{detail} has read it"
        case "at work":
            return f"{record['to']} is at work on it"
        case "told":
            return f"told {scope}{because}"
        case "not told":
            return f"{scope} was not connected, so it was not told{because}"
        case "done" | "failed" | "expired" | "superseded" | "cancelled" | "unknown" as end:
            return tint(end) + because
        case "trace":
            return f"traced{because}"
        case "arrived" | "not sent" | "in doubt" | "called off" | "refused" as fate if attempt:
            return f"attempt {attempt}: {fate}: {detail}"
        case "refused":
            return f"refused{because}"
        case "conflict" | "stale" | "offline" as word:
            return f"refused, and told {scope}: {word}{because}"
        case what:
            return f"told {scope}: {what}{because}"


def _show_refusals(refusals: list[JsonObject]) -> None:
    rows = [
        [clock(one["at"]), one["scope"], one["id"] or "-", one["word"], one["reason"]] for one in refusals
    ]
    table(["time", "from", "id", "refused", "because"], rows)


# ── watching ─────────────────────────────────────────────────────────────────────────────────────


async def _watch(hub: HubClient, find: Callable[[], HubClient | None], json: bool) -> None:
    import msgspec

    from duly.clients.websocket_link import Access, WebSocketLink
    from duly.wire import frames
    from duly.wire.frames import Frame, ServerCode

    heard: asyncio.Queue[Frame] = asyncio.Queue()

    async def where() -> tuple[str, str]:
        now = find() or hub  # after a restart its run file has another token
        return now.url, now.token

    def up(_: Frame) -> None:
        link.send(frames.encode(Frame("watch")))

    def down() -> None:
        note("the hub closed the connection; waiting for it")

    hub.knock()
    link = WebSocketLink(
        hub.url, hub.token, up=up, heard=heard.put_nowait, down=down, access=Access(where, hub.tls)
    )
    await link.start()
    try:
        await link.ready()
        while True:
            frame = await heard.get()
            if frame.type == "server_ack" and frame.code == ServerCode.ACCEPTED:
                note(f"watching {hub.url}; Ctrl-C ends it")
            elif frame.type == "server_ack":
                raise CommandFailed(Exit.NOT_ALLOWED, frame.detail or "the hub does not allow it")
            if frame.type == "seen":
                seen = {"time": frame.time, **msgspec.json.decode(frame.data, type=JsonObject)}
                print_json(seen) if json else say(_seen(seen))
    finally:
        await link.stop()


def _seen(seen: JsonObject) -> str:
    who = f"{seen['scope']} → {seen['to']}" if seen.get("to") else seen.get("scope") or seen.get("device", "")
    match seen["what"]:
        case "said" if seen["word"] == "fresh":
            what = f"{seen.get('kind', '')} {tint('accepted')}".lstrip()
        case "said":
            what = tint(seen["word"]) if seen["word"] == "duplicate" else f"{tint('refused')}: {seen['word']}"
        case "line":
            what = f"{seen['kind']} {tint('accepted')}, number {seen['n']}"
        case "sent":
            what = "sent" if seen["attempt"] == 1 else f"sent again, attempt {seen['attempt']}"
        case "ended":
            what = f"{tint(seen['state'])}, code {seen['code']}"
        case "told":
            what = f"told: {seen['fate']}"
        case "pushed":
            what = f"{seen['kind']} #{seen['cursor']}{_data(seen)}"
        case "refused":
            what = f"{tint('refused')}: {seen['reason']}"
        case other:
            what = str(other)
    id_ = style(f"  [{seen['id']}]", "dim") if seen.get("id") else ""
    return f"{clock(seen['time'])}  {who:<20}  {pad(what, 26) if id_ else what}{id_}"
