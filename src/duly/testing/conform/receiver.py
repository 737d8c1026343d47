"""Plays scripts against a receiver: a device or a node that runs the command `count`.

The law: the receiver's own counter tells what has run. Every run of `count` adds one to it and answers with
the sum, so a command that ran twice shows in the next answer, whatever the client claims.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from duly.testing.conform.frame_server import now_ms
from duly.testing.conform.rules import BrokenRule, NotChecked
from duly.testing.conform.steps import (
    AtWork,
    ConformStep,
    CountEffects,
    Cut,
    DeliverTask,
    ExpectAnswer,
    Flood,
    InKind,
    InOrder,
    Inspect,
    Kill,
    Nonsense,
    NotDone,
    Pause,
    Reserve,
    Script,
)
from duly.testing.conform.subject import RestartedClient

COUNT: Final = "count"
OWN_FIELDS: Final[dict[str, object]] = {"house": {"door": [1, None]}, "traceparent": "00-1-2-01"}
"""Further fields that a command may carry."""
ANSWER_WITHIN: Final = 10.0
QUIET: Final = 0.3
"""Seconds to wait for something that must not happen."""
MEMORY: Final = 100
"""Commands that a small device remembers."""
MORE_THAN_MEMORY: Final = 30
FLOOD_MOST: Final = 1_040
"""Commands with which a client is flooded that does not forget; `--memory` may ask for more."""
FLOOD_WITHIN: Final = 30.0
"""Seconds after which no further flood begins."""
PROBE: Final = "conform"
"""The sender of the commands that count effects."""


class ConformTask(Struct, frozen=True):
    """A command as a hub sends it, or a task as a node sends it. Times are in ms."""

    sender: str
    id: str
    type: str = COUNT
    data: dict[str, object] = {}
    exp: int = 0
    lane: str | None = None
    after: int = -1
    receiver: str = ""
    time: int = 0
    old_names: bool = False
    plain_json: bool = False
    order: dict[str, object] | None = None
    """its `order`, if it is in no lane"""
    own_fields: bool = False
    """it has fields that the protocol does not know"""
    bare: bool = False
    """it has no data"""

    @property
    def key(self) -> tuple[str, str]:
        """Its sender and id."""
        return self.sender, self.id


class HeardAnswer(Struct, frozen=True):
    """A receiver's answer to a task; `code` is None if the task continues. `said` is the message itself."""

    sender: str
    id: str
    code: int | None
    data: object = None
    said: dict[str, object] = {}

    @property
    def count(self) -> int | None:
        """How many commands had run, by the receiver's own counter."""
        found = self.data.get(COUNT) if isinstance(self.data, dict) else None
        return found if isinstance(found, int) and not isinstance(found, bool) else None


class ReceiverPeer(Protocol):
    """Plays the hub, or other nodes, on one transport."""

    async def connected(self) -> None:
        """Wait until the receiver is connected."""
        ...

    def deliver(self, task: ConformTask) -> None:
        """Send a task."""
        ...

    async def answer(self, seconds: float) -> HeardAnswer | None:
        """Return the next answer; None if none arrives within this time."""
        ...

    def cut(self) -> None:
        """Break the connection."""
        ...

    def send_nonsense(self) -> None:
        """Send messages that cannot be decoded."""
        ...

    async def inspect(self, rule: str) -> None:
        """Prove a rule of the transport; raises `BrokenRule` or `NotChecked`."""
        ...

    def check_kind(self, task: ConformTask, answers: Sequence[HeardAnswer]) -> None:
        """Raise `BrokenRule` unless the answers are written as the task was."""
        ...


class ReceiverRun:
    """One script against one receiver."""

    def __init__(
        self,
        peer: ReceiverPeer,
        subject: RestartedClient | None,
        ids: SeqIdCounter,
        memory: int = MEMORY,
    ) -> None:
        self._peer = peer
        self._subject = subject
        self._ids = ids
        self._memory = memory
        self._answer_time = 0.0
        """seconds that the receiver took to answer the last command that counts effects"""
        self._tasks: dict[str, ConformTask] = {}
        self._reserved: set[str] = set()
        """the names of tasks that have an id and are not delivered yet"""
        self._answers: dict[tuple[str, str], list[HeardAnswer]] = {}
        self._marks: dict[str, int] = {}
        """how many answers a command had when it was last delivered"""
        self._delivered: dict[str, int] = {}
        self._others = 0
        """commands beside the script's own that have run"""
        self._began = 0
        self._torn = False
        self._rule = ""
        self.remark = ""
        """what is to be said of a rule that holds"""

    async def play(self, script: Script) -> None:
        """Play a script; raises `BrokenRule` with what went wrong."""
        self._rule = script.rule
        await self._peer.connected()
        self._began = await self._probe()
        for number, step in enumerate(script.steps):
            try:
                await self._play(step)
            except BrokenRule as problem:
                if not any(isinstance(before, Nonsense) for before in script.steps[:number]):
                    raise
                raise BrokenRule(script.rule, f"after messages that it cannot read, {problem}") from None

    async def _play(self, step: ConformStep) -> None:
        match step:
            case DeliverTask():
                self._deliver(step)
            case Reserve(names, sender, age):
                self._reserved |= set(names)
                for name in names:
                    again = bool(age) and name != names[0]
                    self._tasks[name] = ConformTask(sender, self._ids.mint(sender, age, again=again))
            case ExpectAnswer():
                await self._answered(step)
            case NotDone():
                await self._not_done(step)
            case CountEffects():
                await self._effects(step)
            case InOrder(names):
                self._in_order(names)
            case InKind(name):
                task = self._tasks[name]
                self._peer.check_kind(task, self._answers.get(task.key, ()))
            case Flood(name):
                await self._flood(name)
            case Cut():
                self._torn = True
                self._peer.cut()
                await self._peer.connected()
            case Kill():
                await self._kill(step)
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case AtWork(share):
                await asyncio.sleep(share * self._answer_time)
            case Nonsense():
                self._peer.send_nonsense()
            case Inspect():
                await self._peer.inspect(self._rule)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, step: DeliverTask) -> None:
        task = self._tasks.get(step.name)
        if task is None or step.name in self._reserved:
            task = self._tasks[step.name] = self._make(step, task)
            self._reserved.discard(step.name)
        self._marks[step.name] = len(self._answers.get(task.key, ()))
        self._delivered[step.name] = self._delivered.get(step.name, 0) + step.times
        for _ in range(step.times):
            self._peer.deliver(task)

    def _make(self, step: DeliverTask, reserved: ConformTask | None) -> ConformTask:
        if reserved is not None:
            id_ = reserved.id
        else:
            id_ = self._tasks[step.like].id if step.like else self._ids.mint(step.sender, step.age)
        after = -1
        if step.lane:
            numbers = sorted(number for number in self._lane_numbers(step.lane) if number < number_of(id_))
            after = numbers[-1] if numbers else -1
        return ConformTask(
            step.sender,
            id_,
            "no_such_command" if step.unknown_type else COUNT,
            {"other": step.other_content} if step.other_content or step.plain_json or step.old_names else {},
            _expiry(step),
            step.lane or None,
            after,
            step.receiver,
            now_ms() - step.days_old * 86_400_000,
            step.old_names,
            step.plain_json,
            {"after": -1} if step.bare else {"mode": "any", "after": -1} if step.unordered else None,
            step.own_fields,
            step.bare,
        )

    def _lane_numbers(self, lane: str) -> list[int]:
        """Return the numbers of a lane that a hub knows, including those that are only reserved."""
        return [number_of(task.id) for task in self._tasks.values() if task.lane in (lane, None)]

    async def _answered(self, step: ExpectAnswer) -> None:
        task = self._tasks[step.name]
        mark = self._marks[step.name]
        await self._hear(lambda: len(self._finals(task)) > self._before(task, mark), ANSWER_WITHIN)
        answers = self._answers.get(task.key, [])
        fresh = [answer for answer in answers[mark:] if answer.code is not None]
        if not fresh:
            raise BrokenRule(
                self._rule if step.same or step.proves else "answers",
                f"{task.id} of {task.sender} was not answered within {ANSWER_WITHIN:g} s",
            )
        last = fresh[-1]
        if (step.how == "done" and last.code != 0) or (step.how == "not done" and last.code == 0):
            raise BrokenRule(self._rule, f"{task.id} of {task.sender} was answered with code {last.code}")
        first = self._finals(task)[0]
        if step.same and (first.code, first.data) != (last.code, last.data):
            raise BrokenRule(
                self._rule,
                f"the first answer to {task.id} was {first.code} {first.data}, the answer to its repeat "
                f"{last.code} {last.data}",
            )

    def _finals(self, task: ConformTask) -> list[HeardAnswer]:
        return [answer for answer in self._answers.get(task.key, ()) if answer.code is not None]

    def _before(self, task: ConformTask, mark: int) -> int:
        return sum(answer.code is not None for answer in self._answers.get(task.key, [])[:mark])

    async def _not_done(self, step: NotDone) -> None:
        task = self._tasks[step.name]
        mark = self._marks[step.name]
        await self._hear(lambda: False, QUIET)
        fresh = self._answers.get(task.key, [])[mark:]
        if any(answer.code == 0 for answer in fresh):
            raise BrokenRule(self._rule, f"{task.id} of {task.sender} was answered as done")
        if step.silent and fresh:
            raise BrokenRule(self._rule, f"{task.id} of {task.sender} was answered")

    async def _effects(self, step: CountEffects) -> None:
        await self._hear(lambda: False, QUIET)
        ran = await self._probe() - self._began - self._others - 1
        if ran > step.count:
            raise BrokenRule(self._rule, f"{ran} commands have run, not {step.count}")
        if ran < step.count and not step.or_fewer:
            raise BrokenRule(
                self._rule, f"only {ran} of {step.count} commands have run, by the answers to `count`"
            )
        self._others += 1
        self._check_number_of_answers()

    def _check_number_of_answers(self) -> None:
        delivered: Counter[tuple[str, str]] = Counter()
        for name, times in self._delivered.items():
            delivered[self._tasks[name].key] += times
        for key, times in delivered.items():
            said = sum(answer.code is not None for answer in self._answers.get(key, ()))
            if said > times and not self._torn:
                raise BrokenRule("answers", f"{key[1]} came {times} times and was answered {said} times")

    def _in_order(self, names: Sequence[str]) -> None:
        counts = [
            (answer.count, name)
            for name in names
            for answer in self._finals(self._tasks[name])[:1]
            if answer.code == 0 and answer.count is not None
        ]
        if counts != sorted(counts):
            ran = ", then ".join(self._tasks[name].id for _, name in sorted(counts))
            raise BrokenRule(self._rule, f"they ran in another order: {ran}")

    async def _kill(self, step: Kill) -> None:
        if self._subject is None and step.if_possible:
            return
        if self._subject is None:
            raise NotChecked("this rule needs --run, so that the program can be killed and restarted")
        self._torn = True
        if step.at:
            task = self._tasks[step.at]
            if not await self._hear(lambda: bool(self._finals(task)), ANSWER_WITHIN):
                raise BrokenRule("answers", f"{task.id} was not answered within {ANSWER_WITHIN:g} s")
        self._subject.kill()
        await self._subject.gone()
        self._peer.cut()
        self._subject.start()
        await self._peer.connected()

    async def _flood(self, name: str) -> None:
        """Deliver other commands, twice as many each time, until this one is forgotten."""
        loop = asyncio.get_running_loop()
        until = loop.time() + FLOOD_WITHIN
        sent, wanted = 0, self._memory + MORE_THAN_MEMORY
        most = max(FLOOD_MOST, wanted)
        while True:
            while sent < wanted:
                await self._probe()
                self._others += 1
                sent += 1
            if not await self._remembers(name):
                return
            if wanted >= most or loop.time() > until:
                break
            wanted = min(2 * wanted, most)
        self.remark = f"it still remembered the first of {sent} commands; --memory N sends more than N"

    async def _remembers(self, name: str) -> bool:
        """Return whether a repeat of a command is answered as the command was; not: it is forgotten, or has
        run."""
        self._deliver(DeliverTask(name))
        task = self._tasks[name]
        await self._probe()  # an answer to the repeat comes before the one to this
        self._others += 1
        await self._hear(lambda: False, QUIET)
        first = self._finals(task)[0]
        answers = self._answers[task.key][self._marks[name] :]
        return any(one.code == first.code and one.data == first.data for one in answers)

    # ── what is heard ────────────────────────────────────────────────────────────────────────────

    async def _probe(self) -> int:
        """Run one more command, and return how many have run."""
        task = ConformTask(PROBE, self._ids.mint(PROBE), exp=now_ms() + 3_600_000)
        began = asyncio.get_running_loop().time()
        for _ in range(3):  # a hub sends again what was lost
            self._peer.deliver(task)
            if await self._hear(lambda: bool(self._finals(task)), ANSWER_WITHIN / 2):
                break
        self._answer_time = asyncio.get_running_loop().time() - began
        answers = self._finals(task)
        if not answers:
            raise BrokenRule("answers", f"{task.id} was sent three times and not answered")
        if answers[0].code != 0 or answers[0].count is None:
            raise BrokenRule(
                "answers",
                f"the answer to `{COUNT}` must be code 0 with {{'count': N}}, not code {answers[0].code} "
                f"with {answers[0].data}",
            )
        return answers[0].count

    async def _hear(self, enough: Enough, seconds: float) -> bool:
        """Read answers until there are enough; return False if there are not within this time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not enough():
            answer = await self._peer.answer(max(0.0, until - loop.time()))
            if answer is None:
                return False
            self._answers.setdefault((answer.sender, answer.id), []).append(answer)
        return True


def _expiry(step: DeliverTask) -> int:
    """Return when the command of a step expires; 0 if it does not say."""
    if step.days_old or step.undated:
        return 0
    return now_ms() + (-600_000 if step.expired else 3_600_000)


class Enough(Protocol):
    """Return whether enough answers have arrived."""

    def __call__(self) -> bool: ...


class SeqIdCounter:
    """Mints the ids of all senders of a run: counters increase, whatever the age of an id. They begin with 9,
    since 9 and 10 are in another order as texts. With `timeless`, ids carry no time, as a node's may."""

    def __init__(self, *, timeless: bool = False) -> None:
        self._timeless = timeless
        self._n: dict[str, int] = {}
        self._ms = 0

    def mint(self, sender: str, age: int = 0, *, again: bool = False) -> str:
        """Return a new id whose time is `age` seconds ago; `again`: in the millisecond of the one before."""
        n = self._n[sender] = self._n.get(sender, 8) + 1
        self._ms = self._ms if again else max(self._ms + 1, now_ms())
        if self._timeless:
            return f"task-{self._ms:x}-{n}"
        return f"{self._ms - age * 1000}_{n}"


def number_of(id_: str) -> int:
    """Return the counter in an id."""
    return int(re.split("[_-]", id_)[-1])
