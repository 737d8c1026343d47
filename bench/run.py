"""Asks questions one after the other, each in a process of its own, and keeps each answer when it is there.

The law: a question that fails, dies or says nothing for too long ends with an error, and the run goes on with
the next one. Its servers and loads end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from bench import record
from bench.measure import OUT, ROOT, Options, Report
from bench.processes import ending
from bench.record import Answer

SILENCE = 600.0
"""Seconds without a step after which a question is taken for stuck; the longest step fills a ledger."""
STOPPING = 20.0
"""Seconds that a question has to end its servers, before it is killed."""


class Line(Struct):
    """What a question prints: how far it is, or its report."""

    done: int = 0
    of: int = 0
    label: str = ""
    report: Report | None = None


class Unanswered(Exception):
    """A question came to no answer; the text says why."""


def unheard(line: Line) -> None:
    """Takes no notice of progress."""


@dataclass
class Run:
    """A run over some questions: for each a name, and the module whose `run(options)` answers it."""

    questions: Mapping[str, str]
    options: Options = field(default_factory=Options)
    out: Path = OUT
    silence: float = SILENCE

    def kept(self, question: str) -> Answer | None:
        """The answer of a run that was stopped, if that had the same commit and options, and no error."""
        found = record.kept(question, self.out)
        if found is None or found.error or found.options != self.options or found.commit != record.commit():
            return None
        return found

    async def ask(self, question: str, told: Callable[[Line], None] = unheard) -> Answer:
        """Asks a question and keeps the answer; what went wrong is part of it."""
        try:
            report, error = await self._report(question, told), ""
        except Unanswered as problem:
            report, error = Report(question), str(problem)
        answered = record.answer(question, self.options, report, error)
        record.keep(answered, self.out)
        return answered

    async def _report(self, question: str, told: Callable[[Line], None]) -> Report:
        self.out.mkdir(parents=True, exist_ok=True)
        log = self.out / f"{question}.log"
        with log.open("wb") as errors:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bench.ask",
                self.questions[question],
                msgspec.json.encode(self.options).decode(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                start_new_session=True,
                limit=1 << 24,
            )
        try:
            return await self._listen(child, told, log)
        finally:
            await _stop(child)

    async def _listen(
        self, child: asyncio.subprocess.Process, told: Callable[[Line], None], log: Path
    ) -> Report:
        assert child.stdout is not None
        report: Report | None = None
        while True:
            try:
                async with asyncio.timeout(self.silence):
                    text = await child.stdout.readline()
            except TimeoutError:
                raise Unanswered(f"it made no step for {self.silence:g} s") from None
            if not text:
                break
            with contextlib.suppress(msgspec.MsgspecError):  # what a library prints is no news of ours
                line = msgspec.json.decode(text, type=Line)
                report = line.report or report
                told(line)
        code = await child.wait()
        if report is None or code:
            raise Unanswered(_last_word(log) or f"its process {ending(code)}")
        return report


async def _stop(child: asyncio.subprocess.Process) -> None:
    """Ends a question and what it has started: asks first, so that it can end its servers."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()  # it ends as by Ctrl-C, which what a script starts with `&` ignores
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOPPING):
                await child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def _last_word(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("bench.processes.") if lines else ""
