"""A MicroPython device on a real hub: its own process, its own file in flash, killed and started again.

The device writes a line to a file of its own for every effect: what happened is read there, not asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duly.clients.app import Ack, App, Push
from duly.identity.accounts import Principal, Role, administer
from duly.wire import frames
from duly.wire.frames import Frame
from duly.wire.session import Session
from tests import servers
from tests.guard import GUARD, LIMIT
from tests.local_hub import LocalHub

DEVICE = """
import asyncio, json, sys
folder, url, token, library, key = sys.argv[1:]
sys.path.insert(0, library)
from duly_device import Device, DeviceError

device = Device(url, token, file=folder + "/flash.json", name="lock", key=key, log=print)

def note(word, command):
    with open(folder + "/effects", "a") as file:
        file.write(word + " " + command.id + "\\n")
        file.flush()

@device.on("lock_control")
async def lock_control(command):
    note("lock", command)
    await asyncio.sleep((command.data or {}).get("takes", 0))
    return {"open": True}

@device.on("dev_control", effect="at_least_once")
def dev_control(command):
    note("lamp", command)
    if (command.data or {}).get("stuck"):
        import time
        time.sleep(60)
    return object() if (command.data or {}).get("odd") else (command.data or {}).get("echo")

@device.on("set_mode")
async def set_mode(command):
    for percent in (50, 100):
        await command.working(percent)
    return command.fields

@device.on("query")
def query(command):
    raise DeviceError(3, "the sensor is broken")

@device.on("media_download_chunk")
def chunk(command):
    return "x" * 1000

async def main():
    tell = asyncio.create_task(told())
    await device.run()

async def told():
    while not await device.push("event_report", {"hello": "é"}):
        await asyncio.sleep(0.02)

asyncio.run(main())
"""

pytestmark = pytest.mark.timeout(2 * LIMIT)


class Board:
    """A device's hardware: what is in its flash and what it has done outlive its process."""

    def __init__(self, local: LocalHub, folder: Path, *, mqtt: bool = False, key: str = "") -> None:
        self._place = local
        self._key = key
        self._mqtt = mqtt
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        folder.mkdir()
        (folder / "main.py").write_text(DEVICE)

    async def start(self) -> None:
        await self.power_on()
        await self.online()

    async def power_on(self) -> None:
        library = files("duly").joinpath("clients/micropython")
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "micropython", self._folder / "main.py", self._folder, self._url(),
                self._place.tokens["lock"], str(library), self._key, stdout=log, stderr=log,
            )  # fmt: skip

    def _url(self) -> str:
        return self._place.hub.mqtt_url if self._mqtt else self._place.url

    async def online(self) -> None:
        await until(lambda: self._place.hub.gateway.online("lock"))

    async def kill(self, *, noticed: bool = True) -> None:
        """Cut the power, and come back when the hub has noticed."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None
        if noticed:
            await until(lambda: not self._place.hub.gateway.online("lock"))

    @property
    def effects(self) -> list[str]:
        file = self._folder / "effects"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def flash(self) -> Path:
        return self._folder / "flash.json"

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
def patience() -> float:
    """Of the hub: longer than a board on a busy machine ever needs; tests of `unknown` have their own."""
    return GUARD


@pytest.fixture
async def local(tmp_path: Path, patience: float) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", patience=patience)
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


@pytest.fixture
async def board(local: LocalHub, tmp_path: Path) -> AsyncIterator[Board]:
    if shutil.which("micropython") is None:
        servers.missing("micropython")
    it = Board(local, tmp_path / "board")
    await it.start()
    yield it
    await it.kill()


@pytest.fixture
async def app(local: LocalHub, board: Board) -> AsyncIterator[App]:
    async with App(local.url, local.tokens["phone"]) as it:
        yield it


def has_done_more_than(board: Board, times: int) -> bool:
    return len(board.effects) > times


def say(local: LocalHub, frame: Mapping[str, object]) -> None:
    """What somebody who captured frames, or a hub that resends, puts on the device's wire."""
    raw: Any = msgspec.Raw(json.dumps({"from": "phone", **frame}).encode())
    local.hub.gateway.sessions.devices["lock"].push(raw)


async def test_a_command_is_done_and_its_answer_comes_back(app: App, board: Board) -> None:
    command = await app.post("lock", "lock_control", {"who": "Zoë"})
    ack = await command.ended()
    assert (ack.state, ack.code, ack.data) == ("done", 0, {"open": True})
    assert board.effects == [f"lock {command.id}"]


async def test_what_goes_wrong_has_its_code_and_reason(app: App, board: Board) -> None:
    ack = await app.send("lock", "query")
    assert (ack.state, ack.code, ack.detail) == ("failed", 3, "the sensor is broken")
    ack = await app.send("lock", "system")
    assert (ack.state, ack.code, ack.detail) == ("failed", 7, "lock does not know system")


async def test_large_and_empty_answers_pass(app: App, board: Board) -> None:
    for echo in ("x" * 40_000, "y" * 200, "", 0, None, [{"ü": 1.5}]):
        ack = await app.send("lock", "dev_control", {"echo": echo})
        assert (ack.state, ack.data) == ("done", echo)


async def test_what_is_done_is_done_also_if_its_answer_cannot_be_told(app: App, board: Board) -> None:
    ack = await app.send("lock", "dev_control", {"odd": True})
    assert (ack.state, ack.code, ack.data) == ("done", 0, None)
    assert "cannot be sent" in ack.detail
    assert len(board.effects) == 1


async def test_a_push_reaches_the_apps(local: LocalHub, board: Board) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        await board.kill()
        await board.start()
        async with asyncio.timeout(GUARD):
            async for push in app.pushes():
                if isinstance(push, Push) and push.type == "event_report":
                    assert push.data == {"hello": "é"}
                    return


async def test_a_repeat_is_not_run_and_gets_the_first_answer(local: LocalHub, app: App, board: Board) -> None:
    command = await app.post("lock", "lock_control")
    await command.ended()
    heard = _acks(local)
    again = {"type": "lock_control", "seq_id": command.id}
    say(local, again)
    await board.kill()
    await board.start()
    say(local, again)
    await until(lambda: len(heard) >= 1)
    assert (heard[0]["seq_id"], heard[0]["code"], heard[0]["data"]) == (command.id, 0, {"open": True})
    assert board.effects == [f"lock {command.id}"]


async def test_a_repeat_while_the_first_runs_waits_for_it(local: LocalHub, app: App, board: Board) -> None:
    command = await app.post("lock", "lock_control", {"takes": 0.3})
    await until(lambda: bool(board.effects))
    heard = _acks(local)
    say(local, {"type": "lock_control", "seq_id": command.id, "data": {"takes": 0.3}})
    assert (await command.ended()).done
    assert len(heard) == 1
    assert board.effects == [f"lock {command.id}"]


async def test_the_same_id_for_something_else_is_not_run(local: LocalHub, app: App, board: Board) -> None:
    command = await app.post("lock", "lock_control")
    await command.ended()
    heard = _acks(local)
    say(local, {"type": "lock_control", "seq_id": command.id, "data": {"other": True}})
    await until(lambda: bool(heard))
    assert heard[0]["code"] == 2
    assert len(board.effects) == 1


@pytest.mark.parametrize("patience", [1.5])
async def test_a_power_cut_in_the_middle_is_not_repeated_and_ends_as_unknown(
    local: LocalHub, app: App, board: Board
) -> None:
    command = await app.post("lock", "lock_control", {"takes": 60})
    await until(lambda: bool(board.effects))
    await board.kill()
    await board.start()  # the hub repeats what was not answered
    ack = await command.ended()
    assert (ack.state, ack.code) == ("unknown", 4)
    await until(lambda: "its outcome is unknown" in board.log)
    assert board.effects == [f"lock {command.id}"]
    assert (await app.send("lock", "lock_control")).done


async def test_what_may_be_repeated_is_repeated_after_a_power_cut(app: App, board: Board) -> None:
    command = await app.post("lock", "dev_control", {"stuck": True})
    await until(lambda: len(board.effects) == 1)
    await board.kill()
    await board.start()
    await until(lambda: len(board.effects) == 2)
    assert board.effects == [f"lamp {command.id}"] * 2


async def test_what_was_interrupted_is_not_called_expired(local: LocalHub, app: App, board: Board) -> None:
    """It may have happened: an answer that says `expired` would settle it as not done."""
    exp = time.time_ns() // 1_000_000 + 1_500
    lamp = {"type": "dev_control", "seq_id": "1700000000000_1", "data": {"stuck": True}, "exp": exp}
    say(local, lamp)
    await until(lambda: len(board.effects) == 1)
    await board.kill()
    await until(lambda: time.time_ns() // 1_000_000 > exp)
    await board.start()
    heard = _acks(local)
    say(local, lamp)
    await until(lambda: "its outcome is unknown" in board.log)
    assert (await app.send("lock", "lock_control")).done
    assert [ack["seq_id"] for ack in heard if ack["seq_id"] == lamp["seq_id"]] == []
    assert [line for line in board.effects if line.startswith("lamp")] == ["lamp 1700000000000_1"]


async def test_memory_stays_small_and_what_fell_out_of_it_is_refused(
    local: LocalHub, app: App, board: Board
) -> None:
    first = await app.post("lock", "lock_control")
    assert (await first.ended()).done
    await asyncio.gather(*(app.send("lock", "lock_control") for _ in range(99)))
    for _ in range(4):
        await asyncio.gather(*(app.send("lock", "lock_control") for _ in range(50)))
    assert len(board.effects) == 300
    assert len(set(board.effects)) == 300
    assert board.flash.stat().st_size < 10_000
    assert not board.flash.with_name("flash.json.new").exists()
    say(local, {"type": "lock_control", "seq_id": first.id})
    await until(lambda: board.log.count("it may have run") == 1)
    await board.kill()
    await board.start()
    say(local, {"type": "lock_control", "seq_id": first.id})
    await until(lambda: board.log.count("it may have run") == 2)
    assert len(board.effects) == 300


@pytest.mark.parametrize("patience", [1.5])
async def test_no_power_cut_at_any_moment_repeats_an_effect_or_leaves_a_sender_in_the_dark(
    app: App, board: Board
) -> None:
    moments = random.Random(7)
    ends: list[Ack] = []
    for cut in range(3):
        sent = [
            await app.post("lock", "lock_control", {"takes": 0.005}, queue=True, expires=30)
            for _ in range(30)
        ]
        await until(partial(has_done_more_than, board, 30 * cut))
        await asyncio.sleep(moments.uniform(0, 0.1))
        await board.kill()
        await board.start()
        ends += await asyncio.gather(*(command.ended() for command in sent))
    assert len(board.effects) == len(set(board.effects))
    assert {ack.state for ack in ends} <= {"done", "unknown"}
    assert sum(ack.state == "done" for ack in ends) <= len(board.effects)


async def test_chunks_push_no_command_out_and_touch_no_flash(local: LocalHub, app: App, board: Board) -> None:
    command = await app.post("lock", "lock_control")
    await command.ended()
    before = board.flash.stat().st_mtime_ns
    for _ in range(3):
        acks = await asyncio.gather(*(app.send("lock", "media_download_chunk") for _ in range(50)))
        assert all(ack.data == "x" * 1000 for ack in acks)
    assert board.flash.stat().st_mtime_ns == before
    heard = _acks(local)
    say(local, {"type": "lock_control", "seq_id": command.id})
    await until(lambda: bool(heard))
    assert heard[0]["data"] == {"open": True}


async def test_an_expired_command_is_not_done(local: LocalHub, app: App, board: Board) -> None:
    heard = _acks(local)
    say(local, {"type": "lock_control", "seq_id": "1700000000000_1", "exp": 1_700_000_001_000})
    await until(lambda: bool(heard))
    assert (heard[0]["code"], heard[0]["state"]) == (4, "expired")
    assert board.effects == []


async def test_order_is_kept_when_the_wire_does_not_keep_it(local: LocalHub, board: Board) -> None:
    heard = _acks(local)
    for n, after in ((1, -1), (3, 2), (2, 1)):
        say(local, {"type": "lock_control", "seq_id": f"1700000000000_{n}", "order": {"after": after}})
    await until(lambda: len(heard) == 3)
    assert board.effects == [f"lock 1700000000000_{n}" for n in (1, 2, 3)]
    say(local, {"type": "lock_control", "seq_id": "1700000000000_0", "order": {"after": -1}})
    await until(lambda: len(heard) == 4)
    assert (heard[3]["code"], heard[3]["state"]) == (4, "superseded")
    assert len(board.effects) == 3


async def test_of_what_waits_only_the_latest_counts_if_so_ordered(local: LocalHub, board: Board) -> None:
    heard = _acks(local)
    say(local, {"type": "lock_control", "seq_id": "1700000000000_0", "data": {"takes": 0.2}})
    for n in (1, 2, 3):
        order = {"key": "level", "mode": "latest", "after": n - 1}
        say(local, {"type": "dev_control", "seq_id": f"1700000000000_{n}", "order": order})
    await until(lambda: len(heard) == 4)
    assert [ack["seq_id"][-1] for ack in heard if ack.get("state") == "superseded"] == ["1", "2"]
    assert [line[-1] for line in board.effects] == ["0", "3"]


async def test_an_unreadable_memory_refuses_everything_from_before(
    local: LocalHub, app: App, board: Board
) -> None:
    old = await app.post("lock", "lock_control")
    await old.ended()
    await board.kill()
    board.flash.write_text('{"marks": {')
    await board.start()
    say(local, {"type": "lock_control", "seq_id": old.id})
    await until(lambda: "it may have run" in board.log)
    assert (await app.send("lock", "lock_control")).done
    assert len(board.effects) == 2


async def test_a_restart_of_the_hub_is_survived(local: LocalHub, app: App, board: Board) -> None:
    assert (await app.send("lock", "lock_control")).done
    await local.stop()
    await local.start()
    await board.online()
    assert (await app.send("lock", "lock_control")).done
    assert len(board.effects) == 2


async def test_the_hub_serves_the_client(local: LocalHub) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as http:
        for name in ("duly_device.py", "duly_mqtt.py"):
            async with http.get(f"{local.url}/{name}") as answer:
                assert answer.content_type == "text/x-python"
                file = files("duly").joinpath(f"clients/micropython/{name}")
                assert await answer.read() == file.read_bytes()


def _acks(local: LocalHub) -> list[dict[str, Any]]:
    """What the device answers from now on, as the hub hears it."""
    heard: list[dict[str, Any]] = []
    receive = local.hub.gateway.receive

    def listen(session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        if frame.type == "ack":
            heard.append(json.loads(frames.encode(frame)))
        return receive(session, who, frame)

    local.hub.gateway.receive = listen  # type: ignore[method-assign]  # a spy on the wire
    return heard


async def test_a_device_at_work_says_so_and_gets_the_fields_beside_the_data(app: App, board: Board) -> None:
    heard: list[object] = []
    ack = await app.send("lock", "set_mode", fields={"mode": "night"}, progress=heard.append)
    assert (ack.state, ack.data, heard) == ("done", {"mode": "night"}, [50, 100])


async def test_the_same_id_with_another_field_is_refused_by_the_device_itself(
    local: LocalHub, app: App, board: Board
) -> None:
    command = await app.post("lock", "set_mode", fields={"mode": "night"})
    await command.ended()
    heard = _acks(local)
    say(local, {"type": "set_mode", "seq_id": command.id, "mode": "day"})
    await until(lambda: len(heard) >= 1)
    assert heard[0]["code"] == 2


async def test_a_late_command_runs_if_the_later_one_has_failed(
    local: LocalHub, app: App, board: Board
) -> None:
    first = await app.post("lock", "query")
    await first.ended()
    ms, _, n = first.id.partition("_")
    heard = _acks(local)
    order = {"key": "", "mode": "replay", "after": -1}
    say(local, {"type": "lock_control", "seq_id": f"{int(ms) - 1}_{n}", "order": order})
    await until(lambda: len(heard) >= 1)
    assert heard[0]["code"] == 0


def kept_pushes(board: Board) -> int:
    """How many pushes wait in its flash."""
    file = board.flash.with_name("flash.json.pushes")
    return len(json.loads(file.read_text())["waiting"]) if file.exists() else 0


async def test_a_push_is_kept_in_flash_until_the_hub_has_stored_it(local: LocalHub, board: Board) -> None:
    await until(lambda: kept_pushes(board) == 0)
    assert len(await reports(local)) == 1
    await local.stop()
    await board.kill(noticed=False)
    await board.power_on()  # it pushes at each start
    await until(lambda: kept_pushes(board) == 1)
    await board.kill(noticed=False)
    await local.start()
    await board.start()
    await until(lambda: kept_pushes(board) == 0)
    assert len(await reports(local)) == 3


async def test_a_push_that_cannot_be_kept_is_refused_and_stops_nothing_else(
    app: App, local: LocalHub, board: Board
) -> None:
    await until(lambda: kept_pushes(board) == 0)
    await board.kill()
    in_the_way = board.flash.with_name("flash.json.pushes.new")
    in_the_way.mkdir()
    await board.start()
    await until(lambda: "a push could not be kept" in board.log)
    assert (await app.send("lock", "lock_control")).done
    in_the_way.rmdir()  # it tries again
    async with asyncio.timeout(GUARD):
        while len(await reports(local)) < 2:
            await asyncio.sleep(0.01)


async def reports(local: LocalHub) -> list[bytes]:
    """What the hub has stored of the lock's pushes."""
    entries = await local.hub.ledger.entries("push/lock", 0, 100)
    return [entry.body for entry in entries if b"event_report" in entry.body]


# ── over MQTT ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def mqtt_hub(tmp_path: Path, patience: float) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", patience=patience, no_mqtt=False, mqtt_port=0)
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


async def progress_of(app: App) -> list[object]:
    """What a lock behind a broker tells on the way to an end. A broker may pass the end on first, since that
    is on another topic; the rest is lost then, and the next command tells it."""
    heard: list[object] = []
    for _ in range(10):
        heard.clear()
        assert (await app.send("lock", "set_mode", progress=heard.append)).done
        assert heard == [50, 100][: len(heard)]
        if len(heard) == 2:
            break
    return heard


async def test_over_mqtt_it_keeps_the_same_promises(mqtt_hub: LocalHub, tmp_path: Path) -> None:
    if shutil.which("micropython") is None:
        servers.missing("micropython")
    board = Board(mqtt_hub, tmp_path / "board", mqtt=True)
    await board.start()
    try:
        async with App(mqtt_hub.url, mqtt_hub.tokens["phone"]) as app:
            command = await app.post("lock", "lock_control", {"who": "Zoë"})
            ack = await command.ended()
            assert (ack.state, ack.data) == ("done", {"open": True})
            ack = await app.send("lock", "query")
            assert (ack.state, ack.code, ack.detail) == ("failed", 3, "the sensor is broken")
            assert (await app.send("lock", "system")).code == 7
            for echo in ("x" * 4_000, 0, False, None, [{"ü": 1.5}]):
                assert (await app.send("lock", "dev_control", {"echo": echo})).data == echo
            assert await progress_of(app) == [50, 100]
            await board.kill(noticed=False)
            kept = await app.post("lock", "lock_control", queue=True, expires=60)
            await board.start()
            assert (await kept.ended()).done
            await until(lambda: kept_pushes(board) == 0)
        assert [line for line in board.effects if line.startswith("lock")] == [
            f"lock {command.id}", f"lock {kept.id}",
        ]  # fmt: skip
        assert len(await reports(mqtt_hub)) == 2, "one for each start"
    finally:
        await board.kill(noticed=False)


UNSET_CLOCK = """
import duly_mqtt
set_clock = duly_mqtt.clock
def clock():
    try:
        open(sys.argv[1] + "/clock").close()
        return set_clock()
    except OSError:
        return 0
duly_mqtt.clock = clock
"""
"""The board's clock is set when there is a file `clock`."""


async def test_over_mqtt_nothing_is_begun_that_may_be_late(mqtt_hub: LocalHub, tmp_path: Path) -> None:
    """While its clock is not set, a command may be one that its broker has kept for hours."""
    if shutil.which("micropython") is None:
        servers.missing("micropython")
    board = Board(mqtt_hub, tmp_path / "board", mqtt=True)
    main = tmp_path / "board" / "main.py"
    head, _, rest = main.read_text().partition("from duly_device")
    main.write_text(f"{head}{UNSET_CLOCK}from duly_device{rest}")
    await board.start()
    try:
        async with App(mqtt_hub.url, mqtt_hub.tokens["phone"]) as app:
            ack = await app.send("lock", "lock_control")
            assert (ack.state, ack.code) == ("failed", 1)
            assert "clock" in ack.detail
            assert board.effects == []
            (tmp_path / "board" / "clock").touch()
            assert (await app.send("lock", "lock_control")).done
    finally:
        await board.kill(noticed=False)


async def test_a_broker_that_does_not_let_it_in_is_named(mqtt_hub: LocalHub, tmp_path: Path) -> None:
    if shutil.which("micropython") is None:
        servers.missing("micropython")
    board = Board(mqtt_hub, tmp_path / "board", mqtt=True)
    mqtt_hub.tokens["lock"] = "duly_wrong"
    await board.power_on()
    try:
        await until(lambda: "the broker does not let lock in" in board.log)
    finally:
        await board.kill(noticed=False)


async def test_over_mqtt_it_signs_all_that_a_hub_with_its_key_demands(
    mqtt_hub: LocalHub, tmp_path: Path
) -> None:
    if shutil.which("micropython") is None:
        servers.missing("micropython")
    await administer(mqtt_hub.hub.accounts, "remove", {"name": "lock"})
    made = await administer(mqtt_hub.hub.accounts, "add", {"role": "device", "name": "lock", "key": "shared"})
    await mqtt_hub.hub.accounts.grant("phone", "lock")
    mqtt_hub.tokens["lock"] = str(made["token"])
    board = Board(mqtt_hub, tmp_path / "board", mqtt=True, key=str(made["key"]))
    await board.start()
    try:
        async with App(mqtt_hub.url, mqtt_hub.tokens["phone"]) as app:
            for echo in ('x\n"é', 0, None, [{"ü": 1.5}]):
                assert (await app.send("lock", "dev_control", {"echo": echo})).data == echo
            assert await progress_of(app) == [50, 100]
            assert (await app.send("lock", "query")).detail == "the sensor is broken"
            await until(lambda: kept_pushes(board) == 0)
        await board.kill()
        assert [one.reason for one in await mqtt_hub.hub.ledger.refusals(10)] == []
    finally:
        await board.kill(noticed=False)
