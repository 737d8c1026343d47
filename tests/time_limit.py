"""Says where a test stood when its time was up, also in a run with several workers.

pytest-timeout prints the stacks of all threads and ends the process. A worker of xdist prints nowhere, so
that such a run said only that a worker had crashed. Here the stacks of threads and of asyncio's tasks, and
what the test has logged, go into a file of the worker's, and the end of the run prints it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO

import pytest
import pytest_timeout

from tests.run_folder import FOLDER
from tests.stopwatch import FamilyStopwatch

LOOK: Final = 0.25
"""Seconds between two looks at how long the test, and the processes that it has started, had no processor."""
OVERDUE: Final = 15.0
"""Seconds until a process is ended in which no thread of Python can run, so that none can tell."""
LOGGED: Final = 4_000
"""How many of the last characters that the test has logged are told."""
_FILE: Final = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FILE] = Path(config.stash[FOLDER], f"{os.getpid()}.txt").open("w", encoding="utf-8")  # noqa: SIM115


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_FILE].close()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what workers have written before they were ended."""
    for file in sorted(Path(config.stash[FOLDER]).glob("*.txt")):
        if said := file.read_text(encoding="utf-8", errors="replace"):
            terminalreporter.section("a test whose time was up")
            terminalreporter.write(said)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(item, settings.timeout, over), daemon=True)

    def cancel() -> None:
        over.set()
        watch.join()
        faulthandler.cancel_dump_traceback_later()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # as pytest-timeout does
    watch.start()
    return True


def _watch(item: pytest.Item, seconds: float, over: threading.Event) -> None:
    """Wait until the test is over or its time is. The time for which it, or a process that it has started,
    was ready to run and had no processor is not its own: on a machine with other work a test takes many times
    as long."""
    watch = FamilyStopwatch()
    while (left := seconds - watch.seconds) > 0:
        faulthandler.dump_traceback_later(left + OVERDUE, exit=True, file=item.config.stash[_FILE])
        if over.wait(min(left, LOOK)):
            return
    _end(item, seconds)


def _end(item: pytest.Item, seconds: float) -> None:
    """Tell where the test stands, and end the process: nothing else surely ends it."""
    if pytest_timeout.is_debugging():
        faulthandler.cancel_dump_traceback_later()
        return
    try:
        said = _report(item, seconds)
        if hasattr(item.config, "workerinput"):
            file = item.config.stash[_FILE]
            file.write(said)
            file.flush()
        else:
            capture = item.config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                capture.suspend_global_capture(item)
            sys.stderr.write(said)
            sys.stderr.flush()
    finally:
        os._exit(1)


def _report(item: pytest.Item, seconds: float) -> str:
    """What can be told: a process that ends without a word leaves no cause to look for."""
    said: list[str] = []
    try:
        said += _where(item, seconds)
    except Exception:
        said.append(f"\n{item.nodeid}: this report has failed\n{traceback.format_exc()}")
    return "".join(said)


def _where(item: pytest.Item, seconds: float) -> Iterator[str]:
    yield f"{item.nodeid} was not over after {seconds:.0f} s\n"
    with contextlib.suppress(AttributeError):  # without pytest's own logging
        logged = item.config.pluginmanager.getplugin("logging-plugin").report_handler.stream.getvalue()
        yield f"\nlogged:\n{logged[-LOGGED:]}\n" if logged else ""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            yield f"\nthread {names.get(ident, ident)}:\n"
            yield from traceback.format_stack(frame)
    # `isinstance` asks an object for its class, which a weak proxy of a dead one answers with an error.
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task) and not each.done()]
    for stack, count in Counter("".join(_stack(task)) for task in tasks).items():
        yield f"\n{count} {'task' if count == 1 else 'tasks'} at:\n{stack}"


def _stack(task: asyncio.Task[Any]) -> Iterator[str]:
    """The lines at which a task waits, the outermost first: `Task.get_stack` knows only that one."""
    waits: Any = task.get_coro()
    while waits is not None:
        frame: FrameType | None = _first(waits, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield from traceback.format_list(
                traceback.StackSummary.extract([(frame, frame.f_lineno)], lookup_lines=True)
            )
        waits = _first(waits, "cr_await", "gi_yieldfrom", "ag_await")


def _first(thing: object, *names: str) -> Any:
    return next((found for name in names if (found := getattr(thing, name, None)) is not None), None)
