"""An app and a device through a real hub, each with its own durable memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path

import aiohttp
import pytest

from duly.clients.app import App, Gap, Push
from duly.clients.device import Command, Device
from duly.core.lifecycle import State
from duly.core.outbox import Outbox
from duly.core.units import SECOND
from duly.errors import DeviceError, NotAuthenticated, Refused, Stopped, TooLarge
from duly.wire.frames import Frame
from tests.guard import GUARD
from tests.local_hub import LocalHub


def lock(local: LocalHub, effects: list[str], store: Path | None = None) -> Device:
    device = Device(local.url, local.tokens["lock"], store=str(store) if store else None)

    @device.on("lock_control")
    async def lock_control(command: Command) -> dict[str, bool]:
        effects.append(command.id)
        return {"open": command.data["open"]}

    @device.on("query")
    async def query(command: Command) -> None:
        raise DeviceError(3, "the sensor is broken")

    return device


async def test_a_command_is_done_and_its_answer_comes_back(local: LocalHub) -> None:
    effects: list[str] = []
    async with lock(local, effects), App(local.url, local.tokens["phone"]) as app:
        ack = await app.send("lock", "lock_control", {"open": True})
        assert (ack.done, ack.code, ack.data) == (True, 0, {"open": True})
        assert len(effects) == 1


@pytest.mark.parametrize("number", [b"1e400", b"9" * 5_000])
async def test_a_number_beyond_all_floats_stops_no_app_and_no_device(local: LocalHub, number: bytes) -> None:
    device = Device(local.url, local.tokens["lock"])
    got: asyncio.Queue[object] = asyncio.Queue()

    @device.on("lock_control")
    async def lock_control(command: Command) -> bool:
        await got.put(command.data)
        return True

    async with device, App(local.url, local.tokens["phone"]) as app, aiohttp.ClientSession() as http:
        for who, frame in (
            ("phone", b'{"type":"lock_control","seq_id":"%d_0","to":"lock","data":%b}'),
            ("lock", b'{"type":"event_report","seq_id":"%d_0","data":%b}'),
        ):
            body = frame % (time.time_ns() // 1_000_000, number)
            headers = {"Authorization": f"Bearer {local.tokens[who]}"}
            async with http.post(f"{local.url}/v1/messages?wait=5", data=body, headers=headers) as answer:
                assert answer.status in (200, 202), await answer.text()
        assert await got.get() == inf
        async for push in app.pushes():
            if isinstance(push, Push) and push.type == "event_report":
                assert push.data == inf
                break
        assert (await app.send("lock", "lock_control", 7)).done


async def test_a_devices_failure_has_its_code_and_reason(local: LocalHub) -> None:
    async with lock(local, []), App(local.url, local.tokens["phone"]) as app:
        ack = await app.send("lock", "query")
        assert (ack.state, ack.code, ack.detail) == ("failed", 3, "the sensor is broken")
        ack = await app.send("lock", "system")
        assert (ack.state, ack.code) == ("failed", 7)


async def test_a_handlers_bug_is_told_to_the_app_and_is_in_the_devices_log(
    local: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(local.url, local.tokens["lock"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> None:
        raise ZeroDivisionError("no motor")

    async with device, App(local.url, local.tokens["phone"]) as app:
        ack = await app.send("lock", "lock_control", {"open": True})
    assert (ack.state, ack.code, ack.detail) == ("failed", 3, "ZeroDivisionError('no motor')")
    assert "the handler of lock_control has failed" in caplog.text


@pytest.mark.parametrize(
    ("returned", "why"),
    [({1, object()}, "object"), ("x" * 262_100, "the limit is"), ("\ud800", "utf-8")],
    ids=["no JSON", "too large", "no text"],
)
async def test_what_is_done_is_done_also_if_its_answer_cannot_be_told(
    local: LocalHub, returned: object, why: str
) -> None:
    device = Device(local.url, local.tokens["lock"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> object:
        return returned

    async with device, App(local.url, local.tokens["phone"]) as app:
        ack = await app.send("lock", "lock_control", {"open": True})
    assert (ack.state, ack.code, ack.data) == ("done", 0, None)
    assert why in ack.detail


async def test_an_offline_device_is_refused_and_the_same_id_may_be_tried_again(local: LocalHub) -> None:
    effects: list[str] = []
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True})
        with pytest.raises(Refused, match="offline") as refused:
            await command.ended()
        assert refused.value.code == 1
    async with lock(local, effects), App(local.url, local.tokens["phone"]) as app:
        ack = await app.send("lock", "lock_control", {"open": True}, id=command.id)
        assert ack.done
    assert effects == [command.id]


@pytest.mark.parametrize("settings", [{"patience": 0.3}])
async def test_what_was_called_unknown_is_asked_for_again_at_the_next_connection(local: LocalHub) -> None:
    device = Device(local.url, local.tokens["lock"])
    go_on = asyncio.Event()

    @device.on("lock_control")
    async def lock_control(command: Command) -> str:
        await go_on.wait()
        return "at last"

    async with device, App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True})
        assert (await command.ended()).state == "unknown"
        local.hub.gateway.dismiss("phone")  # hang up, so that the late word reaches nobody
        go_on.set()
        async with asyncio.timeout(GUARD):
            assert (await command.settled()).data == "at last"
        assert not app._unsettled


async def test_what_was_done_while_the_app_heard_nothing_is_asked_for_at_the_next_connection(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app gave up before the hub's first word reached it: it does not send the command again, which
    might run it long after its time, and learns its outcome all the same."""
    monkeypatch.setattr("duly.clients.app.PATIENCE", SECOND // 10)
    effects: list[str] = []
    async with lock(local, effects), App(local.url, local.tokens["phone"]) as app:
        with monkeypatch.context() as dark:
            dark.setattr(app._link, "_heard", lambda frame: None)
            command = await app.post("lock", "lock_control", {"open": True})
            assert (await command.ended()).state == "unknown"
            await local.ended(command.id)
        local.hub.gateway.dismiss("phone")
        async with asyncio.timeout(GUARD):
            assert (await command.settled()).data == {"open": True}
        assert not app._unsettled
    assert effects == [command.id]


class DeafApp(App):
    """An app that hears nothing while it is deaf."""

    deaf = True

    def _heard(self, frame: Frame) -> None:
        if not self.deaf:
            super()._heard(frame)


async def test_a_command_of_an_earlier_process_is_asked_for_too(
    local: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects: list[str] = []
    store = str(tmp_path / "phone.db")
    async with lock(local, effects):
        async with DeafApp(local.url, local.tokens["phone"], store=store) as app:
            command = await app.post("lock", "lock_control", {"open": True})
            await local.ended(command.id)
        monkeypatch.setattr("duly.clients.app.PATIENCE", SECOND // 10)
        key = command.message.key
        async with DeafApp(local.url, local.tokens["phone"], store=store) as app:
            await _reaches(app, key, State.UNKNOWN)
            app.deaf = False
            local.hub.gateway.dismiss("phone")
            await _reaches(app, key, State.DONE)
            async with asyncio.timeout(GUARD):
                while app._unsettled:  # it is told when the commit is through
                    await asyncio.sleep(0.01)
    assert effects == [command.id]


async def _reaches(app: App, key: bytes, state: State) -> None:
    """Until a command is in this state, by the app's own ledger."""
    async with asyncio.timeout(GUARD):
        while (found := await app._ledger.find(key)) is None or found.state is not state:
            await asyncio.sleep(0.01)


async def test_asking_for_a_command_that_never_arrived_does_not_run_it(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.clients.app.PATIENCE", SECOND // 10)
    effects: list[str] = []
    told: list[Frame] = []
    async with lock(local, effects), App(local.url, local.tokens["phone"]) as app:
        with monkeypatch.context() as dark:
            dark.setattr(app._link, "send", lambda frame: None)
            command = await app.post("lock", "lock_control", {"open": True})
            assert (await command.ended()).state == "unknown"
        answered = asyncio.Event()

        def hear(frame: Frame) -> None:
            if frame.seq_id == command.id:
                told.append(frame)
                answered.set()
            app._heard(frame)

        monkeypatch.setattr(app._link, "_heard", hear)
        local.hub.gateway.dismiss("phone")
        async with asyncio.timeout(GUARD):
            await answered.wait()
        assert [(said.type, said.code, said.error) for said in told] == [("server_ack", 2, "not_found")]
        assert (await app.send("lock", "lock_control", {"open": False}, timeout=GUARD)).done
        assert (await command.ended()).state == "unknown"
    assert command.id not in effects


@pytest.mark.parametrize("settings", [{"patience": 0.05}])
async def test_only_so_many_doubts_are_kept(local: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.clients.app.UNSETTLED", 5)
    device = Device(local.url, local.tokens["lock"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> None:
        await asyncio.Event().wait()

    async with device, App(local.url, local.tokens["phone"]) as app:
        for _ in range(8):
            assert (await app.send("lock", "lock_control", order=False)).state == "unknown"
        assert len(app._unsettled) == 5
        assert not app._commands
        last = next(reversed(app._unsettled.values()))
        assert last is not None
        waiting = asyncio.create_task(last.settled())
    with pytest.raises(Stopped):
        await waiting


async def test_a_queued_command_waits_for_its_device(local: LocalHub) -> None:
    effects: list[str] = []
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True}, queue=True, expires=60)
        await command.accepted()
        async with lock(local, effects):
            assert (await command.ended()).done
    assert effects == [command.id]


async def test_without_a_grant_nothing_is_sent(local: LocalHub) -> None:
    effects: list[str] = []
    async with lock(local, effects), App(local.url, local.tokens["tablet"]) as app:
        with pytest.raises(Refused, match="may not") as refused:
            await app.send("lock", "lock_control", {"open": True})
        assert refused.value.code == 3
    assert effects == []
    assert [r.word for r in await local.hub.ledger.refusals()] == ["not_allowed"]


async def test_a_wrong_token_is_refused(local: LocalHub) -> None:
    with pytest.raises(NotAuthenticated, match="not known"):
        async with App(local.url, "duly_nonsense"):
            pass


async def test_commands_survive_a_restart_of_the_hub(local: LocalHub, tmp_path: Path) -> None:
    effects: list[str] = []
    async with lock(local, effects, tmp_path / "lock.db"), App(local.url, local.tokens["phone"]) as app:
        assert (await app.send("lock", "lock_control", {"open": True})).done
        await local.stop()
        command = await app.post("lock", "lock_control", {"open": False}, queue=True)
        await local.start()
        assert (await asyncio.wait_for(command.ended(), GUARD)).done
    assert len(effects) == 2


async def test_a_device_that_forgets_nothing_does_nothing_twice(local: LocalHub, tmp_path: Path) -> None:
    effects: list[str] = []
    memory = tmp_path / "lock.db"
    async with App(local.url, local.tokens["phone"]) as app:
        async with lock(local, effects, memory):
            command = await app.post("lock", "lock_control", {"open": True})
            await command.ended()
        async with lock(local, effects, memory):
            ack = await app.send("lock", "lock_control", {"open": True}, id=command.id)
            assert ack.done
    assert len(effects) == 1


async def heard(pushes: AsyncIterator[Push | Gap], count: int) -> list[object]:
    """The next events, whatever the hub says of its devices in between."""
    found: list[object] = []
    async with asyncio.timeout(GUARD):
        async for push in pushes:
            if isinstance(push, Gap) or push.type == "event_report":
                found.append(push if isinstance(push, Gap) else push.data["n"])
            if len(found) == count:
                break
    return found


async def test_pushes_reach_the_apps_once_and_in_order_also_after_being_away(local: LocalHub) -> None:
    async with lock(local, []) as device, App(local.url, local.tokens["phone"]) as app:
        for n in range(3):
            device.push("event_report", {"n": n})
        assert await heard(app.pushes(), 3) == [0, 1, 2]
        await local.stop()
        await local.start()
        while not device._link.connected:
            await asyncio.sleep(0.01)
        device.push("event_report", {"n": 3})
        assert await heard(app.pushes(), 1) == [3]


async def test_an_app_with_a_memory_hears_what_it_missed_and_is_told_what_is_gone(
    local: LocalHub, tmp_path: Path
) -> None:
    async def listen(count: int) -> list[object]:
        async with App(local.url, local.tokens["phone"], store=str(tmp_path / "app.db")) as app:
            return await heard(app.pushes(), count)

    async with lock(local, []) as device:
        first = asyncio.create_task(listen(1))
        while "phone" not in local.hub.gateway.sessions.apps:
            await asyncio.sleep(0.01)
        device.push("event_report", {"n": 0})
        assert await first == [0]
        while "phone" in local.hub.gateway.sessions.apps:
            await asyncio.sleep(0.01)
        before = (await local.hub.ledger.extent("push/lock")).last
        for n in range(1, 4):
            device.push("event_report", {"n": n})
        while (await local.hub.ledger.extent("push/lock")).last < before + 3:
            await asyncio.sleep(0.01)
        await local.hub.ledger.trim("push/lock", before + 1)
        assert await listen(3) == [Gap("lock", before, before + 2), 2, 3]


async def test_a_queued_command_is_waited_for_as_long_as_it_may_take(local: LocalHub) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True}, queue=True, expires=3600)
        await command.accepted()
        outbox = app._engine._machine
        assert isinstance(outbox, Outbox)
        under_way = outbox.transmissions.get(command.message.key)
        assert under_way is not None
        assert under_way.give_up > app._ledger.clock.now() + 3600 * SECOND


async def test_a_command_too_large_for_a_frame_is_refused_before_it_is_sent(local: LocalHub) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        with pytest.raises(TooLarge, match="send it in parts"):
            await app.post("lock", "lock_control", "x" * 300_000)


async def test_an_apps_ids_go_on_after_a_restart(local: LocalHub, tmp_path: Path) -> None:
    numbers = []
    async with lock(local, []):
        for _ in range(2):
            async with App(local.url, local.tokens["phone"], store=str(tmp_path / "app.db")) as app:
                for _ in range(2):
                    command = await app.post("lock", "lock_control", {"open": True})
                    await command.ended()
                    numbers.append(int(command.id.split("_")[1]))
    assert numbers == [0, 1, 2, 3]
