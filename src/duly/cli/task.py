"""`duly task`: tasks that a node sent or was sent, in its memory.

The law: what is shown is what the node's ledger holds, whether or not the node runs. Who changes something
has the file to himself: while the node runs, it is the node that does it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    Json,
    clock,
    code_of,
    duration,
    note,
    print_json,
    say,
    state_code,
    table,
    tint,
)
from duly.cli.keys import RequireSigned, SignWith
from duly.cli.node import (
    CONNECT,
    As,
    Broker,
    CaFile,
    Cert,
    Form,
    FormOption,
    Key,
    Prefix,
    begun,
    broker_url,
    payload_of,
)

if TYPE_CHECKING:
    from duly.clients.node.tasks import SentTask
    from duly.storage.ledger import Ledger, Record

app = typer.Typer(help="Tasks that a node sent or was sent.", no_args_is_help=True, rich_markup_mode=None)

Memory = Annotated[
    str, typer.Option("--data", metavar="FILE", help="The node's memory: a file, or the URL of a ledger.")
]
Id = Annotated[str, typer.Argument(metavar="ID")]
Expires = Annotated[
    float | None,
    typer.Option("--expires", parser=duration, metavar="1d", help="Not to be done after this. [1d]"),
]
Wait = Annotated[
    float | None,
    typer.Option("--wait", parser=duration, metavar="5s", help="For the other side to have it. [5s]"),
]
A_DAY = 86_400.0
LOOKED_AT = 10_000
"""Most tasks among which the newest are found."""


@app.command("send")
def send(
    to: Annotated[str, typer.Argument(metavar="NODE")],
    action: Annotated[str, typer.Argument(metavar="ACTION")],
    payload: Annotated[str | None, typer.Argument(metavar="JSON")] = None,
    *,
    data: Memory,
    url: Broker,
    expires: Expires = None,
    wait: Wait = None,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Use this id; the same id again is a repeat.")
    ] = None,
    as_: As = "",
    form: Form = FormOption.BASE64,
    prefix: Prefix = "nodes",
    cafile: CaFile = "",
    cert: Cert = "",
    key: Key = "",
    keys: SignWith = None,
    require_signed: RequireSigned = False,
    json: Json = False,
) -> None:
    """Store a task, and send it. It goes on with the next 'duly task' or node on the same file.

    Exits with 0 if the other side has it, 1 if it has failed, 3 if it is stored but the broker cannot be
    reached, 5 if nobody can tell yet.
    """
    value = payload_of(payload)
    where = broker_url(url, cafile, cert, key, as_)

    async def do(node: Any) -> SentTask:
        sent: SentTask = await node.send(to, action, value, expires=expires or A_DAY, id=id_, form=form.value)
        return sent

    signing = {"keys": keys, "require_signed": require_signed}
    _with_node(where, {"name": as_, "prefix": prefix, "data": data} | signing, do, wait, json)


@app.command("retry")
def retry(
    id_: Id,
    *,
    data: Memory,
    url: Broker,
    expires: Expires = None,
    wait: Wait = None,
    as_: As = "",
    prefix: Prefix = "nodes",
    cafile: CaFile = "",
    cert: Cert = "",
    key: Key = "",
    keys: SignWith = None,
    require_signed: RequireSigned = False,
    json: Json = False,
) -> None:
    """Send a task that has ended once more, as a new one; one that has not is sent again at once."""

    async def do(node: Any) -> SentTask:
        sent: SentTask = await node.find(id_)
        return await node.retry(id_, expires=expires or A_DAY) if sent.ended else sent

    where = broker_url(url, cafile, cert, key, as_)
    signing = {"keys": keys, "require_signed": require_signed}
    _with_node(where, {"name": as_, "prefix": prefix, "data": data} | signing, do, wait, json)


def _with_node(url: str, how: dict[str, Any], do: Any, wait: float | None, json: bool) -> None:
    from duly.clients.node.node import Node
    from duly.errors import ConnectionLost, ConnectionRefused, DulyError

    async def run() -> tuple[SentTask, DulyError | None]:
        async with begun(Node(url, serve=False, **how), f"trying again for {CONNECT:g} s") as node:
            sent: SentTask | None = None
            try:
                with suppress(TimeoutError):  # on a ledger that others write too nothing is stored before
                    async with asyncio.timeout(CONNECT):
                        sent = await do(node)
                await node.ready(CONNECT if sent else 0.0)
            except (ConnectionLost, ConnectionRefused) as problem:
                if sent is None:
                    raise
                return sent, problem
            sent = sent or await do(node)
            with suppress(TimeoutError):
                await sent.delivered.within(5.0 if wait is None else wait)
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
    data: Memory,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The newest so many.")] = 20,
    open_: Annotated[bool, typer.Option("--open", help="Only those that have not ended.")] = False,
    json: Json = False,
) -> None:
    """List the tasks of a node, newest first."""

    async def read(ledger: Ledger) -> list[dict[str, Any]]:
        name = (await ledger.item("node", "name") or b"").decode()
        page = await ledger.messages(limit=LOOKED_AT, open_only=open_)
        found = page.records
        while page.next is not None and len(found) < LOOKED_AT:
            page = await ledger.messages(before=page.next, limit=LOOKED_AT, open_only=open_)
            found += page.records
        # The ledger goes by the time in an id; other people's ids have none.
        found.sort(key=lambda record: record.accepted_at, reverse=True)
        return [_shown(record, name) for record in found[:limit]]

    found = _read(data, read)
    if json:
        print_json(found)
        return
    rows = [
        [clock(one["at"]), one["state"], f"{one['from']} → {one['to']}", one["action"], one["id"]]
        for one in found
    ]
    table(["since", "state", "", "action", "id"], rows)


@app.command("show")
def show(id_: Id, *, data: Memory, json: Json = False) -> None:
    """Show a task: what was asked, how often it was sent, how it ended.

    Exits with 0 if it was done, 1 if it failed, 5 if nobody can tell (yet).
    """

    import msgspec

    async def read(ledger: Ledger) -> list[dict[str, Any]]:
        name = (await ledger.item("node", "name") or b"").decode()
        found = []
        page = await ledger.messages(limit=1_000)
        while True:
            for record in page.records:
                if record.message.id == id_:
                    tries = [one.attempt for one in await ledger.deliveries(record.message.key)]
                    found.append(_shown(record, name) | {"attempts": sum(tries)})
            if page.next is None or found:
                return found
            page = await ledger.messages(before=page.next, limit=1_000)

    found = _read(data, read)
    if not found:
        raise CommandFailed(
            Exit.UNKNOWN, f"there is no task {id_} in {data}; what was refused says: duly why --data {data}"
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
def cancel(id_: Id, *, data: Memory, json: Json = False) -> None:
    """No longer send a task. What its receiver has, it may still do."""
    from duly.clients.node.outgoing import cancel_stored
    from duly.storage import open_ledger

    async def run() -> bool:
        async with await open_ledger(_url(data)) as ledger:
            return await cancel_stored(ledger, id_)

    if not asyncio.run(run()):
        raise CommandFailed(Exit.REFUSED, f"{id_} has ended already, or was never sent from {data}")
    print_json({"id": id_, "state": "cancelled"}) if json else say(f"{id_}  {tint('cancelled')}")


def _url(data: str) -> str:
    from duly.storage import file_url

    return data if "://" in data else file_url(data)


def _read(data: str, read: Any) -> Any:
    from duly.storage import open_ledger

    url = _url(data)
    if url.startswith("sqlite:"):
        url += "?mode=ro"

    async def run() -> Any:
        async with await open_ledger(url) as ledger:
            return await read(ledger)

    return asyncio.run(run())


def _shown(record: Record, name: str) -> dict[str, Any]:
    from duly.clients.node.tasks import unpack
    from duly.core.lifecycle import State
    from duly.core.units import MS
    from duly.errors import SenderError
    from duly.wire import fd

    message, answer = record.message, record.answer
    out = message.scope == name
    payload: Any = None
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
