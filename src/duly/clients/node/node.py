"""`duly.Node`: tasks from node to node over any MQTT broker, without a hub.

The laws. A task that arrives is stored before it is acknowledged; it runs once, and every repeat gets the
stored answer. A task that is sent is stored first, and sent again until it is answered or has expired, over
reconnects and restarts. Both are in one ledger: a file, PostgreSQL, or memory. An invalid incoming message is
counted and recorded; it never raises an error.

`incoming` and `outgoing` are the two halves, `mailbox` is the connection, `statuses` has the statuses of
other nodes.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

from msgspec.structs import replace

from duly.clients.base import BackgroundJobs, Lifecycle
from duly.clients.local_ledger import open_store
from duly.clients.node.incoming import Action, Handler, Incoming
from duly.clients.node.mailbox import HEARTBEAT, READY_WITHIN, Mailbox
from duly.clients.node.outgoing import Outgoing
from duly.clients.node.peers import Peers, Refusals
from duly.clients.node.statuses import NodeStatus, Statuses
from duly.clients.node.tasks import SentTask
from duly.core.horizon import Horizon
from duly.core.id_budget import IdBudget
from duly.core.operations import PutItem, PutNewItem
from duly.core.ordering import LanePolicy
from duly.core.retry import RetryPolicy
from duly.core.signing import Keyring
from duly.core.units import DAY, HOUR, MINUTE, MS, SECOND
from duly.errors import (
    DulyError,
    LedgerError,
    LedgerInUse,
    Malformed,
    ProgramError,
    SenderError,
    Stopped,
    Unknown,
)
from duly.identity.keyring import load
from duly.runtime.backoff import Backoff
from duly.runtime.changes import Changes
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.storage.ledger import Ledger
from duly.transports.mqtt.address import BrokerAddress
from duly.wire import fd
from duly.wire.fd import FdKind, Form
from duly.wire.fd_signatures import FdSignatures
from duly.wire.session import Acknowledge

RESEND: Final = RetryPolicy.exponential(5 * SECOND, 5 * MINUTE)
"""The pauses before a task is sent again. They are long, because they are only for brokers that lose
confirmed messages; after a reconnect everything is sent again at once."""

HORIZON: Final = Horizon(keep=DAY, grace=2 * SECOND, ageless=False, lapse=HOUR)
"""`exp` alone decides, with two seconds for clock errors; without it `time` must be within the last day."""

CHORES_EVERY: Final = 60.0
DRAIN: Final = 5.0
"""Seconds that handlers get to finish when the node stops."""
STAND_BY: Final = RetryPolicy.fixed(500 * MS, tries=None)
"""When a node whose file another process writes tries to open it again."""

EffectWord: TypeAlias = Literal["at_most_once", "at_least_once"]
FormWord: TypeAlias = Literal["base64", "json"]

_TASKS: Final = (FdKind.PENDING,)
_ANSWERS: Final = (FdKind.ACK, FdKind.COMPLETE, FdKind.FAILED)
_BUDGET: Final = "budget"


class Housekeeping:
    """The periodic work of a running node: saves the budget, and prunes the ledger."""

    def __init__(self, ledger: Ledger, budget: IdBudget) -> None:
        self._ledger, self._budget = ledger, budget

    async def save(self) -> None:
        """Store the budget; if that fails it is stored later."""
        with suppress(LedgerError, Stopped):
            if changed := self._budget.save(_BUDGET):
                await self._ledger.write(*changed)

    async def run(self) -> None:
        """Save the budget and prune the ledger."""
        await self.save()
        with suppress(LedgerError, Stopped):
            while await self._ledger.prune() == 1_000:
                pass


class Node(Lifecycle):
    """A node: carries out tasks that it receives, and sends tasks.

    node = duly.Node("mqtt://B:secret@localhost", store="b.db")

    @node.task("turn_on", effect="at_least_once")
    async def turn_on(task):
        return {"on": True}

    await node.run()

    `store` is its ledger: a file or a URL; without it the state is lost with the process. `name` is for
    brokers where the node logs in under another name. At most `concurrency` tasks run at a time; with
    `ordered` those of one sender run one by one, in its order. A node without handlers only sends, and any
    number of processes may do that under one name; `serve=True` makes it the only one that receives.

    `keys` is a keyring, or the file of one ('duly keys new'): everything the node sends is signed. With
    `require_signed` it refuses everything that its sender has not signed.
    """

    def __init__(
        self,
        url: str,
        *,
        store: str | None = None,
        name: str = "",
        prefix: str = fd.PREFIX,
        form: FormWord = "base64",
        concurrency: int = 100,
        ordered: bool = False,
        heartbeat: float = HEARTBEAT,
        serve: bool | None = None,
        keys: str | Keyring | None = None,
        require_signed: bool = False,
        horizon: Horizon = HORIZON,
        resend: RetryPolicy = RESEND,
    ) -> None:
        self._address = BrokerAddress.parse(url)
        if not (name or self._address.username):
            raise Malformed(
                "a node needs a name: log in with one, as in mqtt://NAME:PASSWORD@HOST, or give name= (--as)"
            )
        self.name = fd.check_username(name or self._address.username)
        self.refused: Counter[str] = Counter()
        """how many messages were refused, by reason"""
        self._store, self._prefix, self._form = store, fd.check_prefix(prefix), Form(form)
        self._signatures = _signatures(self.name, self._prefix, keys, require_signed)
        self._ordered, self._heartbeat, self._serve = ordered, heartbeat, serve
        self._horizon, self._resend = horizon, resend
        self._lanes = LanePolicy(serial=True, width=concurrency)
        self._actions: dict[str, Action] = {}
        self._ledger: Ledger | None = None
        self.changes = Changes()
        """notifies when `situation` may have changed"""
        self._serves = False
        """whether it accepts tasks"""
        self._begun = asyncio.Event()
        self._standby = ""
        self.tasks = Supervisor()

    def task(
        self, *actions: str, effect: EffectWord = "at_most_once", deadline: float | None = None
    ) -> Callable[[Handler], Handler]:
        """Declare a handler of these actions. It returns the result, or raises `TaskFailed`. `effect` says
        what a crash in the middle means. After `deadline` seconds the handler is cancelled, and the task
        fails."""
        if effect not in ("at_most_once", "at_least_once"):
            raise Malformed(f"effect={effect!r} is not known; use 'at_most_once' or 'at_least_once'")

        def decorate(handler: Handler) -> Handler:
            if not inspect.iscoroutinefunction(handler):
                raise ProgramError(f"the handler of {', '.join(actions)} must be an async function")
            if self._ledger is not None and not self._serves:
                raise ProgramError(
                    f"this node has started without a handler, so it takes no tasks: declare the handler of "
                    f"{', '.join(actions)} before it starts, or make the node with serve=True"
                )
            for action in actions:
                self._actions[action] = Action(handler, effect == "at_least_once", deadline)
            return handler

        return decorate

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until cancelled, even while the broker is unreachable."""
        await self.start()
        try:
            await self._mailbox.ready(None)
            await asyncio.gather(self._incoming.engine.wait(), self._outgoing.engine.wait())
        finally:
            await self.stop()

    @property
    def standby(self) -> str:
        """Which other process this one stands by for, in a sentence; empty when it does not."""
        return self._standby or (self._mailbox.claim.standby if self._ledger is not None else "")

    @property
    def situation(self) -> str:
        """The state of the connection, in a few words."""
        if self._ledger is None and not self._standby:
            return "starting"
        if self.standby:
            return f"standing by: {self.standby}"
        if self._mailbox.is_ours:
            return "online"
        link = self._mailbox.link
        return str(link.lost()) if link.tried and not link.up else "connecting"

    async def start(self) -> None:
        """Open the ledger and begin to connect, without waiting for the broker."""
        if self._ledger is not None:
            raise ProgramError("this node is running already")
        self.tasks = Supervisor()
        self._serves = serve = bool(self._actions) if self._serve is None else self._serve
        ledger = await self._open_ledger(serve)
        self._budget = IdBudget(await ledger.bucket(_BUDGET))
        self._mailbox = mailbox = await self._open_mailbox(ledger, serve)
        jobs = BackgroundJobs("a job of the node", self.tasks)
        peers, self._refusals = Peers(ledger, jobs), Refusals(self.refused, ledger, jobs)
        await peers.load()
        self._incoming = Incoming(
            self.name, self._form, self._actions, self._horizon, self._lanes, self._budget,
            ledger, mailbox, self._signatures, peers, self._refusals, jobs, ordered=self._ordered,
        )  # fmt: skip
        self._outgoing = Outgoing(
            self.name, self._form, self._resend, ledger, mailbox, self._signatures, peers, self._refusals,
            jobs,
        )  # fmt: skip
        for part in (mailbox.tasks, self._incoming.tasks):
            self.tasks.adopt(part)
        self._housekeeping = Housekeeping(ledger, self._budget)
        self._statuses = Statuses(ledger.clock, self._signatures, self._heartbeat, self._listen, self._ignore)
        self._ledger = ledger
        self.changes.tell()
        try:
            if ledger.sole:
                await self._begin()
            else:
                mailbox.hold()  # another process may be working on the same tasks
            await mailbox.start()
        except BaseException:
            await self.stop()
            raise
        self.tasks.every("forgetting what is over", CHORES_EVERY, self._housekeeping.run)

    async def ready(self, within: float | None = READY_WITHIN) -> None:
        """Wait until the broker has accepted the connection, and no other process has this name. Raises
        `ConnectionLost` after so many seconds without a connection, and `ConnectionRefused` if the broker
        refuses the login."""
        self._running()
        await self._mailbox.ready(within)

    async def stop(self) -> None:
        """Accept nothing more, wait for handlers, store and send their results, and disconnect."""
        ledger, self._ledger = self._ledger, None
        if ledger is None:
            return
        await self.tasks.stop_periodic()
        self._mailbox.hold()
        await self._incoming.drain(DRAIN)
        await self.tasks.finish()
        await self._incoming.engine.stop()
        self._outgoing.flush()
        await self._outgoing.engine.stop()
        await self._mailbox.stop()
        await self.tasks.finish()
        await self.tasks.stop()
        await self._housekeeping.save()
        await ledger.close()
        self._outgoing.close()
        self._begun.clear()

    async def _open_ledger(self, serve: bool) -> Ledger:
        backoff = Backoff(STAND_BY)
        try:
            while True:
                try:
                    return await open_store(self._store)
                except LedgerInUse:
                    if not serve:
                        raise
                    self._standby = f"another process of {self.name} writes {self._store}"
                    self.changes.tell()
                    await backoff.wait()
        finally:
            self._standby = ""

    async def _open_mailbox(self, ledger: Ledger, serve: bool) -> Mailbox:
        """Return the mailbox. A node that serves uses the name's client id; one that only sends has its own,
        and leaves no session behind if it has no store."""
        mine = secrets.token_hex(6)
        await ledger.write(
            PutNewItem("node", "id", mine.encode()), PutItem("node", "name", self.name.encode())
        )
        if ledger.sole:
            mine = (await ledger.item("node", "id") or b"").decode()
        address = self._address
        if not serve and address.client_id in ("", address.username):
            address = replace(address, client_id=f"{self.name}-{mine}")
        elif not address.client_id:
            address = replace(address, client_id=self.name)
        return Mailbox(
            address,
            self.name,
            clock=ledger.clock,
            signatures=self._signatures,
            identity=mine,
            heard=self._heard,
            up=self._up,
            status=self._heard_status,
            kinds=(*_TASKS, *_ANSWERS) if serve else _ANSWERS,
            prefix=self._prefix,
            heartbeat=self._heartbeat,
            serve=serve,
            clean=not serve and self._store is None,
            changes=self.changes,
        )

    async def _begin(self) -> None:
        await self._incoming.engine.start()
        await self._outgoing.engine.start()
        for name, part in (("incoming", self._incoming), ("outgoing", self._outgoing)):
            self.tasks.spawn(f"engine of {name} tasks", part.engine.live, tries=ENGINE_TRIES)
        self._begun.set()

    def _up(self, present: bool) -> None:
        if self._begun.is_set():
            self._incoming.reconnected()
            self._outgoing.reconnected()
        else:
            self.tasks.do("the node's beginning", self._begin_late())

    async def _begin_late(self) -> None:
        await self._begin()
        self._mailbox.open()

    def _heard(self, kind: FdKind, payload: bytes, ack: Acknowledge) -> None:
        try:
            if kind is FdKind.PENDING:
                self._incoming.hear(payload, ack)
            else:
                self._outgoing.hear(kind, payload, ack)
        except SenderError as problem:
            self._refusals.note("", kind.value, problem.word, str(problem))
            ack()

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        to: str,
        action: str,
        payload: object = None,
        *,
        expires: float = 60.0,
        id: str | None = None,
        form: FormWord | None = None,
    ) -> Any:
        """Send a task and wait for its result, at most until it has expired. Raises `TaskFailed`, `Expired`,
        or `Unknown` if its outcome is not known (yet). The options are those of `send`."""
        if id is None and self._begun.is_set():
            self._running()
            sent = self._outgoing.begin(to, action, payload, expires, Form(form) if form else None)
        else:
            sent = await self.send(to, action, payload, expires=expires, id=id, form=form)
        try:
            return await sent.result.within(expires + HORIZON.grace / SECOND)
        except TimeoutError:
            raise Unknown(f"{to} is still at work on the task {sent.id}") from None

    async def send(
        self,
        to: str,
        action: str,
        payload: object = None,
        *,
        expires: float = 86_400.0,
        id: str | None = None,
        form: FormWord | None = None,
    ) -> SentTask:
        """Send a task; returns when it is stored. After `expires` seconds it is no longer carried out. The
        same `id` is the same task."""
        self._running()
        await self._begun.wait()
        return await self._outgoing.send(to, action, payload, expires, id, Form(form) if form else None)

    async def find(self, id: str) -> SentTask:
        """Return a task that this node sent, also before a restart."""
        self._running()
        await self._begun.wait()
        return await self._outgoing.find(id)

    async def cancel(self, id: str) -> SentTask:
        """Stop sending a task, and waiting for it. A receiver that has it may still carry it out."""
        self._running()
        await self._begun.wait()
        return await self._outgoing.cancel(id)

    async def retry(self, id: str, *, expires: float = 86_400.0) -> SentTask:
        """Send a task that has ended once more, under a new id."""
        self._running()
        await self._begun.wait()
        return await self._outgoing.retry(id, expires)

    # ── status ───────────────────────────────────────────────────────────────────────────────────

    async def status(self, name: str, within: float = 2.0) -> NodeStatus | None:
        """Return the status that a node reports, or None."""
        self._running()
        return await self._statuses.get(name, within)

    def watch_status(self, name: str = "+") -> AsyncGenerator[NodeStatus, None]:
        """Yield every status of a node (+: of all nodes), beginning with the retained one."""
        self._running()
        return self._statuses.watch(name)

    def report(
        self,
        *,
        battery: int | None = None,
        rssi: int | None = None,
        ip: str = "",
        version: str = "",
        data: object = None,
    ) -> None:
        """Report this node's status, now and at every heartbeat."""
        self._running()
        said = fd.content_of(data, self._form)
        self._mailbox.own_status.about = fd.FdStatus(
            battery=battery, rssi=rssi, ip=ip, version=version, data=said
        )
        self._mailbox.report()

    async def remove_status(self) -> None:
        """Remove this node's retained status from the broker, until its next report."""
        self._running()
        await self._mailbox.withdraw()

    async def _listen(self, who: str) -> None:
        await self._mailbox.link.subscribe(f"{self._prefix}/{who}/{FdKind.STATUS}", latest=True)

    async def _ignore(self, who: str) -> None:
        if who != self.name:
            with suppress(DulyError):
                await self._mailbox.link.unsubscribe(f"{self._prefix}/{who}/{FdKind.STATUS}")

    def _heard_status(self, name: str, payload: bytes, old: bool) -> None:
        try:
            self._statuses.hear(name, payload, old)
        except SenderError as problem:
            self._refusals.note(name, "status", problem.word, str(problem))

    def _running(self) -> None:
        if self._ledger is None:
            raise Stopped("this node is not running; use 'async with node', or run()")


def _signatures(name: str, prefix: str, keys: str | Keyring | None, required: bool) -> FdSignatures:
    ring = load(keys) if isinstance(keys, str) else keys or Keyring(name)
    if ring.name != name:
        raise Malformed(f"these are the keys of {ring.name}, not of {name}; name the right keyring")
    if required and ring.own is None:
        raise Malformed(f"{name} has no key of its own to sign with; 'duly keys new {name}' makes one")
    return FdSignatures(ring, prefix=prefix, required=required)
