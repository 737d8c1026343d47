"""`duly task`: tasks that a node sent or received, in its memory.

The law: what is shown is what the node's ledger holds, whether or not the node runs. A verb that changes
something needs the file for itself: while the node runs, only the node changes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    JsonObject,
    clock,
    code_of,
    note,
    print_json,
    say,
    state_code,
    table,
    tint,
)
from duly.cli.node import CONNECT, FormOption, PayloadForm, begun, payload_of
from duly.cli.options import Json, Limit, MessageId, NodeOptions, NodeStore, grouped, length

if TYPE_CHECKING:
    from duly.clients.node.node import Node
    from duly.clients.node.tasks import SentTask
    from duly.storage.ledger import Ledger, Record

app = typer.Typer(help="Tasks that a node sent or received.", no_args_is_help=True, rich_markup_mode=None)

Id = Annotated[str, typer.Argument(metavar="ID")]
T = TypeVar("T")

A_DAY = 86_400.0
NEWEST = 10_000
"""The most tasks that are read to find the newest."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(NodeOptions):
    """The options of sending: how a task is sent, and from which memory."""

    store: NodeStore
    expires: Annotated[
        float | None, length("--expires", "The task is not carried out after this time. [1d]", metavar="1d")
    ] = None
    wait: Annotated[
        float | None, length("--wait", "How long to wait until its receiver has it. [5s]", metavar="5s")
    ] = None

    def node(self) -> Node:
        """Return the node that sends the task."""
        from duly.clients.node.node import Node

        return Node(
            self.address(self.as_), serve=False, name=self.as_, prefix=self.prefix, store=self.store,
            keys=self.keys, require_signed=self.require_signed,
        )  # fmt: skip


@app.command("send")
@grouped
def send(
    to: Annotated[str, typer.Argument(metavar="NODE")],
    action: Annotated[str, typer.Argument(metavar="ACTION")],
    payload: Annotated[str | None, typer.Argument(metavar="JSON")] = None,
    *,
    how: TaskOptions,
    id_: MessageId = None,
    form: PayloadForm = FormOption.BASE64,
    json: Json = False,
) -> None:
    """Store a task, and send it. A later 'duly task send', or a node, on the same file continues it.

    Exits with 0 if its receiver has it, 1 if it has failed, 3 if it is stored but the broker cannot be
    reached, 5 if that is not known yet.
    """
    value = payload_of(payload)
    expires = how.expires or A_DAY

    async def do(node: Node) -> SentTask:
        return await node.send(to, action, value, expires=expires, id=id_, form=form.value)

    _with_node(how, do, json)


@app.command("retry")
@grouped
def retry(
    id_: Id,
    *,
    how: TaskOptions,
    json: Json = False,
) -> None:
    """Send a task again: as a new task if it has ended, otherwise the same one at once."""

    async def do(node: Node) -> SentTask:
        sent = await node.find(id_)
        return await node.retry(id_, expires=how.expires or A_DAY) if sent.ended else sent

    _with_node(how, do, json)


def _with_node(how: TaskOptions, do: Callable[[Node], Awaitable[SentTask]], json: bool) -> None:
    from duly.errors import ConnectionLost, ConnectionRefused, DulyError

    async def run() -> tuple[SentTask, DulyError | None]:
        async with begun(how.node(), f"trying again for {CONNECT:g} s") as node:
            sent: SentTask | None = None
            try:
                with suppress(TimeoutError):  # a shared ledger stores nothing before the broker answers
                    async with asyncio.timeout(CONNECT):
                        sent = await do(node)
                await node.ready(CONNECT if sent else 0.0)
            except (ConnectionLost, ConnectionRefused) as problem:
                if sent is None:
                    raise
                return sent, problem
            sent = sent or await do(node)
            with suppress(TimeoutError):
                await sent.delivered.within(5.0 if how.wait is None else how.wait)
            return sent, None

    sent, problem = asyncio.run(run())
    if json:
        print_json({"id": sent.id, "state": sent.state, "to": sent.to, "action": sent.action})
    else:
        say(f"{sent.id}  {sent.action} to {sent.to}: {tint(sent.state)}")
    if problem is not None:
        raise CommandFailed(
            code_of(problem),
            f"{problem}; it is stored, and goes out with the next 'duly task send' or node on the same file",
        )
    if sent.state == "sent":
        note(
            f"{sent.to} has not confirmed it yet; it is stored, and goes again with the next 'duly task send'"
            " or node on the same file"
        )
    raise typer.Exit(Exit.OK if sent.state == "delivered" else state_code(sent.state))


@app.command("list")
def list_(
    *,
    store: NodeStore,
    limit: Limit = 20,
    open_: Annotated[bool, typer.Option("--open", help="Only those that have not ended.")] = False,
    json: Json = False,
) -> None:
    """List the tasks of a node, newest first."""

    async def read(ledger: Ledger) -> list[JsonObject]:
        name = (await ledger.item("node", "name") or b"").decode()
        page = await ledger.messages(limit=NEWEST, open_only=open_)
        found = page.records
        while page.next is not None and len(found) < NEWEST:
            page = await ledger.messages(before=page.next, limit=NEWEST, open_only=open_)
            found += page.records
        # The ledger sorts by the time in an id; ids of other programs have none.
        found.sort(key=lambda record: record.accepted_at, reverse=True)
        return [_shown(record, name) for record in found[:limit]]

    found = _read(store, read)
    if json:
        print_json(found)
        return
    rows = [
        [clock(one["at"]), one["state"], f"{one['from']} → {one['to']}", one["action"], one["id"]]
        for one in found
    ]
    table(["since", "state", "", "action", "id"], rows)


@app.command("show")
def show(id_: Id, *, store: NodeStore, json: Json = False) -> None:
    """Show a task: what was asked, how often it was sent, how it ended.

    Exits with 0 if it was done, 1 if it failed, 5 if that is not known (yet).
    """

    import msgspec

    from duly.core.lifecycle import State

    async def read(ledger: Ledger) -> list[JsonObject]:
        name = (await ledger.item("node", "name") or b"").decode()
        found = []
        page = await ledger.messages(limit=1_000)
        while True:
            for record in page.records:
                if record.message.id == id_:
                    tries = [one.attempt for one in await ledger.deliveries(record.message.key)]
                    once = record.state is State.DONE  # whose delivery is gone
                    found.append(_shown(record, name) | {"attempts": sum(tries) or int(once)})
            if page.next is None or found:
                return found
            page = await ledger.messages(before=page.next, limit=1_000)

    found = _read(store, read)
    if not found:
        raise CommandFailed(
            Exit.UNKNOWN, f"there is no task {id_} in {store}; refusals are shown by: duly why --data {store}"
        )
    for one in found:
        if json:
            print_json(one)
            continue
        say(f"{one['id']}  {one['from']} → {one['to']}  {one['action']}  {tint(one['state'])}")
        for word in ("payload", "result", "error", "attempts"):
            if one.get(word) not in (None, ""):
                say(f"  {word}: {msgspec.json.encode(one[word]).decode()}")
        say(f"  since: {clock(one['at'])}")
    raise typer.Exit(state_code(found[0]["state"]))


@app.command("cancel")
def cancel(id_: Id, *, store: NodeStore, json: Json = False) -> None:
    """Stop sending a task. A receiver that has it may still carry it out."""
    from duly.clients.local_ledger import store_url
    from duly.clients.node.outgoing import cancel_stored
    from duly.storage import open_ledger

    async def run() -> bool:
        async with await open_ledger(store_url(store)) as ledger:
            return await cancel_stored(ledger, id_)

    _read(store, lambda ledger: ledger.floor())  # a store with a mistyped name is not created
    if not asyncio.run(run()):
        raise CommandFailed(Exit.REFUSED, f"{id_} has ended already, or was never sent from {store}")
    print_json({"id": id_, "state": "cancelled"}) if json else say(f"{id_}  {tint('cancelled')}")


def _read(store: str, read: Callable[[Ledger], Awaitable[T]]) -> T:
    from duly.clients.local_ledger import store_url
    from duly.storage import open_ledger

    url = store_url(store)
    if url.startswith("sqlite:"):
        url += "?mode=ro"

    async def run() -> T:
        async with await open_ledger(url) as ledger:
            return await read(ledger)

    return asyncio.run(run())


def _shown(record: Record, name: str) -> JsonObject:
    from duly.clients.node.tasks import unpack
    from duly.core.lifecycle import State
    from duly.core.units import MS
    from duly.errors import SenderError
    from duly.wire import fd

    message, answer = record.message, record.answer
    out = message.scope == name
    payload: object = None
    with suppress(SenderError):
        payload = fd.decode_pending(message.body).payload.value if out else unpack(message.body).value
    value = unpack(answer.data).value if answer is not None and answer.data else None
    return {
        "id": message.id,
        "from": message.scope.removesuffix("/self"),
        "to": message.recipient,
        "action": message.kind,
        "state": record.state.word,
        "payload": payload,
        "result": value if record.state is State.DONE else None,
        "error": (value or (answer.reason if answer else None)) if record.state is not State.DONE else None,
        "at": record.moved_at // MS,
    }
