"""`duly conform`: our own clients pass, and clients that break a rule are caught by the name of the rule."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from duly.cli import app as command_line
from duly.errors import Malformed
from duly.runtime.tasks import cancel
from duly.testing.conform import (
    RULES,
    ConformReport,
    ConformRun,
    Noun,
    app_run,
    fd_peer,
    frame_device,
    frame_server,
    heard_pushes,
    receiver,
    relayed_tasks,
    sentinel_run,
)
from duly.testing.conform.app_run import APP_SCRIPTS, AppScript
from duly.testing.conform.mqtt_server import MqttServer
from duly.testing.conform.receiver_scripts import DEVICE_SCRIPTS, NODE_SCRIPTS
from duly.testing.conform.sentinel_run import SENTINEL_SCRIPTS, SentinelScript
from duly.testing.conform.steps import Script
from duly.testing.conform.transcript import Transcript
from tests.servers import missing, unable
from tests.testing.conform.subjects import broken_app, broken_device, broken_sentinel, device
from tests.testing.conform.subjects.broken_node import BrokenNode

ROOT = Path(__file__).parents[3]
SUBJECTS = Path(__file__).parent / "subjects"
CLIENTS = Path(str(files("duly"))) / "clients"
SCRIPTS: dict[Noun, Sequence[Script | AppScript | SentinelScript]] = {
    Noun.DEVICE: DEVICE_SCRIPTS,
    Noun.NODE: NODE_SCRIPTS,
    Noun.APP: APP_SCRIPTS,
    Noun.SENTINEL: SENTINEL_SCRIPTS,
}


@pytest.mark.parametrize("noun", Noun)
def test_every_rule_has_a_script_and_every_script_a_rule(noun: Noun) -> None:
    rules = [rule.name for rule in RULES[noun]]
    assert sorted(rules) == sorted(script.rule for script in SCRIPTS[noun])
    assert len(set(rules)) == len(rules)


SECTIONS = {
    Noun.DEVICE: ("## A device", "## 设备"),
    Noun.APP: ("## An app", "## 应用"),
    Noun.NODE: ("## A node", "## 节点"),
    Noun.SENTINEL: ("## A sentinel", "## 哨兵"),
}


@pytest.mark.parametrize("noun", Noun)
@pytest.mark.parametrize("language", [0, 1], ids=["en", "zh"])
def test_the_page_explains_every_rule_under_its_name(noun: Noun, language: int) -> None:
    page = (ROOT / ("docs/zh" if language else "docs") / "write-your-own.md").read_text(encoding="utf-8")
    _, _, section = page.partition(SECTIONS[noun][language] + "\n")
    section, _, _ = section.partition("\n## ")
    named = set(
        re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+|connects|answers|resends|debounces|limits)`", section)
    )
    rules = {rule.name: rule for rule in RULES[noun]}
    assert set(rules) <= named
    for name, rule in rules.items():
        assert (f"`{name}` ↻" in section) == rule.restarts, name


# ── in this process: what needs no restart ───────────────────────────────────────────────────────


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a sound client: what must not happen has less time to happen, what must has all it needs."""
    monkeypatch.setattr(receiver, "QUIET", 0.05)
    monkeypatch.setattr(receiver, "ANSWER_WITHIN", 60.0)
    monkeypatch.setattr(frame_server, "CONNECTED", 60.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not happen has less time to happen: nothing here is slow."""
    monkeypatch.setattr(receiver, "QUIET", 0.05)
    monkeypatch.setattr(receiver, "ANSWER_WITHIN", 0.5)
    monkeypatch.setattr(heard_pushes, "PUSHED_WITHIN", 0.3)
    monkeypatch.setattr(frame_device, "PONG_WITHIN", 0.3)
    monkeypatch.setattr(frame_server, "CONNECTED", 1.0)
    for module in (app_run, sentinel_run):
        monkeypatch.setattr(module, "NEXT_WITHIN", 0.5)


PATIENCE_WITH = {"deaf": 10.0, "pressing": 0.3}
"""What must be seen to happen has as long as it takes."""


async def proved(
    url: str,
    rules: list[str],
    client: Callable[[str], Awaitable[None]],
    noun: Noun = Noun.DEVICE,
    memory: int = 100,
) -> ConformReport:
    """The report of a client that runs in this process."""
    started: list[asyncio.Task[None]] = []

    async def serve(found: str) -> None:
        await client(found)

    def start(found: str) -> None:
        started.append(asyncio.create_task(serve(found)))

    try:
        run = ConformRun(noun, url, only=rules, memory=memory)
        return await run.run(lambda rule, done, total: None, start)
    finally:
        await cancel(*started)  # again, where one cancellation is lost: this hung once, at a cut
        for task in started:
            if not task.cancelled():
                task.result()


@pytest.mark.parametrize("scheme", ["ws", "mqtt"])
async def test_a_python_device_passes(tmp_path: Path, patient: None, scheme: str) -> None:
    def own(url: str) -> Awaitable[None]:
        return device.main(url.replace("mqtt://", "mqtt://device:conform@"), "conform", str(tmp_path))

    rules = [
        "answers",
        "runs-once",
        "repeats-the-answer",
        "keys-by-sender",
        "minds-expiry",
        "survives-nonsense",
    ]
    report = await proved(f"{scheme}://127.0.0.1:0", rules, own)
    assert not report.broken, report.broken
    assert {result.rule for result in report.results if result.result == "holds"} >= set(rules)


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("naive", "runs-once"),
        ("forgetful", "never-runs-the-forgotten"),
        ("anonymous", "keys-by-sender"),
        ("careless", "minds-expiry"),
        ("disorderly", "keeps-order"),
        ("naive", "refuses-conflicts"),
        ("deaf", "repeats-the-answer"),
        ("amnesic", "remembers-over-cuts"),
        ("mumbling", "answers"),
        ("polite", "names-the-unknown"),
        ("fragile", "survives-nonsense"),
        ("pingless", "answers-pings"),
        ("pushy", "keeps-pushes"),
        ("lonely", "connects"),
        ("formal", "answers"),
        ("strict", "survives-nonsense"),
        ("waiting", "keeps-order"),
        ("ordering", "keeps-order"),
        ("sulking", "never-runs-the-forgotten"),
        ("possessive", "keys-by-sender"),
        ("silent", "names-the-unknown"),
        ("dazed", "connects"),
        ("textual", "never-runs-the-forgotten"),
        ("recent", "never-runs-the-forgotten"),
        ("trusting", "survives-nonsense"),
    ],
)
async def test_a_broken_device_is_caught_by_name(tmp_path: Path, quick: None, mode: str, rule: str) -> None:
    def broken(url: str) -> Awaitable[None]:
        return broken_device.main(mode, url, "conform", str(tmp_path))

    report = await proved("ws://127.0.0.1:0", [rule], broken)
    (found,) = report.broken
    assert found.rule == rule
    assert found.sentence == next(each.sentence for each in RULES[Noun.DEVICE] if each.name == rule)
    assert found.why
    assert found.frames


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("silent", "resends"),
        ("restless", "resends"),
        ("silent", "resends-after-cuts"),
        ("hasty", "waits-for-the-end"),
        ("strict", "takes-any-order"),
        ("literal", "reads-duplicates"),
        ("fickle", "ends-once"),
        ("gullible", "ignores-strangers"),
        ("stubborn", "reports-refusals"),
        ("resigned", "tries-again-after-4"),
        ("hopeful", "reports-the-unknown"),
        ("backward", "mints-ids"),
        ("fragile", "survives-nonsense"),
        ("literate", "survives-nonsense"),
        ("pressing", "resends"),
        ("eager", "waits-for-the-end"),
        ("confident", "resends-after-cuts"),
    ],
)
async def test_a_broken_app_is_caught_by_name(
    quick: None, monkeypatch: pytest.MonkeyPatch, mode: str, rule: str
) -> None:
    monkeypatch.setattr(app_run, "PATIENCE", PATIENCE_WITH.get(mode, 0.05))

    async def client(url: str) -> None:
        with suppress(ValueError):
            await broken_app.main(mode, url)

    report = await proved("ws://127.0.0.1:0", [rule], client, Noun.APP)
    assert [found.rule for found in report.broken] == [rule], report


async def test_a_sound_app_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_run, "PATIENCE", 0.2)

    def client(url: str) -> Awaitable[None]:
        return broken_app.main("sound", url)

    rules = [rule.name for rule in RULES[Noun.APP] if not rule.restarts]
    report = await proved("ws://127.0.0.1:0", rules, client, Noun.APP)
    assert not report.broken


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("anonymous", "fills-in-events"),
        ("silent", "resends"),
        ("minting", "resends"),
        ("forgetful", "resends-after-cuts"),
        ("resigned", "tries-again-after-4"),
        ("deaf", "stops-when-acknowledged"),
        ("absent", "keeps-while-offline"),
        ("hasty", "keeps-while-offline"),
        ("literate", "survives-nonsense"),
    ],
)
async def test_a_broken_sentinel_is_caught_by_name(
    quick: None, monkeypatch: pytest.MonkeyPatch, mode: str, rule: str
) -> None:
    monkeypatch.setattr(sentinel_run, "PATIENCE", PATIENCE_WITH.get(mode, 0.05))

    async def client(url: str) -> None:
        try:
            await broken_sentinel.main(mode, url)
        except* ValueError:
            assert mode == "literate"

    report = await proved("ws://127.0.0.1:0", [rule], client, Noun.SENTINEL)
    assert [found.rule for found in report.broken] == [rule], report


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("sound", ""),
        ("anonymous", "fills-in-events"),
        ("silent", "resends"),
        ("minting", "resends"),
        ("resigned", "tries-again-after-4"),
        ("deaf", "stops-when-acknowledged"),
        ("gullible", "survives-nonsense"),
        ("patient", "resends"),
    ],
)
async def test_a_broken_sentinel_is_caught_over_http(
    quick: None, monkeypatch: pytest.MonkeyPatch, mode: str, rule: str
) -> None:
    monkeypatch.setattr(sentinel_run, "PATIENCE", PATIENCE_WITH.get(mode, 0.05))
    if not rule:  # what a sound one does may take its time
        monkeypatch.setattr(sentinel_run, "NEXT_WITHIN", 30.0)
        monkeypatch.setattr(frame_server, "CONNECTED", 30.0)
    rules = [rule] if rule else [each.rule for each in SENTINEL_SCRIPTS][:8]

    def client(url: str) -> Awaitable[None]:
        return broken_sentinel.main_http(mode, url)

    report = await proved("http://127.0.0.1:0", rules, client, Noun.SENTINEL)
    assert [found.rule for found in report.broken] == ([rule] if rule else []), report
    unchecked = [found.rule for found in report.results if found.result == "not checked"]
    assert unchecked == (["keeps-over-kills"] if "keeps-over-kills" in rules else [])


@pytest.mark.parametrize(
    ("mode", "rule", "result"),
    [
        ("noisy", "debounces", "broken"),
        ("unlimited", "limits", "broken"),
        ("unlimited", "debounces", "holds"),
        ("noisy", "limits", "holds"),
        ("sound", "limits", "not checked"),
    ],
)
async def test_what_a_sentinel_must_hold_back(
    quick: None, monkeypatch: pytest.MonkeyPatch, mode: str, rule: str, result: str
) -> None:
    monkeypatch.setattr(sentinel_run, "PATIENCE", 5.0 if result == "broken" else 0.1)

    def client(url: str) -> Awaitable[None]:
        return broken_sentinel.main(mode, url)

    report = await proved("ws://127.0.0.1:0", [rule], client, Noun.SENTINEL)
    assert [(one.rule, one.result) for one in report.results] == [(rule, result)], report


async def broken_node_report(mode: str, rule: str) -> ConformReport:
    nodes: list[BrokenNode] = []

    async def client(url: str) -> None:
        nodes.append(await asyncio.to_thread(BrokenNode, mode, "127.0.0.1", int(url.rsplit(":", 1)[1])))

    try:
        return await proved("mqtt://127.0.0.1:0", [rule], client, Noun.NODE)
    finally:
        for node in nodes:
            await asyncio.to_thread(node.stop)


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("clean", "keeps-its-session"),
        ("unseen", "reports-status"),
        ("strange", "reports-status"),
        ("unconfirmed", "confirms-receipt"),
        ("terse", "confirms-receipt"),
        ("nosy", "minds-the-receiver"),
        ("ancient", "minds-old-tasks"),
        ("plain", "answers-in-kind"),
        ("modern", "answers-in-kind"),
        ("recent", "answers-in-kind"),
        ("encoded", "answers-in-kind"),
        ("unsure", "answers"),
        ("wildcard", "keeps-its-session"),
        ("renamed", "keeps-its-session"),
        ("unnamed", "connects"),
        ("resumed", "reports-status"),
        ("dated", "minds-old-tasks"),
        ("wordless", "answers"),
        ("nameless", "resends"),
        ("sound", "resends"),
        ("sound", "refuses-conflicts"),
        ("gullible", "takes-the-first-end"),
        ("last", "takes-the-first-end"),
    ],
)
async def test_a_broken_node_is_caught_by_name(
    quick: None, monkeypatch: pytest.MonkeyPatch, mode: str, rule: str
) -> None:
    monkeypatch.setattr(fd_peer, "STATUS_WITHIN", 0.3)
    if rule == "connects":  # what it must not do
        monkeypatch.setattr(fd_peer, "CONNECTED", 0.5)
    monkeypatch.setattr(relayed_tasks, "SENT_AGAIN_WITHIN", 0.3)
    monkeypatch.setattr(relayed_tasks, "QUIET", 0.1)
    report = await broken_node_report(mode, rule)
    assert [found.rule for found in report.broken] == [rule], report


@pytest.mark.parametrize(
    "rule",
    ["keeps-its-session", "reports-status", "confirms-receipt", "answers-in-kind", "takes-the-first-end"],
)
async def test_a_sound_node_passes(patient: None, rule: str) -> None:
    report = await broken_node_report("sound", rule)
    assert [(one.rule, one.result) for one in report.results] == [(rule, "holds")], report


async def test_a_larger_memory_is_flooded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "QUIET", 0.05)

    def found(url: str) -> Awaitable[None]:
        return broken_device.main("hoarding", url, "conform", str(tmp_path))

    rule = "never-runs-the-forgotten"
    report = await proved("ws://127.0.0.1:0", [rule], found)
    assert [one.rule for one in report.broken] == [rule], report
    monkeypatch.setattr(receiver, "FLOOD_MOST", 130)
    (holds,) = (await proved("ws://127.0.0.1:0", [rule], found)).results
    assert (holds.result, "still remembered" in holds.why) == ("holds", True), holds
    report = await proved("ws://127.0.0.1:0", [rule], found, memory=200)
    assert [one.rule for one in report.broken] == [rule], report


async def test_a_slow_device_is_not_blamed_for_its_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut 0.3 s after the acknowledgement, it had not read it, and sent its push again."""
    monkeypatch.setattr(heard_pushes, "NOT_AGAIN", 0.1)

    def slow(url: str) -> Awaitable[None]:
        return broken_device.main("leisurely", url, "conform", str(tmp_path))

    report = await proved("ws://127.0.0.1:0", ["keeps-pushes"], slow)
    assert [one.result for one in report.results] == ["holds"], report


NONSENSE = (
    "[" * 5_000,
    '{"type":"ack","seq_id":' + "[" * 5_000 + "]" * 5_000 + "}",
    "null",
    '"\\ud800"',
    '{"type":"ack","seq_id":null,"to":7,"code":"0"}',
    '{"type":"conform","seq_id":"' + "9" * 5_000 + '_1","to":"lock"}',
    '{"type":"conform","seq_id":"1_1","to":"lock","data":{"ended":[]}}',
    '{"type":"alert_event","seq_id":"e","data":{"profile_id":"p","trigger_reason":"x","device_address":"r-²"}}',
    '{"type":"alert_event","seq_id":"f","data":{"profile_id":"p","trigger_reason":"x","device_address":"r-'
    + "9" * 5_000
    + '"}}',
)


@pytest.mark.parametrize("noun", [Noun.DEVICE, Noun.APP, Noun.SENTINEL])
async def test_nonsense_of_a_client_is_reported_and_ends_nothing(
    quick: None, noun: Noun, caplog: pytest.LogCaptureFixture
) -> None:
    async def client(url: str) -> None:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/v1/ws") as socket:
            await socket.send_json({"type": "auth", "token": "conform"})
            for text in NONSENSE:
                await socket.send_str(text)
            async for _ in socket:
                pass

    rules = [
        rule.name for rule in RULES[noun] if rule.name in ("answers", "mints-ids", "keeps-while-offline")
    ]
    report = await proved("ws://127.0.0.1:0", rules, client, noun)
    assert report.broken
    assert not caplog.records, caplog.text  # no server of ours was ended by it


@pytest.mark.parametrize("words", [(), ("-c", "-i", "named")])
async def test_a_client_without_a_session_needs_no_client_id(words: Sequence[str]) -> None:
    """As at every broker: mosquitto_pub connects with an empty client id and a clean session."""
    server = MqttServer(Transcript())
    await server.start("127.0.0.1", 0)
    login = ["-h", "127.0.0.1", "-p", str(server.port), "-u", "device", "-P", "secret"]
    publishing = await asyncio.create_subprocess_exec(
        "mosquitto_pub", *login, *words, "-q", "1", "-t", "nodes/hub/ack", "-m", "{}"
    )
    heard = await server.hear(20)
    await publishing.wait()
    await server.stop()
    assert heard is not None
    assert heard.topic == "nodes/hub/ack"


async def test_the_other_rules_do_not_blame_it(tmp_path: Path, patient: None) -> None:
    def broken(url: str) -> Awaitable[None]:
        return broken_device.main("disorderly", url, "conform", str(tmp_path))

    report = await proved("ws://127.0.0.1:0", ["answers", "runs-once", "minds-expiry"], broken)
    assert not report.broken


def test_a_device_that_answers_before_it_stores_is_caught_over_a_kill() -> None:
    program = f"{sys.executable} {SUBJECTS / 'broken_device.py'} hasty {{url}} {{token}} {{store}}"
    words = ["conform", "device", "ws://127.0.0.1:0", "--only", "stores-before-it-answers", "--json"]
    done = CliRunner().invoke(command_line, [*words, "--run", program])
    assert done.exit_code == 1, done.output
    found = {one["rule"]: one for one in json.loads(done.stdout.splitlines()[-1])["results"]}
    assert found["stores-before-it-answers"]["result"] == "broken"
    assert any("kill -9" in line for line in found["stores-before-it-answers"]["frames"])


# ── restarts, in this process: a task that is cancelled has no chance to store anything ──────────


class RestartedTask:
    """A client that is a task, killed and started again."""

    def __init__(self, client: Callable[[], Coroutine[None, None, None]]) -> None:
        self._client = client
        self._task: asyncio.Task[None] | None = None

    ended = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._client())

    def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def gone(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
        self._task = None

    def said(self) -> str:
        return ""


async def restarted(noun: Noun, mode: str, rule: str) -> ConformReport:
    """The report of a broken client that is killed and started again."""

    def client(url: str, store: str) -> RestartedTask:
        match noun:
            case Noun.APP:
                return RestartedTask(lambda: broken_app.main(mode, url))
            case Noun.SENTINEL:
                return RestartedTask(lambda: broken_sentinel.main(mode, url))
            case _:
                return RestartedTask(lambda: broken_device.main(mode, url, "conform", store))

    run = ConformRun(noun, "ws://127.0.0.1:0", only=[rule])
    return await run.run(lambda rule, done, total: None, client=client)


@pytest.mark.parametrize(
    ("noun", "mode", "rule"),
    [
        (Noun.DEVICE, "volatile", "remembers-over-restarts"),
        (Noun.DEVICE, "hasty", "stores-before-it-answers"),
        (Noun.DEVICE, "slow", "runs-once-over-kills"),
        (Noun.DEVICE, "fading", "never-runs-the-forgotten"),
        (Noun.APP, "reborn", "mints-ids-over-restarts"),
        (Noun.SENTINEL, "volatile", "keeps-over-kills"),
    ],
)
async def test_who_forgets_over_a_restart_is_caught_by_name(
    quick: None, monkeypatch: pytest.MonkeyPatch, noun: Noun, mode: str, rule: str
) -> None:
    monkeypatch.setattr(app_run, "PATIENCE", 0.05)
    monkeypatch.setattr(sentinel_run, "PATIENCE", 0.05)
    report = await restarted(noun, mode, rule)
    assert [(one.rule, one.result) for one in report.results] == [(rule, "broken")], report


@pytest.mark.parametrize("rule", ["remembers-over-restarts", "runs-once-over-kills"])
async def test_who_notes_what_it_begins_is_not_blamed(patient: None, rule: str) -> None:
    report = await restarted(Noun.DEVICE, "careful", rule)
    assert [(one.rule, one.result) for one in report.results] == [(rule, "holds")], report


def test_every_rule_of_restarts_has_a_client_that_breaks_it() -> None:
    planted = {"remembers-over-restarts", "stores-before-it-answers", "runs-once-over-kills"}
    planted |= {"mints-ids-over-restarts", "keeps-over-kills"}
    assert {rule.name for rules in RULES.values() for rule in rules if rule.restarts} == planted


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("noun", "url", "command", "only", "why"),
    [
        (Noun.DEVICE, "http://127.0.0.1:1", None, [], "not an address to play a hub on"),
        (Noun.APP, "mqtt://127.0.0.1:1", None, [], "for a app write ws://|no address"),
        (Noun.NODE, "ws://127.0.0.1:1", None, [], "mqtt://127.0.0.1:1883"),
        (Noun.DEVICE, "ws://127.0.0.1:99999", None, [], "Port out of range"),
        (Noun.DEVICE, "ws://127.0.0.1:0", None, ["no-such-rule"], "there is no rule no-such-rule"),
        (Noun.DEVICE, "ws://127.0.0.1:0", "x {nothing}", [], "a command may name"),
        (Noun.DEVICE, "ws://127.0.0.1:0", "/no/such/program", [], "does not start"),
        (Noun.DEVICE, "ws://192.0.2.1:7800", None, [], "cannot listen"),
    ],
)
async def test_bad_input_is_explained(
    noun: Noun, url: str, command: str | None, only: list[str], why: str
) -> None:
    with pytest.raises(Malformed, match=why):
        await ConformRun(noun, url, command, only=only).run(lambda rule, done, total: None)


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────


def passes(noun: str, url: str, *words: object, but: Sequence[str] = (), only: Sequence[str] = ()) -> None:
    command = " ".join(map(str, words))
    chosen = [word for rule in only for word in ("--only", rule)]
    done = subprocess.run(
        [sys.executable, "-m", "duly", "conform", noun, url, "--json", *chosen, "--run", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)["results"]
    assert [one["rule"] for one in results if one["result"] != "holds"] == list(but)


WHOLE = [pytest.mark.proof, pytest.mark.timeout(300)]
FRAMES, MQTT, REQUESTS = "ws://127.0.0.1:0", "mqtt://127.0.0.1:0", "http://127.0.0.1:0"
ACCOUNT = ("{host}", "{port}", "{name}", "{token}", "{store}")


class TestNonsense:
    """Clients in languages other than Python go on after what they cannot read: one such message ended the
    JavaScript app's process, and the worker of the MicroPython device."""

    only = ("survives-nonsense",)

    @pytest.mark.parametrize("url", [FRAMES, MQTT])
    def test_micropython_device(self, url: str) -> None:
        micropython = shutil.which("micropython") or missing("micropython")
        words = (micropython, SUBJECTS / "board.py", CLIENTS / "micropython", "{url}", "{token}", "{store}")
        passes("device", url, *words, *(("{name}",) if url == MQTT else ()), only=self.only)

    @pytest.mark.parametrize(("noun", "library"), [("app", "js/duly.js"), ("sentinel", "js")])
    def test_javascript(self, noun: str, library: str) -> None:
        node = shutil.which("node") or missing("node")
        program = (node, "--experimental-websocket", SUBJECTS / f"{noun}.mjs", CLIENTS / library)
        passes(noun, FRAMES, *program, "{url}", "{token}", "{store}", only=self.only)


class TestWholeRuns:
    """Every rule, with kills, for every client of ours."""

    pytestmark = WHOLE

    @pytest.mark.parametrize("url", [FRAMES, MQTT])
    def test_python_device(self, url: str) -> None:
        target = "{url}" if url == FRAMES else "mqtt://{name}:{token}@{host}:{port}"
        passes("device", url, sys.executable, SUBJECTS / "device.py", target, "{token}", "{store}")

    @pytest.mark.parametrize("url", [FRAMES, MQTT])
    def test_micropython_device(self, url: str) -> None:
        micropython = shutil.which("micropython") or missing("micropython")
        board, library = SUBJECTS / "board.py", CLIENTS / "micropython"
        name = ("{name}",) if url == MQTT else ()
        passes("device", url, micropython, board, library, "{url}", "{token}", "{store}", *name)

    def test_c_device(self, tmp_path: Path) -> None:
        gcc = shutil.which("gcc") or missing("gcc")
        sources = CLIENTS / "c"
        examples = sources / "examples"
        files_ = (sources / "duly.c", examples / "posix_port.c", SUBJECTS / "counter.c")
        words = [gcc, f"-I{sources}", f"-I{examples}", "-o", str(tmp_path / "counter"), *map(str, files_)]
        subprocess.run(words, check=True)
        passes("device", MQTT, tmp_path / "counter", *ACCOUNT)

    def test_shell_device(self) -> None:
        """It was written from docs/write-your-own.md; it never pushes."""
        for tool in ("mosquitto_sub", "mosquitto_pub", "jq"):
            if shutil.which(tool) is None:
                missing(tool)
        passes("device", MQTT, ROOT / "examples" / "shell_device.sh", *ACCOUNT, but=["keeps-pushes"])

    def test_python_app(self) -> None:
        passes("app", FRAMES, sys.executable, SUBJECTS / "app.py", "{url}", "{token}", "{store}")

    def test_javascript_app(self) -> None:
        node = shutil.which("node") or missing("node")
        version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
        if int(version.strip().removeprefix("v").split(".")[0]) < 20:
            unable(f"Node.js {version.strip()} has no WebSocket; install 20 or newer")
        program = (node, "--experimental-websocket", SUBJECTS / "app.mjs", CLIENTS / "js" / "duly.js")
        passes("app", FRAMES, *program, "{url}", "{token}", "{store}")

    def test_python_node(self) -> None:
        passes("node", MQTT, sys.executable, SUBJECTS / "node.py", *ACCOUNT)

    def test_python_sentinel(self) -> None:
        passes("sentinel", FRAMES, sys.executable, SUBJECTS / "sentinel.py", "{url}", "{token}", "{store}")

    def test_javascript_sentinel(self) -> None:
        node = shutil.which("node") or missing("node")
        program = (node, "--experimental-websocket", SUBJECTS / "sentinel.mjs", CLIENTS / "js")
        passes("sentinel", FRAMES, *program, "{url}", "{token}", "{store}")

    def test_shell_sentinel(self) -> None:
        """It was written from docs/write-your-own.md, and speaks by curl."""
        for tool in ("curl", "jq"):
            if shutil.which(tool) is None:
                missing(tool)
        signals, program = SUBJECTS / "signals.sh", ROOT / "examples" / "shell_sentinel.sh"
        passes(
            "sentinel",
            REQUESTS,
            "bash",
            "-c",
            f'"{signals} | {program} {{url}} {{token}} {{store}} home"',
        )

    def test_perl_node(self) -> None:
        """It was written from docs/write-your-own.md, too."""
        perl = shutil.which("perl") or missing("perl")
        passes("node", MQTT, perl, ROOT / "examples" / "perl_node.pl", *ACCOUNT)

    def test_go_node(self, tmp_path: Path) -> None:
        go = shutil.which("go") or missing("go")
        program = tmp_path / "counter"
        subprocess.run([go, "build", "-o", program, "./cmd/counter"], cwd=CLIENTS / "go", check=True)
        passes("node", MQTT, program, *ACCOUNT)
