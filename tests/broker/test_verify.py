"""Generated rules on real brokers, and rules with holes: the check passes the first and names the second."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from duly.broker import acl_dialects
from duly.broker.acl_dialects import NODES, BrokerUser, RulesRequest, device, node
from duly.broker.embedded import EmbeddedBroker
from duly.broker.verify import AclFinding, BrokerLogin, check
from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.acl import AccountClass
from duly.errors import ConnectionLost, ConnectionRefused, Malformed, NotAllowed
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from tests import servers

USERS = [BrokerLogin("A", "pa"), BrokerLogin("B", "pb")]
BOSS = BrokerLogin("boss", "pz")
WANTED = RulesRequest(users=["A", "B"], admins=["boss"])
DEVICES = [BrokerLogin("lamp", "pc", AccountClass.DEVICE), BrokerLogin("lock", "pd", AccountClass.DEVICE)]
MIXED = RulesRequest(users=["A", "B"], devices=["lamp", "lock"], hub="hub", admins=["boss"])
"""Nodes, and a hub with its devices, on one broker."""


def users_of(wanted: RulesRequest) -> list[BrokerLogin]:
    return [*USERS, *(DEVICES if wanted.hub else [])]


def observer(port: int) -> BrokerAddress:
    return BrokerAddress.parse(f"mqtt://{BOSS.name}:{BOSS.password}@127.0.0.1:{port}")


def wrong(found: list[AclFinding]) -> list[tuple[str, str, str, str]]:
    return [(f.verdict, f.user, f.act, f.topic) for f in found if not f.ok]


async def nodes_work(port: int) -> None:
    """Under these rules two nodes can do everything a node does."""
    b = Node(f"mqtt://B:pb@127.0.0.1:{port}")

    @b.task("turn_on")
    async def turn_on(task: Task) -> dict[str, bool]:
        task.progress("half")
        return {"on": True}

    async with b, Node(f"mqtt://A:pa@127.0.0.1:{port}") as a:
        assert await a.call("B", "turn_on") == {"on": True}
        status = await a.status("B")
        assert status is not None
        assert status.online


# ── Mosquitto ────────────────────────────────────────────────────────────────────────────────────


StartWith = Callable[[str], int]
"""Starts Mosquitto with these rules and returns its port."""


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[servers.Mosquitto]:
    server = servers.Mosquitto(
        "allow_anonymous false", "password_file {folder}/passwords", "acl_file {folder}/acl"
    )
    try:
        passwords = server.folder / "passwords"
        passwords.write_text("".join(f"{who.name}:{who.password}\n" for who in (*USERS, *DEVICES, BOSS)))
        subprocess.run(["mosquitto_passwd", "-U", passwords], check=True)
        yield server
    finally:
        server.remove()


@pytest.fixture
def mosquitto_with(mosquitto: servers.Mosquitto) -> Iterator[StartWith]:
    def start(rules: str) -> int:
        (mosquitto.folder / "acl").write_text(rules)
        mosquitto.start()
        return mosquitto.port

    yield start
    mosquitto.stop()


async def test_mosquitto_enforces_the_generated_rules(mosquitto_with: StartWith) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(WANTED))
    await nodes_work(port)
    found = await check(observer(port), USERS, "nodes")
    assert wrong(found) == []
    assert {f.act for f in found} == {"connect", "publish", "will", "subscribe", "take over"}
    assert len(found) > 80


async def test_mosquitto_keeps_devices_and_nodes_apart(mosquitto_with: StartWith) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(MIXED))
    await nodes_work(port)
    found = await check(observer(port), users_of(MIXED), "nodes")
    assert wrong(found) == []
    tried = {(one.user, one.act, one.topic): one.allowed for one in found}
    assert not tried["lamp", "publish", "nodes/lock/pending"]
    assert not tried["A", "publish", "nodes/lock/pending"]
    assert not tried["A", "publish", "nodes/hub/complete"]
    assert tried["lamp", "publish", "nodes/hub/complete"]


async def test_a_broker_that_lets_each_account_connect_once_is_tested_with_one_connection_of_each(
    mosquitto_with: StartWith, mosquitto: servers.Mosquitto
) -> None:
    """With this documented setting the check ended its own connections, and what is allowed was blocked."""
    settings = mosquitto.folder / "mosquitto.conf"
    before = settings.read_text()
    settings.write_text(before + "use_username_as_clientid true\n")
    try:
        port = mosquitto_with(acl_dialects.mosquitto(WANTED) + "pattern read nodes/+/pending\n")
        found = wrong(await check(observer(port), USERS, "nodes"))
        assert ("leaks", "A", "subscribe", "nodes/B/pending") in found
        assert {verdict for verdict, *_ in found} == {"leaks"}
    finally:
        settings.write_text(before)


async def test_a_device_that_may_command_another_is_found(mosquitto_with: StartWith) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(MIXED) + "pattern write nodes/+/pending\n")
    found = wrong(await check(observer(port), users_of(MIXED), "nodes"))
    assert ("leaks", "lamp", "publish", "nodes/lock/pending") in found
    assert ("leaks", "A", "publish", "nodes/lock/pending") in found


async def test_another_prefix_is_another_set_of_rules(mosquitto_with: StartWith) -> None:
    rules = acl_dialects.mosquitto(RulesRequest(prefix="plant/7", admins=["boss"]))
    port = mosquitto_with(rules)
    assert wrong(await check(observer(port), USERS, "plant/7")) == []
    blocked = wrong(await check(observer(port), USERS, "nodes", patience=1.0))
    assert ("blocked", "A", "publish", "nodes/B/pending") in blocked
    assert {verdict for verdict, *_ in blocked} == {"blocked"}


@pytest.mark.parametrize(
    ("hole", "leaks"),
    [
        ("pattern write nodes/+/status", ("A", "publish", "nodes/B/status")),
        ("pattern read nodes/+/pending", ("A", "subscribe", "nodes/B/pending")),
        ("pattern read nodes/+/complete", ("B", "subscribe", "nodes/A/complete")),
        ("pattern readwrite nodes-other/#", ("A", "publish", "nodes-other/x/pending")),
        ("pattern read $SYS/#", ("A", "subscribe", "$SYS/#")),
    ],
)
async def test_a_rule_too_many_is_found(
    mosquitto_with: StartWith, hole: str, leaks: tuple[str, str, str]
) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(WANTED) + hole + "\n")
    found = wrong(await check(observer(port), USERS, "nodes"))
    assert ("leaks", *leaks) in found
    assert {verdict for verdict, *_ in found} == {"leaks"}


async def test_a_rule_too_few_is_found(mosquitto_with: StartWith) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(WANTED).replace("pattern write nodes/+/ack\n", ""))
    assert set(wrong(await check(observer(port), USERS, "nodes", patience=1.0))) == {
        ("blocked", one, "publish", f"nodes/{other}/ack") for one in "AB" for other in "AB"
    }


async def test_an_observer_who_does_not_see_everything_proves_nothing(mosquitto_with: StartWith) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(RulesRequest()))
    with pytest.raises(NotAllowed, match="must be allowed everything"):
        await check(observer(port), USERS, "nodes", patience=1.0)


async def test_who_cannot_get_in_is_told_so(
    mosquitto_with: StartWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = mosquitto_with(acl_dialects.mosquitto(WANTED))
    with pytest.raises(ConnectionRefused):
        await check(observer(port), [*USERS, BrokerLogin("C", "unknown")], "nodes")
    with pytest.raises(ConnectionRefused):
        await check(BrokerAddress.parse(f"mqtt://boss:wrong@127.0.0.1:{port}"), USERS, "nodes")
    monkeypatch.setattr(MqttLink.connected, "__defaults__", (0.5,))  # not ten seconds
    with pytest.raises(ConnectionLost):
        await check(observer(servers.free_port()), USERS, "nodes")


async def test_one_user_alone_proves_nothing() -> None:
    with pytest.raises(Malformed, match="two users"):
        await check(observer(1), USERS[:1], "nodes")
    with pytest.raises(Malformed, match="observer"):
        await check(observer(1), [*USERS, BOSS], "nodes")


# ── NATS ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path)
    await broker.start()
    yield broker
    await broker.stop()


async def test_the_embedded_broker_enforces_the_rules(nats: EmbeddedBroker) -> None:
    boss = BrokerUser(BOSS.name, BOSS.password, ["#"], ["#"], NODES)
    nodes = [node(who.name, who.password) for who in USERS]
    await nats.set_users([*nodes, boss])
    await nodes_work(nats.port)
    assert wrong(await check(observer(nats.port), USERS, "nodes")) == []
    wide = BrokerUser("A", "pa", ["nodes/#"], nodes[0].subscribe, NODES)
    await nats.set_users([wide, nodes[1], boss])
    found = wrong(await check(observer(nats.port), USERS, "nodes"))
    assert ("leaks", "A", "publish", "nodes/B/status") in found
    assert {who for _, who, *_ in found} == {"A"}


async def test_the_embedded_broker_enforces_the_rules_of_devices(nats: EmbeddedBroker) -> None:
    boss = BrokerUser(BOSS.name, BOSS.password, ["#"], ["#"])
    await nats.set_users([*(device(who.name, who.password) for who in DEVICES), boss])
    assert wrong(await check(observer(nats.port), DEVICES, "nodes")) == []


@pytest.mark.parametrize("wanted", [WANTED, MIXED], ids=["nodes", "devices too"])
async def test_an_outside_nats_server_enforces_the_generated_text(
    tmp_path: Path, wanted: RulesRequest
) -> None:
    import bcrypt

    everybody = [*USERS, *DEVICES, BOSS]
    hashes = {who.name: bcrypt.hashpw(who.password.encode(), bcrypt.gensalt(4)).decode() for who in everybody}
    server = servers.Nats(tmp_path, acl_dialects.nats(replace(wanted, passwords=hashes)))
    try:
        server.start()
        await nodes_work(server.port)
        assert wrong(await check(observer(server.port), users_of(wanted), "nodes")) == []
    finally:
        server.stop()


# ── RabbitMQ ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proof  # each of its twenty calls of rabbitmqctl takes more than a second of a processor
@pytest.mark.timeout(300)
async def test_rabbitmq_enforces_the_generated_rules_and_its_holes_are_found() -> None:
    server = servers.RabbitMq()
    try:
        await asyncio.to_thread(server.start)
        added = "\n".join(f"rabbitmqctl add_user {who.name} {who.password}" for who in (*USERS, BOSS))
        server.run(f"{added}\n{acl_dialects.rabbitmq(WANTED)}")
        await nodes_work(server.port)
        assert wrong(await check(observer(server.port), USERS, "nodes")) == []
        server.run("rabbitmqctl clear_topic_permissions A\nrabbitmqctl set_permissions A '.*' '.*' '.*'")
        found = wrong(await check(observer(server.port), USERS, "nodes"))
        assert {(verdict, who) for verdict, who, *_ in found} == {("leaks", "A")}
        assert {act for _, _, act, _ in found} == {"publish", "will", "subscribe", "take over"}
    finally:
        server.remove()
