from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests import servers
from tests.cli.conftest import CommandLine

LOGINS = "boss:pz\nA:pa\nB:pb\n"


@pytest.fixture
def broker(cli: CommandLine) -> Iterator[servers.Mosquitto]:
    """One that is set up with what the verb prints, as its text says."""
    server = servers.Mosquitto(
        "allow_anonymous false", "password_file {folder}/passwords", "acl_file {folder}/acl"
    )
    try:
        (server.folder / "passwords").write_text(LOGINS)
        subprocess.run(["mosquitto_passwd", "-U", server.folder / "passwords"], check=True)
        printed = cli.duly("acl", "mosquitto", "--admins", "boss")
        (server.folder / "acl").write_text(printed.stdout)
        server.start()
        yield server
    finally:
        server.remove()


def test_what_is_printed_is_enforced_and_the_test_says_so(
    cli: CommandLine, broker: servers.Mosquitto
) -> None:
    url = f"mqtt://boss:pz@127.0.0.1:{broker.port}"
    done = cli.duly("acl", "test", url, "--user", "A:pa", "--user", "B:pb")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tried as A and B: all as the rules say" in done.stdout
    (cli.folder / "passwords").write_text(LOGINS)
    said = cli.ask("acl", "test", url, "--passwords", "passwords", "--all")
    assert said["ok"]
    assert len(said["findings"]) == said["tried"] > 80


def test_a_leak_is_named_and_the_exit_code_says_so(cli: CommandLine, broker: servers.Mosquitto) -> None:
    rules = broker.folder / "acl"
    rules.write_text(rules.read_text() + "pattern read nodes/+/pending\n")
    broker.stop()
    broker.start()
    url = f"mqtt://boss:pz@127.0.0.1:{broker.port}"
    done = cli.duly("acl", "test", url, "--user", "A:pa", "--user", "B:pb")
    assert done.returncode == 1
    assert (
        "A may not subscribe to nodes/B/pending: pending is B's own; received nodes/B/pending" in done.stdout
    )
    assert "publish" not in done.stdout
    wrong = cli.duly("acl", "test", url, "--user", "A:pa", "--user", "B:no")
    assert (wrong.returncode, wrong.stdout) == (4, "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("acl nats", "--users"),
        ("acl rabbitmq --users a.b", "without dots"),
        ("acl mosquitto --prefix a/+", "mean something else"),
        ("acl test http://x --user A:a --user B:b", "looks like mqtt://"),
        ("acl test mqtt://o:o@127.0.0.1 --user A:a", "two users"),
        ("acl test mqtt://o:o@127.0.0.1 --user A", "NAME:PASSWORD"),
    ],
)
def test_mistakes_are_said_in_a_sentence(cli: CommandLine, words: str, sentence: str) -> None:
    done = cli.duly(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_rules_for_every_broker_are_printed_and_nothing_else(cli: CommandLine) -> None:
    for broker in ("mosquitto", "emqx", "rabbitmq", "nats"):
        more = ["--users", "A,B"] if broker in ("rabbitmq", "nats") else []
        done = cli.duly("acl", broker, "--prefix", "plant/7", *more)
        assert (done.returncode, done.stderr) == (0, "")
        assert "plant" in done.stdout
        assert "nodes/" not in done.stdout
        assert cli.ask("acl", broker, *more)["broker"] == broker


def test_passwords_are_hashed_on_their_way_to_nats(cli: CommandLine) -> None:
    (cli.folder / "passwords").write_text(LOGINS)
    printed = cli.duly("acl", "nats", "--passwords", "passwords", "--admins", "boss").stdout
    assert printed.count('password: "$2b$') == 3
    for secret in ("pz", "pa", "pb"):
        assert f'"{secret}"' not in printed
