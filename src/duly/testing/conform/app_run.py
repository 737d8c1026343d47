"""Plays scripts against an app.

The app is a program that sends the command `conform` to the device `lock` again and again. The `data` of each
command says how the previous one ended: `{"ended": {"id": …, "state": …, "code": …}}`.

The law: what the app has understood is judged by what it sends next.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, TypeAlias

from msgspec import Struct

from duly.core.ids import SeqId
from duly.errors import Malformed
from duly.testing.conform.frame_server import UNREADABLE, FrameServer, Json
from duly.testing.conform.rules import BrokenRule, NotChecked
from duly.testing.conform.steps import Cut, Kill, Nonsense
from duly.testing.conform.subject import RestartedClient

COMMAND: Final = "conform"
DEVICE: Final = "lock"
NEXT_WITHIN: Final = 15.0
PATIENCE: Final = 1.0
"""The factor for all times in scripts; the tests of the scripts make it smaller."""
RESENDS: Final = 3
"""How often an unanswered command is sent again."""
REFUSED: Final = "refused"
_NONSENSE: Final = (
    *UNREADABLE,
    '{"type":"ack","from":"lock"}',
    '{"type":"ack","seq_id":"1_1","from":"lock","code":0,"state":"no_such_state"}',
    '{"type":"server_ack","seq_id":"1_1","code":5,"state":"no_such_state"}',
    '{"type":"gap"}',
    '{"from":"lock","cursor":"nine"}',
    '{"type":"ack","seq_id":"1_1","from":"lock","code":0,"state":"done"}',
    '{"type":"server_ack","seq_id":"1_1","code":2}',
    '{"type":"server_ack","code":2,"error":"malformed"}',
    '{"type":"gap","from":"lock","after":1,"first":2}',
    '{"type":"no_such_frame","from":"lock","cursor":9,"data":{}}',
)


class HubSays(Struct, frozen=True):
    """Answers the command with a `server_ack`."""

    code: int
    error: str = ""
    state: str = ""


class DeviceSays(Struct, frozen=True):
    """Answers the command with an `ack`; a `stranger` answers another id. Without a code the device is at
    work."""

    code: int | None = 0
    state: str = "done"
    stranger: bool = False


class SentAgain(Struct, frozen=True):
    """Expects the command again, with the same id and content, within these seconds."""

    seconds: float


class NothingNew(Struct, frozen=True):
    """Expects no other command in these seconds: the app waits for the end of this one."""

    seconds: float


class NotMore(Struct, frozen=True):
    """Expects the command at most `times` times in these seconds, and no other command."""

    seconds: float
    times: int


class Reported(Struct, frozen=True):
    """Expects the next command, which says that this one ended with this state and code."""

    state: str
    code: int


AppStep: TypeAlias = (
    HubSays | DeviceSays | SentAgain | NothingNew | NotMore | Reported | Cut | Kill | Nonsense
)


class AppScript(Struct, frozen=True):
    """Steps that prove a rule; they begin with a command that has just come."""

    rule: str
    steps: tuple[AppStep, ...]


_DONE: Final = (HubSays(0), DeviceSays(), Reported("done", 0))

APP_SCRIPTS: Final = (
    AppScript("connects", (*_DONE, Cut(), *_DONE)),
    AppScript("mints-ids", (*_DONE, *_DONE, *_DONE)),
    AppScript(
        "resends",
        (
            SentAgain(7.0),
            NotMore(2.0, RESENDS - 1),  # on a busy machine some of them may have been queued here
            *_DONE,
        ),
    ),
    AppScript(
        "resends-after-cuts",
        (
            Cut(),
            SentAgain(15.0),
            HubSays(0),
            NothingNew(0.5),  # time to read it: a cut may overtake what was just sent
            Cut(),
            SentAgain(15.0),
            HubSays(5, state="sent"),
            DeviceSays(),
            Reported("done", 0),
        ),
    ),
    AppScript(
        "waits-for-the-end",
        (
            HubSays(0),
            NothingNew(0.7),
            DeviceSays(None, "delivered"),
            NothingNew(0.3),
            DeviceSays(0, "delivered"),
            NothingNew(0.3),
            DeviceSays(3, "failed"),
            Reported("failed", 3),
        ),
    ),
    AppScript("takes-any-order", (DeviceSays(), HubSays(0), Reported("done", 0))),
    AppScript(
        "reads-duplicates", (HubSays(5, state="done"), NothingNew(0.3), DeviceSays(), Reported("done", 0))
    ),
    AppScript("ends-once", (HubSays(0), DeviceSays(), DeviceSays(3, "failed"), Reported("done", 0))),
    AppScript(
        "ignores-strangers",
        (
            HubSays(0),
            DeviceSays(stranger=True),
            NothingNew(0.5),
            DeviceSays(1, "failed"),
            Reported("failed", 1),
        ),
    ),
    AppScript(
        "reports-refusals",
        (
            HubSays(2, "malformed"),
            Reported(REFUSED, 2),
            HubSays(1, "offline"),
            Reported(REFUSED, 1),
            HubSays(3, "not_allowed"),
            Reported(REFUSED, 3),
        ),
    ),
    AppScript("tries-again-after-4", (HubSays(4, "internal"), SentAgain(8.0), *_DONE)),
    AppScript("reports-the-unknown", (HubSays(0), DeviceSays(4, "unknown"), Reported("unknown", 4))),
    AppScript("survives-nonsense", (Nonsense(), *_DONE)),
    AppScript("mints-ids-over-restarts", (*_DONE, Kill(), *_DONE, Kill(), *_DONE)),
)


class AppRun:
    """All scripts against one app."""

    def __init__(self, server: FrameServer, subject: RestartedClient | None) -> None:
        self._server = server
        self._subject = subject
        self._known: dict[str, Json] = {}
        self._refused: set[str] = set()
        self._reported_ids: list[str] = []
        self._newest = SeqId(0, 0)
        self._current: Json | None = None
        self._rule = ""

    async def play(self, script: AppScript) -> None:
        """Play a script; raises `BrokenRule` with what went wrong."""
        self._rule = script.rule
        await self._server.connected()
        if self._current is None:
            self._current = await self._next()
        try:
            for step in script.steps:
                await self._play(step)
        except BrokenRule:
            await self._recover()
            raise

    async def _recover(self) -> None:
        """End what is under way, so that the next script begins with a new command."""
        self._current = None
        for frame in list(self._known.values())[-3:]:
            self._say(frame, HubSays(0))
            self._tell(frame, DeviceSays())
        with suppress(BrokenRule):
            self._current = await self._next()

    async def _play(self, step: AppStep) -> None:
        current = self._current
        assert current is not None
        match step:
            case HubSays():
                self._say(current, step)
            case DeviceSays():
                self._tell(current, step)
            case SentAgain(seconds):
                if not await self._again(current, seconds * PATIENCE):
                    raise BrokenRule(
                        self._rule, f"{current['seq_id']} did not come again within {seconds:g} s"
                    )
            case NothingNew(seconds):
                await self._nothing_new(current, seconds * PATIENCE)
            case NotMore(seconds, times):
                came = await self._nothing_new(current, seconds * PATIENCE)
                if came > times:
                    raise BrokenRule(
                        self._rule,
                        f"{current['seq_id']} came {came} times more within {seconds * PATIENCE:g} s",
                    )
            case Reported():
                await self._reported(current, step)
            case Cut():
                self._server.cut()
                await self._server.connected()
            case Nonsense():
                for text in _NONSENSE:
                    self._server.send_text(text)
            case Kill():
                await self._kill()

    def _say(self, frame: Json, step: HubSays) -> None:
        said: Json = {"type": "server_ack", "seq_id": frame["seq_id"], "code": step.code}
        if step.error:
            said |= {"error": step.error, "detail": "as the script says"}
        if step.code in (1, 2, 3):
            self._refused.add(str(frame["seq_id"]))
        self._server.send(said | ({"state": step.state} if step.state else {}))

    def _tell(self, frame: Json, step: DeviceSays) -> None:
        seq_id = "1700000000000_0" if step.stranger else frame["seq_id"]
        said: Json = {"type": "ack", "seq_id": seq_id, "from": DEVICE, "state": step.state}
        self._server.send(said | ({"progress": 50} if step.code is None else {"code": step.code}))

    async def _kill(self) -> None:
        if self._subject is None:
            raise NotChecked("it needs --run, to kill the program and start it again")
        self._subject.kill()
        await self._subject.gone()
        self._server.cut()
        self._subject.start()
        await self._server.connected()
        while (frame := await self._frame(NEXT_WITHIN)) is not None:
            if str(frame.get("seq_id")) not in self._known:
                self._take(frame)
                self._current = frame
                return
            self._check_not_minted_again(frame)
            self._say(
                frame, HubSays(5, state="done")
            )  # an app that keeps its commands asks for this one again
            self._tell(frame, DeviceSays())
        raise BrokenRule(self._rule, f"no new command came within {NEXT_WITHIN:g} s after a restart")

    # ── what is heard ────────────────────────────────────────────────────────────────────────────

    async def _frame(self, seconds: float) -> Json | None:
        """Return the next command, which may be a repeat."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (frame := await self._server.hear(max(0.0, until - loop.time()))) is not None:
            if frame.get("type") == COMMAND:
                return frame
        return None

    def _take(self, frame: Json) -> None:
        """Remember a new command, and check its id."""
        seq_id = frame.get("seq_id")
        try:
            id_ = SeqId.parse(seq_id if isinstance(seq_id, str) else "")
        except Malformed:
            raise BrokenRule(
                "mints-ids", f"{seq_id!r} is not an id of the form milliseconds_counter"
            ) from None
        if (id_.n, id_.ms) <= (self._newest.n, self._newest.ms) and self._known:
            rule = self._rule if self._rule.startswith("mints-ids") else "mints-ids"
            raise BrokenRule(rule, f"{id_} was minted after {self._newest}, and is not greater in both parts")
        if frame.get("to") != DEVICE:
            raise BrokenRule("mints-ids", f"a command names its device in `to`: {frame}")
        self._newest = id_
        self._known[str(id_)] = frame

    def _check_not_minted_again(self, frame: Json) -> None:
        """Check an id after a restart. The app may send again what was under way, or what had just ended. Any
        other known id, or the same id with other content, was minted twice."""
        seq_id = str(frame["seq_id"])
        if frame != self._known[seq_id] or seq_id in self._reported_ids[:-1]:
            raise BrokenRule(
                self._rule,
                f"{seq_id} came after a restart, but it is the id of an earlier command that has ended",
            )

    def _check_repeat(self, frame: Json) -> None:
        seq_id = str(frame["seq_id"])
        if frame != self._known[seq_id]:
            raise BrokenRule(
                "resends", f"{seq_id} came again with other content: {frame}, before {self._known[seq_id]}"
            )
        if seq_id in self._refused:
            raise BrokenRule("reports-refusals", f"{seq_id} was refused for good, and came again")

    async def _next(self) -> Json:
        """Return the next new command."""
        loop = asyncio.get_running_loop()
        until = loop.time() + NEXT_WITHIN
        while (frame := await self._frame(max(0.0, until - loop.time()))) is not None:
            if str(frame.get("seq_id")) not in self._known:
                self._take(frame)
                return frame
            self._check_repeat(frame)
        raise BrokenRule(self._rule, f"no other command came within {NEXT_WITHIN:g} s")

    async def _again(self, current: Json, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (frame := await self._frame(max(0.0, until - loop.time()))) is not None:
            if frame.get("seq_id") == current["seq_id"]:
                self._check_repeat(frame)
                return True
            if str(frame.get("seq_id")) not in self._known:
                raise BrokenRule(
                    self._rule, f"{frame.get('seq_id')} came instead of {current['seq_id']} again"
                )
        return False

    async def _nothing_new(self, current: Json, seconds: float) -> int:
        """Return how often this command came again within this time; no other may come meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        again = 0
        while (frame := await self._frame(max(0.0, until - loop.time()))) is not None:
            if str(frame.get("seq_id")) not in self._known:
                self._take(frame)
                self._current = frame
                raise BrokenRule(self._rule, f"{frame['seq_id']} came before {current['seq_id']} had ended")
            again += frame.get("seq_id") == current["seq_id"]
        return again

    async def _reported(self, current: Json, step: Reported) -> None:
        self._current = frame = await self._next()
        data = frame.get("data")
        ended = data.get("ended") if isinstance(data, dict) else None
        expected = {"id": current["seq_id"], "state": step.state, "code": step.code}
        if ended != expected:
            raise BrokenRule(
                self._rule, f"the app says that {current['seq_id']} ended as {ended}, not {expected}"
            )
        self._reported_ids.append(str(current["seq_id"]))
