"""The device client in C: built without warnings, run with sanitizers as a lock on a real hub and broker.

The lock writes a line to a file of its own for every effect: what happened is read there, not asked.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path

import pytest

from duly.clients.app import App, Push
from duly.errors import DulyError
from duly.identity.accounts import Role, administer
from duly.server.hub import Hub
from duly.settings import Settings
from tests import servers
from tests.guard import GUARD, LIMIT

SOURCES = Path(str(files("duly"))) / "clients" / "c"
HOST_TEST = Path(__file__).parent / "c_device" / "host_test.c"
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror", "-O2"]
SANITIZED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RAM = 4_096
"""Bytes that the client may take without its buffers."""

pytestmark = pytest.mark.timeout(2 * LIMIT)


def compile_c(target: Path, *words: object, compiler: str = "gcc") -> Path:
    if shutil.which(compiler) is None:
        servers.missing(compiler)
    done = subprocess.run(
        [compiler, f"-I{SOURCES}", "-o", str(target), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def built_lock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The simulated lock, built by its Makefile, and what the build said."""
    if shutil.which("gcc") is None:
        servers.missing("gcc")
    target = tmp_path_factory.mktemp("c") / "lock"
    flags = " ".join([*STRICT, *SANITIZED])
    done = subprocess.run(
        ["make", "-C", SOURCES, "CC=gcc", f"CFLAGS={flags}", f"OUT={target}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target, done.stdout


@pytest.fixture(scope="module")
def lock_program(built_lock: tuple[Path, str]) -> Path:
    return built_lock[0]


@pytest.fixture(scope="module")
def host_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("c") / "host_test"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", *SANITIZED]
    return compile_c(target, *strict, SOURCES / "duly.c", HOST_TEST)


def run(program: Path, *words: str) -> str:
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=GUARD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_it_compiles_without_a_warning(tmp_path: Path, compiler: str) -> None:
    compile_c(tmp_path / "duly.o", *STRICT, "-c", SOURCES / "duly.c", compiler=compiler)


def test_it_is_a_header_of_cpp_too(tmp_path: Path) -> None:
    source = tmp_path / "sketch.cpp"
    source.write_text('#include "duly.h"\nstatic duly device;\nint main() { return sizeof device == 0; }\n')
    compile_c(tmp_path / "sketch", "-Wall", "-Wextra", "-Werror", source, compiler="g++")


def test_it_needs_little_memory_and_the_build_says_how_much(built_lock: tuple[Path, str]) -> None:
    found = re.search(r"(\d+) bytes of RAM, (\d+) with buffers", built_lock[1])
    assert found is not None, built_lock[1]
    assert int(found[1]) < RAM < int(found[2])


def test_a_power_cut_at_any_write_repeats_and_loses_no_effect(host_test: Path) -> None:
    said = run(host_test, "power")
    assert int(said.splitlines()[1].split()[0]) > 1_000, said


def test_what_is_forgotten_is_not_accepted_again(host_test: Path) -> None:
    run(host_test, "window")


def test_what_may_be_late_is_not_begun(host_test: Path) -> None:
    """While the clock is not set, a broker may hand over what it has kept for hours."""
    run(host_test, "clock")


def test_what_is_cut_off_is_not_run(host_test: Path) -> None:
    """A message without its last brace was run, without the data that had not come."""
    run(host_test, "cut-off")


def test_what_was_interrupted_is_not_called_late(host_test: Path) -> None:
    """It was answered as expired, or as busy while the clock was not set, though it had been done."""
    run(host_test, "interrupted")


def test_a_handler_at_work_goes_on_over_a_cut(host_test: Path) -> None:
    run(host_test, "connection")


class TestBoards:
    """Projects for boards are checked for syntax and types, against headers that declare what they need."""

    boards = Path(__file__).parent / "c_device" / "boards"

    def check(self, compiler: str, *words: object) -> None:
        if shutil.which(compiler) is None:
            servers.missing(compiler)
        flags = [
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            f"-I{self.boards / 'esp_idf'}",
            f"-I{SOURCES}",
        ]
        done = subprocess.run(
            [compiler, *flags, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def test_esp_idf(self) -> None:
        project = SOURCES / "examples" / "esp_idf" / "main"
        sources = sorted(project.glob("*.c"))
        named = (project / "CMakeLists.txt").read_text()
        assert [source.name for source in sources if source.name not in named] == []
        self.check("gcc", "-std=gnu17", f"-I{project}", *sources)

    def test_esp_idf_asks_for_every_setting_that_it_uses(self) -> None:
        project = SOURCES / "examples" / "esp_idf" / "main"
        used = set(re.findall(r"CONFIG_(LOCK_\w+)", (project / "main.c").read_text()))
        asked = set(re.findall(r"config (LOCK_\w+)", (project / "Kconfig.projbuild").read_text()))
        assert used == asked

    def test_arduino(self) -> None:
        sketch = SOURCES / "examples" / "arduino" / "DulyLock" / "DulyLock.ino"
        arduino = self.boards / "arduino"
        self.check(
            "g++", "-std=gnu++17", f"-I{arduino}", "-include", arduino / "Arduino.h", "-x", "c++", sketch
        )

    def test_a_mistake_is_found(self, tmp_path: Path) -> None:
        wrong = tmp_path / "wrong.c"
        wrong.write_text('#include "esp_random.h"\nchar *wrong(void) { return esp_random(); }\n')
        with pytest.raises(AssertionError, match="error"):
            self.check("gcc", wrong)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("c") / "fuzzed"
    return compile_c(target, "-std=c99", "-O1", *SANITIZED, SOURCES / "duly.c", HOST_TEST)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_nonsense_from_a_broker_is_survived(fuzzed: Path, seed: str) -> None:
    run(fuzzed, "fuzz", seed, "20000")


class LockBoard:
    """A lock's hardware: its flash and what it has done outlive its process."""

    def __init__(self, program: Path, hub: Hub, folder: Path, token: str, key: str = "") -> None:
        self._program = program
        self._hub = hub
        self._folder = folder
        self._token = token
        self._key = key
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *, host: str = "127.0.0.1", port: str = "", token: str = "") -> None:
        port = port or self._hub.mqtt_url.rsplit(":", 1)[1]
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                self._program, host, port, "lock", token or self._token, self._folder / "flash",
                self._folder / "effects", *([self._key] if self._key else []), stderr=log,
            )  # fmt: skip

    async def online(self) -> None:
        async with asyncio.timeout(GUARD):
            while not self._hub.gateway.online("lock"):
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """Cut the power."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def effects(self) -> list[str]:
        """The ids of what the lock really did."""
        file = self._folder / "effects"
        return [line.split(" ")[1] for line in file.read_text().splitlines()] if file.exists() else []

    async def said(self, words: str) -> None:
        """Wait until its log has these words."""
        async with asyncio.timeout(GUARD):
            while words not in self.log():
                await asyncio.sleep(0.01)

    def log(self) -> str:
        return (self._folder / "log").read_text()


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    it = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0))
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
async def phone(hub: Hub) -> str:
    return await hub.accounts.add(Role.APP, "phone")


@pytest.fixture
async def board(hub: Hub, phone: str, tmp_path: Path, lock_program: Path) -> AsyncIterator[LockBoard]:
    token = await hub.accounts.add(Role.DEVICE, "lock")
    await hub.accounts.grant("phone", "lock")
    it = LockBoard(lock_program, hub, tmp_path, token)
    yield it
    await it.kill()
    assert "ERROR" not in it.log()
    assert "runtime error" not in it.log()


async def test_it_does_what_it_is_told_and_says_how_it_ended(hub: Hub, phone: str, board: LockBoard) -> None:
    await board.start()
    await board.online()
    async with App(hub.url, phone) as app:
        turned = await app.send("lock", "lock_control", {"open": True})
        assert (turned.state, turned.data) == ("done", {"open": True})
        assert (await app.send("lock", "query")).data == {"open": True}
        slow = await app.send("lock", "slow_turn", {})
        assert (slow.state, slow.data) == ("done", {"slow": True})
        assert (await app.send("lock", "lock_control", {"open": 1})).code == 2
        assert (await app.send("lock", "dance")).code == 7
        too_long = await app.send("lock", "lock_control", {"open": True, "more": "x" * 4_000})
        assert too_long.code == 6
    assert len(board.effects()) == 2


async def test_its_pushes_arrive_once_and_in_order_whatever_dies(
    hub: Hub, phone: str, board: LockBoard
) -> None:
    async with App(hub.url, phone) as app:
        pushes = app.pushes()

        async def next_report() -> Push:
            async with asyncio.timeout(GUARD):
                async for push in pushes:
                    if isinstance(push, Push) and push.type != "device_status":
                        return push
            raise AssertionError("there are no more pushes")

        cursors = []
        for _ in range(3):  # each start pushes once
            await board.start()
            push = await next_report()
            assert (push.type, push.data) == ("event_report", {"what": "started"})
            cursors.append(push.cursor)
            await board.kill()
        await board.start()
        cursors.append((await next_report()).cursor)
    assert cursors == sorted(set(cursors))
    entries = await hub.ledger.entries("push/lock", 0, 100)
    assert sum(b"event_report" in entry.body for entry in entries) == len(cursors)


async def test_no_kill_repeats_an_effect(hub: Hub, phone: str, board: LockBoard) -> None:
    """Every command that ended as done has one effect; no command has two. One that arrives later than the
    lock waits for it is superseded, and has none."""
    dice = random.Random(7)
    await board.start()
    await board.online()
    ended: dict[str, str] = {}

    async def command(app: App, n: int) -> None:
        try:
            id_ = f"{1_000 * int(time.time())}_{n}"
            sent = await app.send("lock", "lock_control", {"open": n % 2 == 0}, queue=True, id=id_)
            ended[id_] = sent.state
        except DulyError as problem:
            ended[f"refused-{n}"] = repr(problem)

    async with App(hub.url, phone) as app:
        sending = [asyncio.create_task(command(app, n)) for n in range(60)]
        for _ in range(6):
            await asyncio.sleep(dice.uniform(0.02, 0.3))
            await board.kill()
            await board.start()
        async with asyncio.timeout(GUARD):
            await asyncio.gather(*sending)
    effects = Counter(board.effects())
    assert max(effects.values()) == 1
    assert {id_ for id_, state in ended.items() if state == "done"} <= set(effects)
    assert not {id_ for id_, state in ended.items() if state == "superseded"} & set(effects)
    states = Counter(ended.values())
    assert states["done"] + states["superseded"] >= 50, states
    assert states["done"] >= 20, states


# ── signatures ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def shared_key(hub: Hub, phone: str) -> tuple[str, str]:
    """The token and the key of a lock that must sign."""
    made = await administer(hub.accounts, "add", {"role": "device", "name": "lock", "key": "shared"})
    await hub.accounts.grant("phone", "lock")
    return str(made["token"]), str(made["key"])


async def test_it_signs_all_that_a_hub_with_its_key_demands(
    hub: Hub, phone: str, shared_key: tuple[str, str], tmp_path: Path, lock_program: Path
) -> None:
    board = LockBoard(lock_program, hub, tmp_path, *shared_key)
    try:
        async with App(hub.url, phone) as app:
            await board.start()
            await board.online()
            progress: list[object] = []
            assert (await app.send("lock", "lock_control", {"open": True})).data == {"open": True}
            slow = await app.send("lock", "slow_turn", {}, progress=progress.append)
            assert (slow.state, progress[:1]) == ("done", [{"turning": True}])
            assert (await app.send("lock", "query", {"word": True})).data == "open"
            assert (await app.send("lock", "dance")).code == 7
            entries = await hub.ledger.entries("push/lock", 0, 100)
            assert sum(b"event_report" in entry.body for entry in entries) == 1
        assert not await hub.ledger.refusals()
    finally:
        await board.kill()


@pytest.mark.parametrize("key", ["", "0123456789abcdef:" + "A" * 43 + "="], ids=["unsigned", "another key"])
async def test_what_is_not_signed_with_its_key_does_not_count(
    hub: Hub, shared_key: tuple[str, str], tmp_path: Path, lock_program: Path, key: str
) -> None:
    board = LockBoard(lock_program, hub, tmp_path, shared_key[0], key)
    try:
        await board.start()
        async with asyncio.timeout(GUARD):
            while not await hub.ledger.refusals():
                await asyncio.sleep(0.01)
        assert not hub.gateway.online("lock")
    finally:
        await board.kill()


async def test_a_shared_key_is_not_in_the_ledger_in_clear(hub: Hub, shared_key: tuple[str, str]) -> None:
    secret = shared_key[1].partition(":")[2]
    assert hub.accounts.key_of("lock") == f"hmac-sha256:{secret}"
    rows = await hub.ledger.bucket("principals")
    assert secret.encode() not in b"".join(rows.values())


# ── trouble on the way ───────────────────────────────────────────────────────────────────────────


class TestWithoutABroker:
    """The lock says why it is not online, and goes on trying."""

    async def test_no_broker(self, hub: Hub, board: LockBoard) -> None:
        free = servers.free_port()
        await board.start(port=str(free))
        await board.said(f"lock: cannot reach 127.0.0.1:{free}: Connection refused; trying again")

    async def test_an_unknown_name(self, board: LockBoard) -> None:
        await board.start(host="no-such-host.invalid")
        await board.said("lock: cannot reach no-such-host.invalid:")

    async def test_a_token_that_is_not_known(self, board: LockBoard) -> None:
        await board.start(token="duly_wrong")
        await board.said("refuses lock")
