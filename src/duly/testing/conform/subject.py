"""The subject: the program under test, if it was given; it is started, killed and started again."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from duly.errors import Malformed
from duly.testing.conform.transcript import Transcript


class RestartedClient(Protocol):
    """The client under test, which a run starts and kills."""

    @property
    def ended(self) -> int | None:
        """The code with which it has ended by itself; None while it runs."""
        ...

    def start(self) -> None:
        """Start it."""
        ...

    def kill(self) -> None:
        """Kill it, so that it cannot store anything more."""
        ...

    async def gone(self) -> None:
        """Wait until it is gone after a kill."""
        ...

    def said(self) -> str:
        """Return the end of what it has printed."""
        ...


class Subject:
    """A program in a process group of its own. Its command may name `{url}`, `{host}`, `{port}`, `{name}`,
    `{token}` and `{store}`, a folder that outlives it. What it prints goes to the file `output`."""

    def __init__(self, command: str, values: Mapping[str, str], output: Path, transcript: Transcript) -> None:
        try:
            self._words = [word.format(**values) for word in shlex.split(command)]
        except (KeyError, IndexError, ValueError) as problem:
            names = ", ".join(f"{{{name}}}" for name in values)
            raise Malformed(f"--run: {problem}; a command may name {names}") from None
        self._output = output
        self._transcript = transcript
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        self._transcript.note("!", f"start {shlex.join(self._words)}")
        try:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as problem:
            raise Malformed(f"--run: {self._words[0]} does not start: {problem}") from None

    @property
    def ended(self) -> int | None:
        """The code with which it has ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """End it and all that it has started, by SIGKILL."""
        if self._process is not None:
            self._transcript.note("!", "kill -9")
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until it is gone after a kill."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._process = None

    def said(self) -> str:
        """Return the end of what it has printed."""
        with suppress(OSError):
            return self._output.read_bytes()[-2_000:].decode(errors="replace")
        return ""
