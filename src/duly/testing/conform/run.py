"""Runs all scripts of a noun against one client, and reports which rules hold."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from duly.errors import Malformed
from duly.testing.conform.app_run import APP_SCRIPTS, AppRun, AppScript
from duly.testing.conform.fd_peer import FdPeer
from duly.testing.conform.frame_device import FrameDevicePeer
from duly.testing.conform.frame_server import FrameServer
from duly.testing.conform.mqtt_server import MqttServer
from duly.testing.conform.receiver import MEMORY, ReceiverPeer, ReceiverRun, SeqIdCounter
from duly.testing.conform.receiver_scripts import DEVICE_SCRIPTS, NODE_SCRIPTS
from duly.testing.conform.request_server import RequestServer
from duly.testing.conform.rules import RULES, BrokenRule, NotChecked, Noun
from duly.testing.conform.sentinel_run import SENTINEL_SCRIPTS, SentinelRun, SentinelScript
from duly.testing.conform.steps import Script
from duly.testing.conform.subject import RestartedClient, Subject
from duly.testing.conform.transcript import Transcript

TOKEN: Final = "conform"
NAMES: Final = {Noun.DEVICE: "device", Noun.APP: "phone", Noun.NODE: "node", Noun.SENTINEL: "sentinel"}
"""The names of the clients under test."""


class RuleResult(Struct, frozen=True):
    """The result of one rule: it `holds`, is `broken`, or was `not checked`; and why, with the messages
    before it."""

    rule: str
    sentence: str
    result: str
    why: str = ""
    frames: tuple[str, ...] = ()


class ConformReport(Struct, frozen=True):
    """The result of a run."""

    noun: str
    results: tuple[RuleResult, ...]
    output: str = ""
    """the end of what the program has printed"""

    @property
    def broken(self) -> tuple[RuleResult, ...]:
        """The rules that are broken."""
        return tuple(one for one in self.results if one.result == "broken")


class RuleProgress(Protocol):
    """A callback that is told which rule is being proved."""

    def __call__(self, rule: str, done: int, total: int) -> None: ...


class PlayedServer(Protocol):
    """A server that this process plays."""

    port: int

    async def start(self, host: str, port: int) -> None:
        """Start to listen."""
        ...

    async def stop(self) -> None:
        """Stop listening."""
        ...

    async def first_client(self) -> None:
        """Wait for the first client, as long as it takes."""
        ...


AnyScript = Script | AppScript | SentinelScript


class ConformRun:
    """A run against one client. `command` starts the client's program; without it the client is started by
    hand, and what needs a restart is not checked. `memory` is how many commands a receiver remembers."""

    def __init__(
        self,
        noun: Noun,
        url: str,
        command: str | None = None,
        *,
        only: Iterable[str] = (),
        memory: int = MEMORY,
    ) -> None:
        self._noun = noun
        self._memory = memory
        self._transcript = Transcript()
        self.name = NAMES[noun]
        """the name of the client under test"""
        self._host, self._port, self._scheme = _address(noun, url)
        self._command = command
        self._frames: FrameServer | None = None
        self._broker: MqttServer | None = None
        if self._scheme == "mqtt":
            self._broker = MqttServer(self._transcript)
        else:
            server = RequestServer if self._scheme == "http" else FrameServer
            self._frames = server(self._transcript, self.name, _WELCOMES.get(noun))
        self._scripts = _chosen(noun, only, self._scheme)
        self._ids = SeqIdCounter(timeless=noun is Noun.NODE)

    @property
    def url(self) -> str:
        """The address that the client under test connects to."""
        return f"{self._scheme}://{self._host}:{self._server.port or self._port}"

    @property
    def _server(self) -> PlayedServer:
        server = self._broker or self._frames
        assert server is not None
        return server

    async def run(
        self,
        progress: RuleProgress,
        ready: Callable[[str], None] = lambda url: None,
        client: Callable[[str, str], RestartedClient] | None = None,
    ) -> ConformReport:
        """Play all scripts; `ready` is told the URL once it listens. `client` makes the client, if it is no
        program, of a URL and of a folder that outlives it."""
        try:
            await self._server.start(self._host, self._port)
        except OSError as problem:
            raise Malformed(f"cannot listen on {self._host}:{self._port}: {problem}") from None
        subject: RestartedClient | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="duly-conform-") as folder:
                if self._command is not None:
                    subject = self._subject(self._command, Path(folder))
                elif client is not None:
                    subject = client(self.url, folder)
                ready(self.url)
                try:
                    return await self._report(subject, progress)
                finally:
                    if subject is not None:
                        subject.kill()
                        await subject.gone()
        finally:
            await self._server.stop()

    async def _report(self, subject: RestartedClient | None, progress: RuleProgress) -> ConformReport:
        if subject is not None:
            subject.start()
        else:
            await self._server.first_client()  # a person starts it
        results = await self._play_all(subject, progress)
        return ConformReport(self._noun.value, tuple(results), "" if subject is None else subject.said())

    def _subject(self, command: str, folder: Path) -> Subject:
        store = folder / "store"
        store.mkdir()
        values = {
            "url": self.url,
            "host": self._host,
            "port": str(self._server.port),
            "name": self.name,
            "token": TOKEN,
            "store": str(store),
        }
        return Subject(command, values, folder / "output", self._transcript)

    async def _play_all(self, subject: RestartedClient | None, progress: RuleProgress) -> list[RuleResult]:
        play = self._player(subject)
        found: dict[str, RuleResult] = {}
        for number, script in enumerate(self._scripts):
            progress(script.rule, number, len(self._scripts))
            since = len(self._transcript.entries)
            self._transcript.note("!", f"rule {script.rule}")
            try:
                result = self._judged(script.rule, "holds", await play(script))
            except NotChecked as problem:
                result = self._judged(script.rule, "not checked", str(problem))
            except (BrokenRule, Malformed, msgspec.DecodeError) as problem:
                why = str(problem)
                if subject is not None and subject.ended is not None:
                    why += f"; the program has ended with code {subject.ended}"
                rule = problem.rule if isinstance(problem, BrokenRule) else script.rule
                result = self._judged(rule, "broken", why, self._transcript.last(since))
                if rule != script.rule:
                    reason = f"{rule} was broken before it could be proved"
                    found.setdefault(script.rule, self._judged(script.rule, "not checked", reason))
            if found.get(result.rule) is None or result.result == "broken":
                found[result.rule] = result
            unheard = result.rule == "connects" or (result.rule == "answers" and number == 0)
            if unheard and result.result == "broken":
                break  # it says nothing, or nothing that can be understood
        wanted = {script.rule for script in self._scripts} | found.keys()
        rules = [rule.name for rule in RULES[self._noun] if rule.name in wanted]
        return [found.get(name) or self._judged(name, "not checked") for name in rules]

    def _judged(self, name: str, result: str, why: str = "", frames: Sequence[str] = ()) -> RuleResult:
        sentence = next((rule.sentence for rule in RULES[self._noun] if rule.name == name), "")
        return RuleResult(name, sentence, result, why, tuple(frames))

    def _player(self, subject: RestartedClient | None) -> Callable[[AnyScript], Awaitable[str]]:
        """Return what plays a script against the client; its result is said of a rule that holds."""
        frames, broker = self._frames, self._broker
        peer: ReceiverPeer | None = None
        if broker is not None:
            peer = FdPeer(broker, self.name, is_hub=self._noun is Noun.DEVICE)
        elif frames is not None and self._noun is Noun.DEVICE:
            peer = FrameDevicePeer(frames)
        app = None if frames is None else AppRun(frames, subject)
        sentinel = None if frames is None else SentinelRun(frames, subject)

        async def play(script: AnyScript) -> str:
            if isinstance(script, AppScript) and app is not None:
                await app.play(script)
            elif isinstance(script, SentinelScript) and sentinel is not None:
                await sentinel.play(script)
            elif isinstance(script, Script) and peer is not None:
                run = ReceiverRun(peer, subject, self._ids, self._memory)
                await run.play(script)
                return run.remark
            return ""

        return play


_SCRIPTS: Final[Mapping[Noun, Sequence[AnyScript]]] = {
    Noun.DEVICE: DEVICE_SCRIPTS,
    Noun.APP: APP_SCRIPTS,
    Noun.NODE: NODE_SCRIPTS,
    Noun.SENTINEL: SENTINEL_SCRIPTS,
}
_WELCOMES: Final = {Noun.APP: {"cursors": {"lock": 0}, "online": ["lock"]}}
_DEFAULT_PORTS: Final = {"ws": 7800, "http": 7800, "mqtt": 1883}
_SCHEMES: Final = {
    Noun.DEVICE: ("ws", "mqtt"),
    Noun.APP: ("ws",),
    Noun.NODE: ("mqtt",),
    Noun.SENTINEL: ("ws", "http"),
}


def _chosen(noun: Noun, only: Iterable[str], transport: str) -> list[AnyScript]:
    """Return the scripts of a noun on a transport, or those of some of its rules."""
    rules = [rule.name for rule in RULES[noun] if rule.over in ("", transport)]
    wanted = set(only) or set(rules)
    if unknown := wanted - set(rules):
        named = ", ".join(sorted(unknown))
        raise Malformed(
            f"there is no rule {named} for a {noun} over {transport}; choose from {', '.join(rules)}"
        )
    return [script for script in _SCRIPTS[noun] if script.rule in wanted]


def _address(noun: Noun, url: str) -> tuple[str, int, str]:
    """Return the host and port to listen on, and the scheme."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as problem:
        raise Malformed(f"{url}: {problem}") from None
    schemes = _SCHEMES[noun]
    if parts.scheme not in schemes or not parts.hostname:
        examples = " or ".join(f"{scheme}://127.0.0.1:{_DEFAULT_PORTS[scheme]}" for scheme in schemes)
        raise Malformed(
            f"{url!r} is not an address to play a hub on; for a {noun} write {examples} (port 0: a free one)"
        )
    return parts.hostname, _DEFAULT_PORTS[parts.scheme] if port is None else port, parts.scheme
