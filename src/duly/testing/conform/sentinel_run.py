"""Plays scripts against a sentinel.

The sentinel is a program that reports an event of the device `RUN-N` every 0.3 s: RUN is different after
every start, and N counts from 0. Just as often it signals `repeated` of `RUN-same` and `busy-N` of
`RUN-busy`, which it must hold back.

The law: what a sentinel has sent once must come again until it is acknowledged, and none of its numbers is
missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeAlias

from msgspec import Struct

from duly.testing.conform.frame_server import FrameServer, Json
from duly.testing.conform.rules import BrokenRule, NotChecked
from duly.testing.conform.steps import Cut, Kill, Nonsense, Pause
from duly.testing.conform.subject import RestartedClient

EVENT: Final = "alert_event"
_DIGITS: Final = 16
NEXT_WITHIN: Final = 20.0
DEBOUNCE_MS: Final = 25_000
"""The least time between two events of the same cause: half a minute, with a tolerance for clocks and
timers."""
PER_HOUR: Final = 10
PATIENCE: Final = 1.0
"""The factor for all times in scripts; the tests of the scripts make it smaller."""


class TakeEvent(Struct, frozen=True):
    """Waits for a new event and answers it with this code; with None it is not answered."""

    name: str
    code: int | None = 0


class EventAgain(Struct, frozen=True):
    """Expects an event again, with the same id and content, and answers it with this code."""

    name: str
    code: int = 0


class EventSettled(Struct, frozen=True):
    """Expects that an event does not come again in these seconds."""

    name: str
    seconds: float


class HubAway(Struct, frozen=True):
    """Takes the hub away for these seconds."""

    seconds: float


class Contiguous(Struct, frozen=True):
    """Expects that after `more` events no number of any run is missing, and all came in order."""

    more: int


class Debounced(Struct, frozen=True):
    """Takes events for these seconds, and expects no two of the device `RUN-same` close together."""

    seconds: float


class Limited(Struct, frozen=True):
    """Takes events for these seconds, and expects few of the device `RUN-busy`."""

    seconds: float


SentinelStep: TypeAlias = (
    TakeEvent
    | EventAgain
    | EventSettled
    | HubAway
    | Contiguous
    | Debounced
    | Limited
    | Cut
    | Kill
    | Nonsense
    | Pause
)


class SentinelScript(Struct, frozen=True):
    """Steps that prove a rule."""

    rule: str
    steps: tuple[SentinelStep, ...]


SENTINEL_SCRIPTS: Final = (
    SentinelScript("connects", (TakeEvent("a"), Cut(), TakeEvent("b"))),
    SentinelScript("fills-in-events", (TakeEvent("a"),)),
    SentinelScript("resends", (TakeEvent("a", None), EventAgain("a"))),
    SentinelScript("resends-after-cuts", (TakeEvent("a", None), Cut(), EventAgain("a"))),
    SentinelScript("tries-again-after-4", (TakeEvent("a", 4), EventAgain("a"))),
    SentinelScript(
        "stops-when-acknowledged",
        (
            TakeEvent("a"),
            TakeEvent("b", 5),
            TakeEvent("c"),  # by now the sentinel has read the acknowledgements
            Pause(0.3),
            Cut(),
            EventSettled("a", 2.0),
            EventSettled("b", 0.1),
        ),
    ),
    SentinelScript("keeps-while-offline", (TakeEvent("a"), HubAway(2.0), Contiguous(4))),
    SentinelScript("survives-nonsense", (TakeEvent("a"), Nonsense(), Contiguous(3))),
    SentinelScript("debounces", (Debounced(3.0),)),
    SentinelScript("limits", (Limited(6.0),)),
    SentinelScript("keeps-over-kills", (TakeEvent("a", None), Kill(), EventAgain("a"))),
)


class SentinelRun:
    """All scripts against one sentinel."""

    def __init__(self, server: FrameServer, subject: RestartedClient | None) -> None:
        self._server = server
        self._subject = subject
        self._known: dict[str, Json] = {}
        self._named: dict[str, str] = {}
        self._held: set[str] = set()
        self._numbers: dict[str, list[int]] = {}
        self._rule = ""

    async def play(self, script: SentinelScript) -> None:
        """Play a script; raises `BrokenRule` with what went wrong."""
        self._rule = script.rule
        self._held.clear()
        await self._server.connected()
        for step in script.steps:
            await self._play(step)

    async def _play(self, step: SentinelStep) -> None:
        match step:
            case TakeEvent(name, code):
                event = await self._new()
                self._named[name] = event
                self._held.add(event)
                if code is not None:
                    self._answer(event, code)
                if code in (0, 5):
                    self._held.discard(event)
            case EventAgain(name, code):
                await self._again(self._named[name], code)
            case EventSettled(name, seconds):
                await self._settled(self._named[name], seconds * PATIENCE)
            case HubAway(seconds):
                self._server.down = True
                self._server.cut()
                await asyncio.sleep(seconds * PATIENCE)
                self._server.down = False
                await self._server.connected()
            case Contiguous(more):
                await self._contiguous(more)
            case Debounced(seconds):
                await self._held_back("same", "repeated", seconds * PATIENCE, _too_close)
            case Limited(seconds):
                await self._held_back("busy", "busy-", seconds * PATIENCE, _too_many)
            case Cut():
                self._server.cut()
                await self._server.connected()
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case Nonsense():
                for text in self._server.strange_answers:
                    self._server.send_text(text)
            case Kill():
                await self._kill()

    def _answer(self, event: str, code: int) -> None:
        said: Json = {"type": "server_ack", "seq_id": event, "code": code}
        self._server.send(said | ({"error": "internal", "detail": "as the script says"} if code == 4 else {}))

    async def _kill(self) -> None:
        if self._subject is None:
            raise NotChecked("this rule needs --run, so that the program can be killed and restarted")
        self._subject.kill()
        await self._subject.gone()
        self._server.cut()
        self._subject.start()
        await self._server.connected()

    # ── what is heard ────────────────────────────────────────────────────────────────────────────

    async def _hear(self, seconds: float) -> tuple[str, bool] | None:
        """Return the id of the next event, and whether it is new; other frames are answered."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (frame := await self._server.hear(max(0.0, until - loop.time()))) is not None:
            seq_id = frame.get("seq_id")
            if frame.get("type") != EVENT:
                if isinstance(seq_id, str):
                    self._answer(seq_id, 0)
                continue
            return self._take(frame)
        return None

    def _take(self, frame: Json) -> tuple[str, bool]:
        seq_id, data = frame.get("seq_id"), frame.get("data")
        if not isinstance(seq_id, str) or not seq_id or not isinstance(data, dict):
            raise BrokenRule("fills-in-events", f"an event has a `seq_id` and `data`: {frame}")
        for field in ("profile_id", "trigger_reason"):
            if not isinstance(data.get(field), str) or not data[field]:
                raise BrokenRule("fills-in-events", f"the `data` of an event names its {field}: {frame}")
        known = self._known.get(seq_id)
        if known is not None:
            if known != data:
                raise BrokenRule(
                    "resends", f"the event {seq_id} came again with other content: {data}, before {known}"
                )
            return seq_id, False
        self._known[seq_id] = data
        run, _, number = str(data.get("device_address", "")).rpartition("-")
        if number.isascii() and number.isdigit() and len(number) < _DIGITS:
            self._numbers.setdefault(run, []).append(int(number))
        return seq_id, True

    async def _new(self) -> str:
        """Return the next new event; older ones are acknowledged."""
        loop = asyncio.get_running_loop()
        until = loop.time() + NEXT_WITHIN
        while (heard := await self._hear(max(0.0, until - loop.time()))) is not None:
            event, is_new = heard
            if is_new:
                return event
            if event not in self._held:
                self._answer(event, 5)
        raise BrokenRule(self._rule, f"no new event came within {NEXT_WITHIN:g} s")

    async def _again(self, wanted: str, code: int) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + NEXT_WITHIN
        while (heard := await self._hear(max(0.0, until - loop.time()))) is not None:
            event, is_new = heard
            if event == wanted:
                self._held.discard(event)
                self._answer(event, code)
                return
            self._answer(event, 0 if is_new else 5)
        raise BrokenRule(self._rule, f"the event {wanted} did not come again within {NEXT_WITHIN:g} s")

    async def _settled(self, wanted: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (heard := await self._hear(max(0.0, until - loop.time()))) is not None:
            event, is_new = heard
            if event == wanted:
                raise BrokenRule(self._rule, f"the event {wanted} was acknowledged, and came again")
            self._answer(event, 0 if is_new else 5)

    async def _held_back(
        self, device: str, reason: str, seconds: float, fault: Callable[[list[int]], str]
    ) -> None:
        """Take events for this many seconds, and judge the times (ms) of those of this device and reason."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (heard := await self._hear(max(0.0, until - loop.time()))) is not None:
            event, is_new = heard
            if event not in self._held:
                self._answer(event, 0 if is_new else 5)
            for times in self._times_of(device, reason).values():
                if why := fault(times):
                    raise BrokenRule(self._rule, why)
        if not self._times_of(device, reason):
            raise NotChecked(f"it signals nothing of the device RUN-{device}")

    def _times_of(self, device: str, reason: str) -> dict[str, list[int]]:
        """Return the times of the events of a device and reason, for each run of the program."""
        runs: dict[str, list[int]] = {}
        for data in self._known.values():
            run, _, name = str(data.get("device_address", "")).rpartition("-")
            if name == device and str(data["trigger_reason"]).startswith(reason):
                at = data.get("timestamp")
                runs.setdefault(run, []).append(at if isinstance(at, int) else 0)
        return {run: sorted(times) for run, times in runs.items()}

    async def _contiguous(self, more: int) -> None:
        for _ in range(more):
            self._answer(await self._new(), 0)
        for run, numbers in self._numbers.items():
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                raise BrokenRule(self._rule, f"the events of {run} came as {', '.join(map(str, numbers))}")


def _too_close(times: list[int]) -> str:
    gaps = [late - early for early, late in pairwise(times)]
    if not gaps or min(gaps) >= DEBOUNCE_MS:
        return ""
    return f"the same signal was reported again after {min(gaps)} ms"


def _too_many(times: list[int]) -> str:
    few = len(times) <= PER_HOUR
    return "" if few else f"{len(times)} events of one device were reported in less than an hour"
