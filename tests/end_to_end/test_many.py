"""Several hubs on one ledger, on the wire: wherever app and device are connected, it is as if there were one.

Every flow is also gone through without a single hint: slower, and not otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from duly.apps.gateway.remote_hubs import GatewayRemoteHubs
from duly.core.operations import OpenDelivery
from duly.core.steps import Event, NumberRefused, Unreachable
from duly.identity.account_directory import GRANTS, PRINCIPALS
from duly.identity.accounts import Principal, Role
from duly.wire.session import Session
from tests.end_to_end.many import LocalCluster, until, with_or_without_hints
from tests.end_to_end.raw import Json, Peer, curl
from tests.servers import Postgres
from tests.stopwatch import Stopwatch


@pytest.fixture(params=["hints", "no hints"])
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: Postgres
) -> AsyncIterator[LocalCluster]:
    async with with_or_without_hints(request, 3, tmp_path, postgres_server) as hubs:
        yield hubs


@pytest.fixture(params=["hints", "no hints"])
async def impatient(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: Postgres
) -> AsyncIterator[LocalCluster]:
    """A cluster where a device has two seconds to answer."""
    async with with_or_without_hints(request, 3, tmp_path, postgres_server, patience=2) as hubs:
        yield hubs


@pytest.fixture
async def hinted(tmp_path: Path, postgres_server: Postgres) -> AsyncIterator[LocalCluster]:
    it = LocalCluster(tmp_path, postgres_server)
    await it.start(3)
    yield it
    await it.stop()


LONG = "x" * 8_000


async def ends(peer: Peer, seq_id: str) -> Json:
    """How a command ended; what comes before of its progress is passed over."""
    told = ("ack", seq_id)
    return await peer.first(lambda f: (f["type"], f.get("seq_id")) == told and f["state"] != "delivered")


async def test_an_app_on_one_hub_commands_a_device_on_another(cluster: LocalCluster) -> None:
    async with cluster.join(1, "lock") as lock, cluster.join(0, "phone") as phone:
        for n in range(5):
            seq_id = await phone.command("lock", data={"n": n})
            said = await phone.hear_of(seq_id)
            assert said["code"] == 0
            command = await lock.hear()
            assert (command["seq_id"], command["from"], command["data"]) == (seq_id, "phone", {"n": n})
            await lock.ack(command, data={"open": n})
            end = await ends(phone, seq_id)
            assert (end["code"], end["state"], end["data"], end["from"]) == (0, "done", {"open": n}, "lock")
        assert await lock.hears_nothing()


async def test_what_is_rung_for_waits_for_no_look_into_the_ledger(
    tmp_path: Path, postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.cluster.remote.POLL_SECONDS", 3_600.0)
    it = LocalCluster(tmp_path, postgres_server)
    await it.start(3)
    async with it.join(1, "lock") as lock, it.join(0, "phone") as phone:
        await it.known("lock")
        obeying = asyncio.create_task(lock.obey_all())
        for _ in range(20):
            assert (await ends(phone, await phone.command("lock")))["state"] == "done"
        obeying.cancel()
    await it.stop()


@pytest.mark.parametrize("said", [40, {"step": 'é"\\\n'}, None, LONG], ids=["number", "text", "none", "long"])
async def test_an_app_hears_from_another_hub_how_far_its_device_is(
    hinted: LocalCluster, said: object
) -> None:
    """Progress is kept nowhere, so one that is lost is lost: the device says it until it is heard."""
    async with (
        hinted.join(1, "lock") as lock,
        hinted.join(0, "phone") as phone,
        hinted.join(2, "tablet") as tablet,
    ):
        await hinted.known("lock")
        seq_id = await phone.command("lock", timeout=600_000)
        command = await lock.hear()
        working = {"seq_id": seq_id, "to": "phone", "state": "delivered", "mine": 7}

        async def say() -> None:
            while True:
                await lock.say("ack", **working if said is None else working | {"progress": said})
                await asyncio.sleep(0.2)

        saying = asyncio.create_task(say())
        heard = await phone.first(lambda f: f["type"] == "ack")
        saying.cancel()
        fits = said != LONG  # more than a hint carries: only that the device is at work
        expected: Json = {"type": "ack", "seq_id": seq_id, "from": "lock", "state": "delivered"}
        if fits:
            expected |= {"mine": 7} if said is None else {"mine": 7, "progress": said}
        assert heard == expected
        await lock.ack(command)
        await phone.first(lambda f: f["type"] == "ack" and f["state"] == "done")
        assert await tablet.hears_nothing()


async def test_the_same_command_from_everywhere_at_once_runs_once_and_all_hear_the_end(
    cluster: LocalCluster,
) -> None:
    async with (
        cluster.join(0, "phone") as a, cluster.join(1, "phone") as b, cluster.join(2, "phone") as c,
        cluster.join(2, "phone") as d, cluster.join(1, "lock") as lock,
    ):  # fmt: skip
        seq_id = a.ids()
        peers = [a, b, c, d]
        await asyncio.gather(*(peer.command("lock", seq_id=seq_id, data=1) for peer in peers))
        codes = [(await peer.hear_of(seq_id))["code"] for peer in peers]
        assert sorted(codes) == [0, 5, 5, 5]
        command = await lock.hear()
        await asyncio.sleep(0.2)
        await lock.ack(command, data="opened")
        for peer in peers:
            assert (await ends(peer, seq_id))["data"] == "opened"
        assert await lock.hears_nothing()


async def test_a_repeat_at_a_third_hub_hears_how_far_it_is_and_later_the_end(cluster: LocalCluster) -> None:
    async with cluster.join(1, "lock") as lock, cluster.join(0, "phone") as phone:
        seq_id = await phone.command("lock", data=1)
        command = await lock.hear()
        async with cluster.join(2, "phone") as again:
            await again.command("lock", seq_id=seq_id, data=1)
            said = await again.hear_of(seq_id)
            assert (said["code"], said["state"]) == (5, "sent")
            await again.command("lock", seq_id=seq_id, data=2)
            said = await again.hear_of(seq_id)
            assert (said["code"], said["error"]) == (2, "id_conflict")
            await lock.ack(command)
            assert (await ends(again, seq_id))["state"] == "done"
        async with cluster.join(2, "phone") as later:
            await later.command("lock", seq_id=seq_id, data=1)
            assert (await later.hear_of(seq_id))["state"] == "done"
            assert (await ends(later, seq_id))["code"] == 0


async def test_a_device_that_is_nowhere_is_offline_everywhere(cluster: LocalCluster) -> None:
    async with cluster.join(1, "lock") as lock, cluster.join(0, "phone") as phone:
        await ends_as_offline_not(phone, lock)
    async with cluster.join(0, "phone") as phone:
        await until(lambda: not any(hub.gateway.online("lock") for hub in cluster.hubs))
        seq_id = await phone.command("lock")
        said = await phone.hear_of(seq_id)
        assert (said["code"], said["error"]) == (1, "offline")
        async with cluster.join(2, "lock") as lock:  # the id is not burned
            await phone.command("lock", seq_id=seq_id)
            assert (await phone.hear_of(seq_id))["code"] == 0
            await lock.obey()
            assert (await ends(phone, seq_id))["state"] == "done"


async def ends_as_offline_not(phone: Peer, lock: Peer) -> None:
    seq_id = await phone.command("lock")
    await lock.obey()
    assert (await ends(phone, seq_id))["state"] == "done"


async def test_what_waits_for_an_absent_device_finds_it_wherever_it_comes(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone, cluster.join(2, "tablet") as tablet:
        exp = int(time.time() * 1000) + 60_000
        first = [await phone.command("lock", data=n, queue=True, exp=exp) for n in range(3)]
        for seq_id in first:
            assert (await phone.hear_of(seq_id))["code"] == 0
        other = await tablet.command("lock", data="t", queue=True, exp=exp)
        assert (await tablet.hear_of(other))["code"] == 0
        async with cluster.join(1, "lock") as lock:
            got = [await lock.obey() for _ in range(4)]
        assert [command["seq_id"] for command in got if command["from"] == "phone"] == first
        for seq_id in first:
            assert (await ends(phone, seq_id))["state"] == "done"
        assert (await ends(tablet, other))["state"] == "done"


async def test_of_what_waits_only_the_latest_counts_where_it_is_so_wanted(cluster: LocalCluster) -> None:
    order = {"key": "power", "mode": "latest"}
    async with cluster.join(0, "phone") as phone:
        exp = int(time.time() * 1000) + 60_000
        ids = [await phone.command("lamp", data=n, queue=True, exp=exp, order=order) for n in range(4)]
        for seq_id in ids:
            assert (await phone.hear_of(seq_id))["code"] == 0
        async with cluster.join(1, "lamp") as lamp:
            assert (await lamp.obey())["data"] == 3
            states = [(await ends(phone, seq_id))["state"] for seq_id in ids]
            assert states == ["superseded"] * 3 + ["done"]
            assert await lamp.hears_nothing()


async def test_what_waits_in_vain_expires_at_whichever_hub(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone:
        seq_id = await phone.command("lock", queue=True, exp=int(time.time() * 1000) + 300)
        assert (await phone.hear_of(seq_id))["code"] == 0
        assert (await ends(phone, seq_id))["state"] == "expired"


async def test_a_device_that_moves_takes_its_commands_along(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone, cluster.join(1, "lock") as before:
        seq_id = await phone.command("lock", data=7)
        await before.hear()  # and says nothing
        async with cluster.join(2, "lock") as after:
            assert (await after.obey(data="here"))["seq_id"] == seq_id
            assert (await ends(phone, seq_id))["data"] == "here"
            await before.closed()
            seq_id = await phone.command("lock", data=8)
            assert (await after.obey())["seq_id"] == seq_id
            assert (await ends(phone, seq_id))["state"] == "done"


async def test_a_command_that_follows_its_device_is_sent_to_it_once(
    hinted: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub looks once a second for what others have left for its devices. Here it does while it still reads,
    from a slow ledger, what it has to send to a device that has just connected."""
    gateway, ledger = hinted.hubs[2].gateway, hinted.hubs[2].ledger
    remote, read_marks = gateway.remote, ledger.marks
    assert isinstance(remote, GatewayRemoteHubs)

    async def slowly(*args: str) -> dict[str, tuple[int, int]]:
        stored = asyncio.Event()
        await remote._deliveries.take_over(["lock"])
        await gateway.engine.put(NumberRefused("nobody", 0, 0), stored.set)
        await stored.wait()
        return await read_marks(*args)

    monkeypatch.setattr(ledger, "marks", slowly)  # the first that is read for a device that has connected
    async with hinted.join(0, "phone") as phone, hinted.join(1, "lock") as before:
        seq_id = await phone.command("lock", data=7)
        await before.hear()
        async with hinted.join(2, "lock") as after:
            assert (await after.obey())["seq_id"] == seq_id
            assert (await ends(phone, seq_id))["state"] == "done"
            seq_id = await phone.command("lock", data=8)
            assert (await after.obey())["seq_id"] == seq_id


async def test_a_hub_that_learns_late_that_a_device_has_moved_takes_nothing_back(
    hinted: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = hinted.hubs[1]
    ledger, find = former.ledger, former.ledger.strays
    assert former.notifier is not None
    former.notifier._listeners.clear()
    looks, moved = asyncio.Event(), asyncio.Event()

    async def late(*args: str, **more: Any) -> list[OpenDelivery]:
        if "lock" in more["here"] and not moved.is_set():
            looks.set()
            await moved.wait()
        return await find(*args, **more)

    async with hinted.join(0, "phone") as phone, hinted.join(1, "lock") as before:
        seq_id = await phone.command("lock", data=7)
        await before.hear()
        await before.say("ack", seq_id=seq_id, to="phone", state="delivered")  # so that it is not sent again
        monkeypatch.setattr(ledger, "strays", late)
        await looks.wait()  # it has read that the device is here
        async with hinted.join(2, "lock") as after:
            command = await after.hear()
            assert command["seq_id"] == seq_id
            moved.set()
            await before.closed()
            assert [frame["type"] for frame in before.heard] == ["welcome", "lock_control"]
            await after.ack(command)
            assert (await ends(phone, seq_id))["state"] == "done"
            seq_id = await phone.command("lock", data=8)
            assert (await after.obey())["seq_id"] == seq_id


async def test_a_device_may_answer_at_another_hub_than_it_was_asked_at(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone:
        async with cluster.join(1, "lock") as before:
            seq_id = await phone.command("lock")
            command = await before.hear()
        async with cluster.join(2, "lock") as after:
            await after.ack(command, data="done meanwhile")
            assert (await ends(phone, seq_id))["data"] == "done meanwhile"


async def test_silence_is_unknown_and_a_late_answer_settles_it_for_an_app_elsewhere(
    impatient: LocalCluster,
) -> None:
    async with impatient.join(0, "phone") as phone, impatient.join(1, "lock") as lock:
        seq_id = await phone.command("lock")
        command = await lock.hear()
        end = await ends(phone, seq_id)
        assert (end["code"], end["state"]) == (4, "unknown")
        await lock.ack(command, data="late")
        end = await ends(phone, seq_id)
        assert (end["state"], end["data"]) == ("done", "late")


@pytest.mark.parametrize("mode", ["latest", "replay"])
async def test_all_24_orders_over_three_hubs_end_in_the_right_state(
    tmp_path: Path, postgres_server: Postgres, mode: str
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server, window=2)
    await cluster.start(3)
    order_by = {"key": "power", "mode": mode}
    try:
        async with (
            cluster.join(1, "lamp") as lamp, cluster.join(0, "phone") as a, cluster.join(1, "phone") as b,
            cluster.join(2, "phone") as c,
        ):  # fmt: skip
            glowing = asyncio.create_task(lamp.obey_all())
            for turn, order in enumerate(itertools.permutations(range(4))):
                ids = [a.ids() for _ in range(4)]
                for place, n in enumerate(order):
                    peer = (a, b, c)[(turn + place) % 3]
                    await peer.command("lamp", "dev_control", seq_id=ids[n], data=n, order=order_by)
                states = [(await ends(a, seq_id))["state"] for seq_id in ids]
                shown = [f["data"] for f in lamp.heard if f.get("seq_id") in ids]
                assert shown == sorted(shown), f"{order} was shown as {shown}"
                assert shown[-1] == 3, f"{order} ended as {shown}"
                if mode == "replay":
                    assert shown == [0, 1, 2, 3], order
                assert states == ["done" if n in shown else "superseded" for n in range(4)], order
            glowing.cancel()
    finally:
        await cluster.stop()


async def test_numbers_that_went_to_devices_of_another_hub_are_no_gap(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server, window=4)
    await cluster.start(3)
    try:
        async with (
            cluster.join(1, "lamp") as lamp, cluster.join(2, "lock") as lock,
            cluster.join(0, "phone") as phone,
        ):  # fmt: skip
            await cluster.known("lamp")
            await cluster.known("lock")
            took = Stopwatch()
            for n in range(20):
                await phone.command("lamp" if n % 2 else "lock", "dev_control", data=n)
            assert [(await lamp.obey())["data"] for _ in range(10)] == list(range(1, 20, 2))
            assert [(await lock.obey())["data"] for _ in range(10)] == list(range(0, 20, 2))
            assert took.seconds < 3
    finally:
        await cluster.stop()


async def test_the_high_water_mark_goes_with_the_device(cluster: LocalCluster) -> None:
    order = {"key": "power", "mode": "latest"}
    async with cluster.join(0, "phone") as phone:
        ids = [phone.ids() for _ in range(6)]

        async def send(n: int) -> None:
            await phone.command("lamp", "dev_control", seq_id=ids[n], data=n, order=order)

        async with cluster.join(1, "lamp") as lamp:
            await send(0)
            await lamp.obey()
            await send(3)
            await lamp.obey()
            await ends(phone, ids[3])
        async with cluster.join(2, "lamp") as lamp:
            await send(1)
            assert (await ends(phone, ids[1]))["state"] == "superseded"
            await send(4)
            assert (await lamp.obey())["data"] == 4
            await ends(phone, ids[4])
        async with cluster.join(1, "lamp") as lamp:
            await send(2)
            assert (await ends(phone, ids[2]))["state"] == "superseded"
            await send(5)
            assert (await lamp.obey())["data"] == 5


async def test_what_devices_tell_is_heard_at_every_hub_once_and_in_order(cluster: LocalCluster) -> None:
    async with (
        cluster.join(0, "phone") as phone,
        cluster.join(2, "tablet") as tablet,
        cluster.join(1, "lock") as lock,
    ):
        for n in range(30):
            await lock.say("event_report", data=n)
        for app in (phone, tablet):
            got = [await app.first(lambda f: f["type"] == "event_report") for _ in range(30)]
            assert [frame["data"] for frame in got] == list(range(30))
            cursors = [frame["cursor"] for frame in got]
            assert cursors == list(range(cursors[0], cursors[0] + 30))


async def test_apps_everywhere_hear_when_a_device_comes_and_goes_once(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone:
        phone.presence = True
        async with cluster.join(1, "lock"):
            assert (await phone.hear())["data"] == {"online": True}
            async with cluster.join(2, "lock"):  # it moves: that is neither
                await until(lambda: not cluster.hubs[1].gateway.sessions.devices)
        assert (await phone.hear())["data"] == {"online": False}
        assert await phone.hears_nothing()


async def test_http_waits_for_a_device_on_another_hub(cluster: LocalCluster) -> None:
    async with cluster.join(1, "lock") as lock:
        obeying = asyncio.create_task(lock.obey_all())
        answer = await curl(
            f"{cluster.hubs[2].url}/v1/messages?wait=10",
            cluster.tokens["phone"],
            body={"type": "lock_control", "seq_id": lock.ids(), "to": "lock", "data": {}},
        )
        obeying.cancel()
        assert (answer.status, answer.json["ack"]["state"]) == (200, "done")


async def test_accounts_made_at_one_hub_are_known_at_the_others(cluster: LocalCluster) -> None:
    async with cluster.join(1, "phone") as phone:
        assert phone.heard
        made = await cluster.hubs[0].admin.run(
            Principal("root", Role.ADMIN), "add", {"role": "app", "name": "watch"}
        )
        assert isinstance(made, dict)
        await until(lambda: cluster.hubs[1].accounts.authenticate(made["token"]) is not None)
        await cluster.hubs[0].admin.run(Principal("root", Role.ADMIN), "remove", {"name": "phone"})
        await phone.closed()


async def test_what_was_revoked_at_another_hub_ends_although_accounts_were_read_meanwhile(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    """A hub compared versions only around its own look: one that read the accounts first hid the change."""
    cluster = LocalCluster(tmp_path, postgres_server)
    try:
        await cluster.start(2, hints=False)
        here, there = cluster.hubs
        async with cluster.join(1, "phone") as phone, cluster.join(1, "lock") as lock:
            sent = await phone.command("lock", timeout=30_000)
            assert (await lock.hear())["seq_id"] == sent
            await here.accounts.revoke("phone", "lock")
            await there.accounts.refresh()
            end = await ends(phone, sent)
            assert end["state"] == "unknown"
            assert "phone may no longer command lock" in end["detail"]
    finally:
        await cluster.stop()


async def test_a_hub_that_stops_hands_over_at_once(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone:
        async with cluster.join(1, "lock") as before:
            seq_id = await phone.command("lock")
            await before.hear()
            await cluster.hubs.pop(1).stop()
        async with cluster.join(1, "lock") as after:
            await after.obey(data="after all")
            assert (await ends(phone, seq_id))["data"] == "after all"


async def test_a_device_that_comes_back_before_its_end_was_noted_stays_reachable_from_other_hubs(
    hinted: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hinted.hubs[1].gateway
    put, disconnected = here.engine.put, here.disconnected
    busy, room, noted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def put_late(event: Event, committed: Callable[[], None] | None = None) -> None:
        """The engine has no room for a while."""
        if isinstance(event, Unreachable):
            busy.set()
            await room.wait()
        await put(event, committed)

    async def disconnect(session: Session, who: Principal) -> None:
        await disconnected(session, who)
        noted.set()

    monkeypatch.setattr(here.engine, "put", put_late)
    monkeypatch.setattr(here, "disconnected", disconnect)
    async with hinted.join(1, "lock"):
        await hinted.known("lock")
    await busy.wait()
    async with hinted.join(1, "lock") as lock, hinted.join(0, "phone") as phone:
        room.set()
        await noted.wait()
        await hinted.hubs[0].gateway.remote.refresh()
        obeying = asyncio.create_task(lock.obey_all())
        assert (await ends(phone, await phone.command("lock")))["state"] == "done"
        obeying.cancel()


async def test_accounts_are_read_again_only_when_they_have_changed(
    hinted: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were read every five seconds: a second of processor time at a hundred thousand accounts.
    Later they all were when one had changed."""
    here, there, _ = hinted.hubs
    read: list[str] = []
    bucket = there.ledger.bucket

    async def counted(name: str) -> dict[str, bytes]:
        read.append(name)
        return await bucket(name)

    await there.revocation.check()
    monkeypatch.setattr(there.ledger, "bucket", counted)
    await there.maintenance.refresh()
    await there.revocation.check()
    assert PRINCIPALS not in read
    await here.people.register("ann", "correct horse", "127.0.0.1")
    listed = await curl(f"{there.url}/v1/admin/list", hinted.tokens["root"], body={})
    assert "ann" in [one["name"] for one in listed.json["accounts"]], "a list shows what another hub made"
    assert PRINCIPALS in read
    read.clear()
    await here.accounts.revoke("phone", "lock")
    await until(lambda: "lock" not in there.accounts.granted("phone"))
    assert not {PRINCIPALS, GRANTS} & set(read)
