"""`duly node call status`: runs a node, calls one, shows their statuses. They need a broker, and no hub.

The law: a node run here keeps every promise of `duly.Node`; the shell command it runs for a task is its
handler. What the command prints is the result, what it says on stderr is why it failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from duly.cli.common import CommandFailed, Exit, clock, note, print_json, say, table, tint, took
from duly.cli.options import BrokerOptions, Json, NodeOptions, grouped, length

if TYPE_CHECKING:
    from duly.clients.node.incoming import Handler
    from duly.clients.node.node import Node
    from duly.clients.node.statuses import NodeStatus
    from duly.clients.node.tasks import Task

SHOWN = 60
ERROR = 500
CONNECT = 10.0
"""Seconds that a broker has to accept the connection."""
SILENCE = 0.7
"""Seconds without a connection after which stderr says why."""


class EffectOption(StrEnum):
    """The declared effect of a task: whether a task that a crash cut off runs again."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


class FormOption(StrEnum):
    """How payloads are written on the wire."""

    BASE64 = "base64"
    JSON = "json"


PayloadForm = Annotated[
    FormOption, typer.Option("--form", metavar="base64|json", help="How payloads are written on the wire.")
]


def payload_of(text: str | None) -> object:
    """Read the JSON of a payload; None without one."""
    import msgspec

    if text is None:
        return None
    try:
        value: object = msgspec.json.decode(text)
        return value
    except msgspec.DecodeError as problem:
        raise CommandFailed(
            Exit.USAGE, f"the payload is not JSON ({problem}); quote it for the shell, like '{{\"lamp\":1}}'"
        ) from None


@asynccontextmanager
async def begun(node: Node, meanwhile: str) -> AsyncIterator[Node]:
    """Start a node. While it has no connection, stderr says why, and what happens `meanwhile`."""
    await node.start()
    telling = asyncio.create_task(_complain(node, meanwhile))
    try:
        yield node
    finally:
        telling.cancel()
        await node.stop()


async def _complain(node: Node, meanwhile: str) -> None:
    await asyncio.sleep(SILENCE)
    if node.situation == "connecting":
        note(f"duly: no answer from the broker; {meanwhile}")
    async for now in _situations(node):
        if now not in ("connecting", "online"):
            note(f"duly: {now}; {meanwhile}")


async def _situations(node: Node) -> AsyncIterator[str]:
    """Yield a node's situation, and again whenever it has changed."""
    before = ""
    while True:
        if node.situation != before:
            before = node.situation
            yield before
        await node.changes.wait()


# ── node ─────────────────────────────────────────────────────────────────────────────────────────


@grouped
def node(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    run: Annotated[
        list[str],
        typer.Option("--run", metavar="ACTION=COMMAND", help="The shell command for tasks of this action."),
    ],
    store: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FILE", help="The node's memory: a file, or the URL of a ledger. [none]"
        ),
    ] = None,
    effect: Annotated[
        EffectOption,
        typer.Option(
            "--effect",
            metavar="at_most_once|at_least_once",
            help="Whether a task that a crash interrupted is run again.",
        ),
    ] = EffectOption.AT_MOST_ONCE,
    deadline: Annotated[
        float | None,
        length("--deadline", "A command that takes longer is killed, and its task fails. [none]"),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="How many commands run at a time.")
    ] = 4,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Run the tasks of each sender one by one, in its order.")
    ] = False,
    heartbeat: Annotated[
        float | None, length("--heartbeat", "The time between two status reports. [60s]", metavar="60s")
    ] = None,
    at: BrokerOptions,
    json: Json = False,
) -> None:
    """Run a node that runs a shell command for each task.

    The command gets the task as JSON on stdin. What it prints is the result (JSON, or text); if its exit code
    is not 0 the task has failed, with what it wrote to stderr. Without --data the node forgets what it did
    when it ends. A second process of the same node stands by. Ctrl-C stops it.
    """
    from duly.clients.node.mailbox import HEARTBEAT
    from duly.clients.node.node import Node

    it = Node(
        at.address(name),
        name=name,
        store=store,
        prefix=at.prefix,
        concurrency=concurrency,
        ordered=ordered,
        heartbeat=heartbeat or HEARTBEAT,
        keys=at.keys,
        require_signed=at.require_signed,
    )
    for action, command in map(_action, run):
        it.task(action, effect=effect.value, deadline=deadline)(_runner(command, json))
    asyncio.run(_serve(it, json))


def _action(text: str) -> tuple[str, str]:
    action, equals, command = text.partition("=")
    if not (action and equals and command):
        raise CommandFailed(Exit.USAGE, f"--run is ACTION=COMMAND, like 'turn_on=./lamp.sh', not {text!r}")
    return action, command


def _runner(command: str, json: bool) -> Handler:
    async def handler(task: Task) -> object:
        from duly.errors import TaskFailed

        began = time.monotonic()
        code, out, err = await _shell(command, _describe(task))
        _told(task, code, out if code == 0 else err, (time.monotonic() - began) * 1000, json)
        if code:
            raise TaskFailed(_text(err)[-ERROR:] or f"{command!r} ended with code {code}")
        return _value(out)

    return handler


async def _shell(command: str, task: bytes) -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate(task + b"\n")
    finally:
        if process.returncode is None:  # cancelled: its process group is killed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode or 0, out, err


def _describe(task: Task) -> bytes:
    from duly.wire import any_json

    fields = ("id", "sender", "action", "payload", "expires", "attempt")
    return any_json.write({field: getattr(task, field) for field in fields})


def _text(out: bytes) -> str:
    return out.decode(errors="replace").strip()


def _value(out: bytes) -> object:
    import msgspec

    text = _text(out)
    try:
        return msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, RecursionError):
        return text


def _told(task: Task, code: int, said: bytes, ms: float, json: bool) -> None:
    state = "failed" if code else "done"
    if json:
        print_json(
            {"what": state, "id": task.id, "action": task.action, "from": task.sender, "code": code,
             "said": _text(said), "took_ms": round(ms, 1)}
        )  # fmt: skip
        return
    said_text = _text(said).partition("\n")[0][:SHOWN]
    say(
        f"{clock(time.time() * 1000)}  {task.action} for {task.sender}: {tint(state)}, {took(ms)}"
        f"{'  ' + said_text if said_text else ''}   [{task.id}]"
    )


async def _serve(node: Node, json: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    life = loop.create_task(node.run())
    telling = loop.create_task(_announce(node, json))
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
            raise CommandFailed(Exit.FAILED, "the node has ended by itself")
    finally:
        for task in (life, telling, stopping):
            task.cancel()
        await asyncio.gather(life, telling, stopping, return_exceptions=True)


async def _announce(node: Node, json: bool) -> None:
    """Print when the node goes online or offline, and why."""
    async for now in _situations(node):
        if json:
            print_json({"what": now, "name": node.name, "time": round(time.time() * 1000)})
        else:
            say(f"{clock(time.time() * 1000)}  {node.name}: {now}")


# ── call ─────────────────────────────────────────────────────────────────────────────────────────


@grouped
def call(
    to: Annotated[str, typer.Argument(metavar="NODE")],
    action: Annotated[str, typer.Argument(metavar="ACTION")],
    payload: Annotated[str | None, typer.Argument(metavar="JSON")] = None,
    *,
    expires: Annotated[
        float | None,
        length("--expires", "The task is not carried out after this time. [60s]", metavar="60s"),
    ] = None,
    form: PayloadForm = FormOption.BASE64,
    at: NodeOptions,
    json: Json = False,
) -> None:
    """Send a task to a node, wait for its end, and print the result.

    Exits with 0 if it was done, 1 if it failed, 3 if the broker cannot be reached, 4 if it refuses the login,
    5 if the end is not known.
    """
    from duly.clients.node.node import Node
    from duly.errors import TaskFailed, Unknown

    value = payload_of(payload)
    it = Node(
        at.address(at.as_),
        name=at.as_,
        prefix=at.prefix,
        form=form.value,
        serve=False,
        keys=at.keys,
        require_signed=at.require_signed,
    )

    async def run() -> object:
        lasts = 60.0 if expires is None else expires
        if not lasts:
            raise CommandFailed(
                Exit.USAGE, "a task that expires at once is never done; give it some time: --expires 5s"
            )
        until = time.monotonic() + lasts
        async with begun(it, f"trying again for {lasts:g} s, until the task expires"):
            await it.ready(lasts)
            return await it.call(to, action, value, expires=max(0.0, until - time.monotonic()))

    try:
        result = asyncio.run(run())
    except TaskFailed as problem:
        if json:
            print_json({"state": problem.state, "error": problem.error})
        raise CommandFailed(Exit.FAILED, f"{to} says: {problem}") from None
    except Unknown as problem:
        if json:
            print_json({"state": "unknown"})
        raise CommandFailed(Exit.UNKNOWN, f"{to} has not answered; {problem}") from None
    print_json({"state": "done", "value": result} if json else result)


# ── status ───────────────────────────────────────────────────────────────────────────────────────


@grouped
def status(
    name: Annotated[str, typer.Argument(metavar="NODE")] = "+",
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Continue to show reports as they come. Ctrl-C ends it.")
    ] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the status of the node that logs in.")
    ] = False,
    wait: Annotated[
        float | None,
        length("--wait", "How long to wait for what the broker retains. [1s]", metavar="1s"),
    ] = None,
    at: NodeOptions,
    json: Json = False,
) -> None:
    """Show the status that nodes report.

    Without a name, of all nodes. (RabbitMQ shows those only at their next report: use --watch.)
    """
    from duly.clients.node.node import Node

    where = at.address(at.as_ or "status")
    who = at.as_ or ("" if urlsplit(where).username else "status")
    it = Node(where, name=who, prefix=at.prefix, serve=False, keys=at.keys, require_signed=at.require_signed)

    async def run() -> list[NodeStatus]:
        found: dict[str, NodeStatus] = {}
        async with begun(it, "trying again" if watch else f"trying again for {CONNECT:g} s") as me:
            await me.ready(None if watch else CONNECT)
            if delete:
                await me.remove_status()
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(None if watch else 1.0 if wait is None else wait):
                    async for one in me.watch_status(name):
                        found[one.name] = one
                        if watch:
                            _show([one], json, head=False)
                        elif name != "+":
                            break
        return sorted(found.values(), key=lambda one: one.name)

    found = asyncio.run(run())
    if delete:
        if not json:
            note(f"the status of {it.name} is removed from the broker")
        return
    if not found:
        raise CommandFailed(
            Exit.UNKNOWN, "the broker knows of no such node" if name != "+" else "no node has reported"
        )
    _show(found, json, head=True)


def _show(found: list[NodeStatus], json: bool, *, head: bool) -> None:
    import msgspec

    if json:
        for one in found:
            print_json(one)
        return
    rows = []
    for one in found:
        data = "" if one.data is None else msgspec.json.encode(one.data).decode()
        state = "stale" if one.stale else {True: "online", False: "offline", None: "?"}[one.online]
        more = {"battery": one.battery, "rssi": one.rssi, "ip": one.ip, "version": one.version}
        said = " ".join(f"{word}={value}" for word, value in more.items() if value not in (None, ""))
        rows.append([one.name, state, clock(one.time * 1000), " ".join(filter(None, (said, data)))])
    if head:
        table(["node", "is", "as of", "says"], rows)
    else:
        for row in rows:
            say("  ".join(row))
