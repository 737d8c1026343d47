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

import kubernetes_validate
import msgspec
import pytest

from duly import settings
from tests import servers
from tests.certificates import Authority
from tests.guard import GUARD

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


def image() -> dict[str, str]:
    """The instructions of the image; of several of a kind the last."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    return {line.split()[0]: line.partition(" ")[2] for line in lines if not line.startswith("#")}


# ── the image ────────────────────────────────────────────────────────────────────────────────────


def test_the_image_listens_where_a_published_port_reaches_it_as_a_user_of_its_own() -> None:
    said = image()
    environment = dict(each.split("=", 1) for each in said["ENV"].split())
    chosen = settings.load({}, environment)
    assert (chosen.listen, chosen.insecure) == ("0.0.0.0", True)
    assert said["EXPOSE"].split() == [str(chosen.port), str(chosen.mqtt_port)]
    (volume,) = msgspec.json.decode(said["VOLUME"], type=list[str])
    assert chosen.data.startswith(f"{volume}/")
    assert said["WORKDIR"] == volume
    assert said["USER"] == "duly"
    assert "/src[all]" in said["RUN"]


@pytest.mark.parametrize("tls", [False, True])
def test_the_health_check_of_the_image_tells_a_hub_that_answers(tmp_path: Path, tls: bool) -> None:
    check = msgspec.json.decode(image()["HEALTHCHECK"].partition(" CMD ")[2], type=list[str])
    assert check[:2] == ["python", "-c"]
    here = [sys.executable, "-c", check[2]]
    port = servers.free_port()
    environment = os.environ | {"DULY_PORT": str(port), "DULY_DATA": str(tmp_path / "d")}
    if tls:
        cert, key = Authority(tmp_path).issue("hub.example")
        environment |= {"DULY_TLS_CERT": str(cert), "DULY_TLS_KEY": str(key)}
    assert subprocess.run(here, env=environment, capture_output=True, check=False).returncode != 0
    command = [sys.executable, "-m", "duly", "up", "--no-mqtt"]
    hub = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        servers.wait_for_port(port, hub, "hub")
        assert subprocess.run(here, env=environment, check=False).returncode == 0
    finally:
        hub.terminate()
        hub.wait(GUARD)


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────


MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def test_the_manifests_are_those_that_kustomize_names_and_fit_the_schema() -> None:
    found: dict[str, Any] = {path.name: msgspec.yaml.decode(path.read_bytes()) for path in MANIFESTS}
    assert sorted(found.pop("kustomization.yaml")["resources"]) == sorted(found)
    for manifest in found.values():
        kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_a_pod_is_set_up_as_the_program_wants_it() -> None:
    deployment = msgspec.yaml.decode((DEPLOY / "kubernetes/hubs.yaml").read_bytes())
    pod = deployment["spec"]["template"]["spec"]
    (hub,) = pod["containers"]
    plain = {each["name"]: each["value"] for each in hub["env"] if "value" in each}
    known = {f"DULY_{field.name.upper()}" for field in msgspec.structs.fields(settings.Settings)}
    assert {each["name"] for each in hub["env"]} <= known
    chosen = settings.load({}, plain | {"DULY_LEDGER": "postgresql://db/duly"})
    assert chosen.listen == "0.0.0.0"
    mounted = {each["mountPath"]: each["name"] for each in hub["volumeMounts"]}
    assert set(mounted.values()) == {volume["name"] for volume in pod["volumes"]}
    for needed in (chosen.data, chosen.secret_key):
        assert any(needed.startswith(f"{path}/") for path in mounted), needed
    assert hub["ports"][0]["containerPort"] == chosen.port
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
    subprocess.run([sys.executable, "-m", "duly", *hub["args"], "--help"], check=True, capture_output=True)


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


def test_no_broker_that_lets_everyone_in_is_published() -> None:
    assert "allow_anonymous true" in (DEPLOY / "mosquitto.conf").read_text()
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["balancer"]


def test_the_database_lets_the_hubs_in() -> None:
    made = {name: filled(value) for name, value in SERVICES["postgres"]["environment"].items()}
    url = f"postgresql://{made['POSTGRES_USER']}:{made['POSTGRES_PASSWORD']}@postgres/{made['POSTGRES_DB']}"
    assert filled(SERVICES["hub1"]["environment"]["DULY_LEDGER"]) == url


def test_the_commands_of_the_image_and_of_the_comments_are_the_command_lines_own() -> None:
    said = image()
    verbs = [msgspec.json.decode(said["CMD"])]
    assert msgspec.json.decode(said["ENTRYPOINT"]) == ["duly"]
    comment = (DEPLOY / "compose.yaml").read_text().partition("exec hub1 duly ")[2].partition("`")[0]
    verbs.append(shlex.split(comment))
    service = (DEPLOY / "duly@.service").read_text()
    assert "Environment=PATH=/opt/duly/bin:" in service
    unit = service.partition("ExecStart=")[2].splitlines()[0]
    assert unit.startswith("/usr/bin/env duly ")
    verbs.append(shlex.split(unit)[2:])
    assert verbs == [["up"], ["add", "device", "lock"], ["up"]]
    for verb in verbs:
        subprocess.run([sys.executable, "-m", "duly", *verb, "--help"], check=True, capture_output=True)


def test_the_notifier_keeps_nothing(tmp_path: Path) -> None:
    port = servers.free_port()
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
        process.wait(GUARD)
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
    port = servers.free_port()
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
        broker.wait(GUARD)


def test_systemd_takes_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "systemd")
    shutil.copy(DEPLOY / "duly@.service", tmp_path)
    checked = subprocess.run(
        [analyze, "verify", tmp_path / "duly@1.service"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    exposed = [analyze, "security", "--offline=yes", "--threshold=20", str(tmp_path / "duly@.service")]
    assert subprocess.run(exposed, capture_output=True, check=False).returncode == 0, "2.0 of 10 at most"
