"""`duly once`: the keys that `duly.once` and the HTTP middleware remember.

The law: no verb by itself lets something run twice. `settle` stores what an operator has found out about a
run whose end is unknown; only `forget` makes a key fresh again, and says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    JsonObject,
    clock,
    count,
    open_to_read,
    print_json,
    say,
    settings_of,
    table,
    tint,
)
from duly.cli.options import DataFolder, Json, LedgerUrl, Limit, grouped

if TYPE_CHECKING:
    from duly.core.messages import Answer
    from duly.core.operations import Delivery
    from duly.storage.ledger import Ledger
    from duly.storage.records import Record

app = typer.Typer(
    help="Keys of functions and requests that run once: list, settle and forget them.", no_args_is_help=True
)

PAGES: Final = 1_000
"""The most pages of the ledger that a list reads."""
STRETCH: Final = 50_000
"""How many messages the ledger searches for a page."""

ScopeArgument = Annotated[
    str, typer.Argument(metavar="SCOPE", help="The scope, as 'duly once list' shows it.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]


class RunFilter(StrEnum):
    """Which keys to list, by the state of their runs."""

    ANY = "any"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class OnceLedger:
    """The options that select a ledger."""

    ledger: LedgerUrl = None
    folder: DataFolder = None

    async def open(self) -> Ledger:
        """Open the ledger in shared mode, beside the processes that use it."""
        from duly.idempotency.ledgers import url_to_share
        from duly.storage import open_ledger

        return await open_ledger(url_to_share(settings_of(self.folder, self.ledger).ledger_url))


@app.command("list")
@grouped
def list_(
    state: Annotated[RunFilter, typer.Option("--state", help="Only those in this state.")] = RunFilter.ANY,
    scope: Annotated[
        str | None, typer.Option("--scope", metavar="SCOPE", help="Only of this scope. [all]")
    ] = None,
    limit: Limit = 100,
    *,
    at: OnceLedger,
    json: Json = False,
) -> None:
    """List keys, the latest first."""
    found = asyncio.run(_list(state, scope, limit, at))
    if json:
        print_json(found)
    elif found:
        rows = [
            [one["scope"], one["key"], tint(one["state"]), clock(one["accepted_at"]), one["reason"]]
            for one in found
        ]
        table(["scope", "key", "state", "since", "reason"], rows)
    else:
        say("no key is remembered" if state is RunFilter.ANY else f"no key is {state.value}")


@app.command()
@grouped
def settle(
    scope: ScopeArgument,
    key: KeyArgument,
    done: Annotated[
        str | None,
        typer.Option("--done", metavar="JSON", help="The run took effect, with this result. [none]"),
    ] = None,
    failed: Annotated[
        str | None,
        typer.Option("--failed", metavar="TEXT", help="The run did not take effect, for this reason. [none]"),
    ] = None,
    status: Annotated[
        int, typer.Option("--status", min=200, max=599, help="With --done: the HTTP status of a request.")
    ] = 200,
    *,
    at: OnceLedger,
    json: Json = False,
) -> None:
    """Store how a run ended whose end is unknown; repeats get that answer from then on.

    A request of the HTTP middleware is answered with the JSON and --status, or with status 500 and the text.
    """
    if (done is None) == (failed is None):
        raise CommandFailed(Exit.USAGE, "give either --done JSON or --failed TEXT")
    word = asyncio.run(_settle(scope, key, done, failed or "", status, at))
    if json:
        print_json({"scope": scope, "key": key, "state": word})
    else:
        say(f"{scope} {key} is settled; repeats get this outcome")


@app.command()
@grouped
def forget(scope: ScopeArgument, key: KeyArgument, *, at: OnceLedger, json: Json = False) -> None:
    """Forget a key: the next call or request with it runs again, even if it has taken effect before."""
    asyncio.run(_forget(scope, key, at))
    if json:
        print_json({"scope": scope, "key": key, "forgotten": True})
    else:
        say(f"{scope} {key} is forgotten: it may run again")


async def _list(state: RunFilter, scope: str | None, limit: int, at: OnceLedger) -> list[JsonObject]:
    from duly.core.lifecycle import State
    from duly.idempotency.runs import KINDS
    from duly.storage.message_filter import OPEN_STATES, MessageFilter

    states = {RunFilter.ANY: frozenset(State), RunFilter.RUNNING: OPEN_STATES}
    wanted = MessageFilter(scope, states=states.get(state) or frozenset({State[state.name]}))
    found: list[JsonObject] = []
    async with await open_to_read(at.folder, at.ledger) as book:
        before: bytes | None = None
        for _ in range(PAGES):
            page = await book.newest(wanted=wanted, before=before, limit=1_000, look_at=STRETCH)
            found += [_shown(record) for record in page.records if record.message.kind in KINDS]
            before = page.next
            if before is None or len(found) >= limit:
                break
    return found[:limit]


def _shown(record: Record) -> JsonObject:
    from duly.core.units import MS

    return {
        "scope": record.message.scope,
        "key": record.message.id,
        "kind": record.message.kind,
        "state": record.state.word if record.state.terminal else RunFilter.RUNNING.value,
        "accepted_at": record.accepted_at // MS,
        "reason": "" if record.answer is None else record.answer.reason,
    }


async def _settle(scope: str, key: str, done: str | None, failed: str, status: int, at: OnceLedger) -> str:
    from duly.core.lifecycle import State
    from duly.core.operations import Advance, Finish

    async with await at.open() as book:
        record, now = await _found(book, scope, key), book.clock.now()
        answer = _answer(record, done, failed, status)
        ends_done = done is not None or record.message.kind == "http"
        to = State.DONE if ends_done else State.FAILED
        advance = Advance(record.message.key, to, now, answer)
        if not record.state.terminal:
            delivery = await _abandoned(book, record, now)
            moved = await book.apply(Finish(delivery.ref, delivery.attempt, to, "settled", (advance,)))
        else:
            moved = record.state is State.UNKNOWN and (await book.apply(advance)).moved
        if not moved:
            raise CommandFailed(
                Exit.REFUSED,
                f"{scope} {key} is {record.state.word}: only a run whose end is unknown can be settled",
            )
        return to.word


async def _forget(scope: str, key: str, at: OnceLedger) -> None:
    async with await at.open() as book:
        record = await _found(book, scope, key)
        if not record.state.terminal:
            await _abandoned(book, record, book.clock.now())
        await book.forget([record.message.key])


async def _found(book: Ledger, scope: str, key: str) -> Record:
    from duly.idempotency.runs import KINDS

    record = await book.outcome(scope, key)
    if record is None or record.message.kind not in KINDS:
        raise CommandFailed(
            Exit.UNKNOWN, f"{scope} {key} is not known; 'duly once list' shows the known keys"
        )
    return record


async def _abandoned(book: Ledger, record: Record, now: int) -> Delivery:
    """Return the delivery of a run whose process seems to be dead; fail if its lease has not ended."""
    from duly.core.units import SECOND

    (delivery, *_) = await book.deliveries(record.message.key)
    if delivery.due > now:
        left = (delivery.due - now) // SECOND + 1
        raise CommandFailed(
            Exit.REFUSED,
            f"{record.message.scope} {record.message.id} is running; its lease lasts "
            f"{count(left, 'second')} unless its process renews it",
        )
    return delivery


def _answer(record: Record, done: str | None, failed: str, status: int) -> Answer:
    import msgspec

    from duly.core.messages import Answer
    from duly.idempotency.runs import ERROR, OK
    from duly.integrations.idempotency_key import problem, response_of, stored_answer

    if done is not None:
        try:
            data = msgspec.json.encode(msgspec.json.decode(done))
        except msgspec.DecodeError as trouble:
            raise CommandFailed(Exit.USAGE, f"--done needs JSON, and this is not JSON: {trouble}") from None
        if record.message.kind == "http":
            return stored_answer(response_of(status, [(b"content-type", b"application/json")], data))
        return Answer(OK, data)
    if record.message.kind == "http":
        return stored_answer(problem(500, "failed", "The request failed", failed))
    return Answer(ERROR, msgspec.json.encode(("Settled", failed)), failed)
