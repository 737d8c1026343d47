"""What is in `deploy/` is what its programs accept. `deploy.cluster` runs the same set:
tests/end_to_end/test_hub_processes.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duly import settings
from tests import servers

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE: dict[str, Any] = msgspec.yaml.decode((DEPLOY / "compose.yaml").read_bytes())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
HUBS = [name for name in SERVICES if name.startswith("hub")]


def program(name: str, package: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        servers.missing(package)
    return found


def filled(text: str) -> str:
    """A value as compose fills it in where nothing is set."""
    return text.replace("${POSTGRES_PASSWORD:-duly}", "duly")


# ── compose ──────────────────────────────────────────────────────────────────────────────────────


def test_every_service_is_an_image_or_is_built_and_names_only_what_there_is() -> None:
    assert set(SERVICES) == {"hub1", "hub2", "hub3", "balancer", "postgres", "redis", "broker"}
    for name, service in SERVICES.items():
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("depends_on", ())) <= SERVICES.keys(), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), volume
            else:
                assert source in COMPOSE["volumes"], volume


@pytest.mark.parametrize("hub", HUBS)
def test_a_hub_is_built_from_a_file_that_is_there_and_its_settings_are_settings(hub: str) -> None:
    build = SERVICES[hub]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert (context / build["dockerfile"]).exists()
    assert (context / "pyproject.toml").exists()
    environment = {name: filled(value) for name, value in SERVICES[hub]["environment"].items()}
    known = {f"DULY_{field.name.upper()}" for field in msgspec.structs.fields(settings.Settings)}
    assert environment.keys() <= known
    chosen = settings.load({}, environment)
    assert (chosen.listen, chosen.insecure) == ("0.0.0.0", True)
    for url in (chosen.ledger, chosen.notifier, chosen.mqtt):
        assert url.split("//")[1].split("@")[-1].split(":")[0].split("/")[0] in SERVICES, url
    mounted = [volume.split(":")[1] for volume in SERVICES[hub]["volumes"]]
    assert any(chosen.data.startswith(f"{place}/") for place in mounted), "the rest is read-only"


def test_the_database_lets_the_hubs_in() -> None:
    made = {name: filled(value) for name, value in SERVICES["postgres"]["environment"].items()}
    url = f"postgresql://{made['POSTGRES_USER']}:{made['POSTGRES_PASSWORD']}@postgres/{made['POSTGRES_DB']}"
    assert filled(SERVICES["hub1"]["environment"]["DULY_LEDGER"]) == url


def test_the_commands_of_the_image_and_of_the_comments_are_the_command_lines_own() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    said = {line.split()[0]: line.partition(" ")[2] for line in lines}
    verbs = [msgspec.json.decode(said["CMD"])]
    assert msgspec.json.decode(said["ENTRYPOINT"]) == ["duly"]
    comment = (DEPLOY / "compose.yaml").read_text().partition("exec hub1 duly ")[2].partition("`")[0]
    verbs.append(shlex.split(comment))
    unit = (DEPLOY / "duly@.service").read_text().partition("ExecStart=")[2].splitlines()[0]
    assert unit.startswith("/usr/bin/env duly ")
    verbs.append(shlex.split(unit)[2:])
    assert verbs == [["up"], ["add", "device", "lock"], ["up"]]
    for verb in verbs:
        subprocess.run([sys.executable, "-m", "duly", *verb, "--help"], check=True, capture_output=True)


def test_the_notifier_keeps_nothing(tmp_path: Path) -> None:
    port = servers.quiet_port()
    command = [
        program("redis-server", "redis-server"),
        *SERVICES["redis"]["command"][1:],
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        servers.wait_for_port(port, process, "redis")
    finally:
        process.terminate()
        process.wait(20)
    assert list(tmp_path.iterdir()) == []


# ── the others ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("third", ["127.0.0.1:7803", "nobody.invalid:7800"])
def test_the_balancer_takes_its_settings_also_while_a_hub_is_not_to_be_found(third: str) -> None:
    wanted = SERVICES["balancer"]["environment"]
    assert {wanted[name].split(":")[0] for name in ("HUB1", "HUB2", "HUB3")} == set(HUBS)
    here = {"LISTEN": "127.0.0.1:7999", "HUB1": "127.0.0.1:7801", "HUB2": "127.0.0.1:7802", "HUB3": third}
    assert here.keys() == wanted.keys()
    command = [program("haproxy", "haproxy"), "-c", "-f", str(DEPLOY / "haproxy.cfg")]
    checked = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_broker_takes_its_settings(tmp_path: Path) -> None:
    port = servers.quiet_port()
    written = (DEPLOY / "mosquitto.conf").read_text()
    here = written.replace("listener 1883", f"listener {port} 127.0.0.1").replace(
        "/mosquitto/data/", f"{tmp_path}/"
    )
    assert here.count(str(tmp_path)) == 1
    if os.geteuid() == 0:
        here += "user root\n"
    (tmp_path / "conf").write_text(here)
    broker = subprocess.Popen(
        [program("mosquitto", "mosquitto"), "-c", tmp_path / "conf"], stderr=subprocess.DEVNULL
    )
    try:
        servers.wait_for_port(port, broker, "mosquitto")
    finally:
        broker.terminate()
        broker.wait(20)


def test_systemd_takes_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "systemd")
    shutil.copy(DEPLOY / "duly@.service", tmp_path)
    checked = subprocess.run(
        [analyze, "verify", tmp_path / "duly@1.service"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    exposed = [analyze, "security", "--offline=yes", "--threshold=20", str(tmp_path / "duly@.service")]
    assert subprocess.run(exposed, capture_output=True, check=False).returncode == 0, "2.0 of 10 at most"
