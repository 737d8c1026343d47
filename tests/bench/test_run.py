"""A run asks one question after the other: it never waits for ever, and a run that was stopped goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from bench.__main__ import ask_all
from bench.measure import ROOT, Options
from bench.run import Line, Run
from rich.console import Console

from bench import record

QUIET = Console(quiet=True)


def run(out: Path, *questions: str, silence: float = 50.0) -> Run:
    return Run({name: f"tests.bench.questions:{name}" for name in questions}, Options(), out, silence)


@contextlib.contextmanager
def handling(interrupts: signal.Handlers) -> Iterator[None]:
    """What is started meanwhile ignores SIGINT, if this says so."""
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def test_an_answer_says_when_and_where_it_was_measured(tmp_path: Path) -> None:
    answer = await run(tmp_path, "answers").ask("answers")
    assert [figure.value for figure in answer.report.figures] == [42.0]
    assert answer.date.startswith("20")
    assert "Python" in answer.machine
    assert answer.commit
    assert record.kept("answers", tmp_path) == answer


async def test_a_question_tells_how_far_it_is(tmp_path: Path) -> None:
    lines: list[Line] = []
    await run(tmp_path, "answers").ask("answers", lines.append)
    assert [(line.done, line.of, line.label) for line in lines[:2]] == [(0, 1, ""), (1, 1, "one")]


@pytest.mark.parametrize(
    ("question", "error"),
    [
        ("load_dies", "ProcessDied: the load -m bench.load was killed by SIGKILL"),
        ("server_dies", "ProcessDied: the bare relay ended while the load -m bench.load was using it"),
        ("raises", "RuntimeError: the disk is full"),
    ],
)
async def test_what_dies_ends_its_question_and_the_run_goes_on(
    tmp_path: Path, question: str, error: str
) -> None:
    answers = await ask_all(run(tmp_path, question, "answers"), QUIET, resume=False, publish=False)
    assert [answer.error for answer in answers] == [error, ""]


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
async def test_a_question_that_makes_no_step_is_ended_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupts: signal.Handlers
) -> None:
    monkeypatch.setattr("bench.run.STOPPING", 1000.0)
    with handling(interrupts):
        answer = await run(tmp_path, "makes_no_step", silence=0.1).ask("makes_no_step")
    assert answer.error == "it made no step for 0.1 s"


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
async def test_a_question_that_is_terminated_ends_its_servers(
    interrupts: signal.Handlers,
) -> None:
    """Also one that a script has started with `&`: the shell makes it ignore SIGINT."""
    with handling(interrupts):
        question = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.ask", "tests.bench.questions:serves_for_ever", "{}",
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
    assert question.stdout is not None
    server = int(msgspec.json.decode(await question.stdout.readline(), type=Line).label)
    question.terminate()
    await question.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


async def test_a_run_that_was_stopped_goes_on_with_what_has_no_answer(tmp_path: Path) -> None:
    stopped = run(tmp_path, "raises", "answers")
    failed, answered = await ask_all(stopped, QUIET, resume=False, publish=False)
    failed.error = "of the run that was stopped"
    answered.report.figures[0].value = 43.0
    for answer in (failed, answered):
        record.keep(answer, tmp_path)
    asked_again, kept = await ask_all(stopped, QUIET, resume=True, publish=False)
    assert asked_again.error == "RuntimeError: the disk is full"
    assert kept.report.figures[0].value == 43.0


async def test_an_answer_to_other_options_or_of_another_commit_is_not_kept(tmp_path: Path) -> None:
    asked = run(tmp_path, "answers")
    answer = await asked.ask("answers")
    assert asked.kept("answers") == answer
    asked.options = Options(quick=True)
    assert asked.kept("answers") is None
    asked.options = Options()
    answer.commit = "0123456789"
    record.keep(answer, tmp_path)
    assert asked.kept("answers") is None
