"""TLS on every way to a broker: the embedded one, and an outside one that asks for certificates of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from duly.clients.device import Command, Device
from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.errors import ConnectionRefused, Malformed
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire.session import Acknowledge
from tests import servers
from tests.certificates import Authority
from tests.cli.conftest import CommandLine
from tests.guard import GUARD


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def settings(folder: Path, cert: Path, key: Path, listen: str = "127.0.0.1") -> Settings:
    return Settings(
        data=str(folder / "hub"), port=0, mqtt_port=0, listen=listen, tls_cert=str(cert), tls_key=str(key)
    )


def ignore(topic: str, payload: bytes, retained: bool, ack: Acknowledge) -> None:
    ack()


async def refused(url: str) -> str:
    """Why a link is refused or lost, at its first try."""
    link = MqttLink(url, ignore)
    await link.start()
    try:
        async with asyncio.timeout(GUARD):
            while link.problem == "no answer yet":
                await asyncio.sleep(0.01)
        assert not link.up
        return link.problem
    finally:
        await link.stop()


# ── the embedded broker ──────────────────────────────────────────────────────────────────────────


async def test_a_hub_with_a_certificate_serves_mqtt_with_tls_beyond_this_machine(
    authority: Authority, tmp_path: Path
) -> None:
    # As one that the world knows as hub.example, which also answers to this machine's address here.
    cert, key = authority.issue("hub.example", "hub.example", "127.0.0.1")
    hub = Hub(settings(tmp_path, cert, key, listen="0.0.0.0"))
    await hub.start()
    try:
        assert hub.mqtt_url.startswith("mqtts://127.0.0.1:")
        token = await hub.accounts.add(Role.DEVICE, "lock")
        await hub.accounts.add(Role.APP, "phone")
        await hub.accounts.grant("phone", "lock")
        where = hub.mqtt_url.replace("mqtts://", f"mqtts://lock:{token}@")
        device = Device(f"{where}?cafile={authority.ca}", name="lock")

        @device.on("lock_control")
        async def lock_control(command: Command) -> dict[str, bool]:
            return {"open": True}

        serving = asyncio.create_task(device.run())
        try:
            async with asyncio.timeout(GUARD):
                while not hub.gateway.online("lock"):
                    await asyncio.sleep(0.01)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        assert "check the certificates" in await refused(where), "nobody here has heard of that authority"
        remote = where.replace("127.0.0.1", "localhost")
        assert "check the certificates" in await refused(f"{remote}?cafile={authority.ca}"), "another name"
        await refused(where.replace("mqtts://", "mqtt://"))
    finally:
        await hub.stop()


async def test_the_hub_trusts_its_own_broker_by_its_certificate_whatever_name_it_carries(
    authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("hub.example", identified=False)
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0, tls_cert=str(cert), tls_key=str(key)))
    await hub.start()  # it waits for its own connection
    try:
        other, _ = authority.issue("other.example")
        address = BrokerAddress.parse(f"{hub.mqtt_url}?client_id=x")
        link = MqttLink(replace(address, cafile=str(other), pinned=True), ignore)
        await link.start()
        with pytest.raises(
            ConnectionRefused, match="check the certificates"
        ):  # the same authority is not the same broker
            await link.connected(GUARD)
        await link.stop()
    finally:
        await hub.stop()


async def test_a_certificate_that_cannot_be_used_is_said_so_before_anything_starts(
    authority: Authority, tmp_path: Path
) -> None:
    cert, _ = authority.issue("hub.example")
    hub = Hub(settings(tmp_path, cert, authority.ca))
    with pytest.raises(Malformed, match=r"TLS certificate .* cannot be used"):
        await hub.start()
    assert not (tmp_path / "hub").exists()


def test_without_tls_the_world_is_not_listened_to() -> None:
    with pytest.raises(Malformed, match="add --tls-cert and --tls-key"):
        Settings(listen="0.0.0.0")


# ── client certificates ──────────────────────────────────────────────────────────────────────────


class Strict:
    """A Mosquitto that asks everybody for a certificate, and takes the name in it as the username."""

    def __init__(self, authority: Authority) -> None:
        cert, key = authority.issue("broker", "127.0.0.1")
        self.authority = authority
        self.server = servers.Mosquitto(
            f"cafile {authority.ca}", f"certfile {cert}", f"keyfile {key}",
            "require_certificate true", "use_identity_as_username true",
        )  # fmt: skip

    def url(self, name: str) -> str:
        cert, key = self.authority.issue(name)
        files = f"cafile={self.authority.ca}&cert={cert}&key={key}"
        return f"mqtts://{name}@127.0.0.1:{self.server.port}?{files}"


@pytest.fixture
def strict(authority: Authority) -> Iterator[Strict]:
    it = Strict(authority)
    try:
        it.server.start()
        yield it
    finally:
        it.server.remove()


async def test_nodes_with_certificates_get_in_and_others_do_not(strict: Strict, tmp_path: Path) -> None:
    b = Node(strict.url("B"))

    @b.task("turn_on")
    async def turn_on(task: Task) -> str:
        return "on"

    async with b, Node(strict.url("A")) as a:
        assert await a.call("B", "turn_on") == "on"
    plain = f"127.0.0.1:{strict.server.port}"
    ca = strict.authority.ca
    assert "it may want a certificate of ours" in await refused(f"mqtts://A@{plain}?cafile={ca}")
    await refused(f"mqtt://A@{plain}")
    remote = tmp_path / "remote"
    remote.mkdir()
    cert, key = Authority(remote).issue("A")
    await refused(f"mqtts://A@{plain}?cafile={ca}&cert={cert}&key={key}")


def test_the_same_by_flags(strict: Strict, tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    where = f"mqtts://127.0.0.1:{strict.server.port}"

    def files(name: str) -> list[str]:
        cert, key = strict.authority.issue(name)
        return ["--cafile", str(strict.authority.ca), "--cert", str(cert), "--key", str(key)]

    try:
        node = cli.start("node", "B", "--url", where, "--run", "echo=cat", *files("B"))
        node.line("online")
        done = cli.duly("call", "B", "echo", "7", "--as", "A", "--url", where, *files("A"))
        assert done.returncode == 0, done.stderr
        assert '"payload":7' in done.stdout
    finally:
        cli.end()
