from __future__ import annotations

import json
import shlex

from tests.cli.conftest import CommandLine


def test_what_new_prints_can_be_run_elsewhere(cli: CommandLine) -> None:
    made = cli.duly("keys", "new", "A", "--keys", "a.json")
    assert made.returncode == 0
    (line,) = made.stdout.splitlines()
    assert cli.duly("keys", "new", "B", "--keys", "b.json").returncode == 0
    assert cli.duly(*shlex.split(line)[1:], "--keys", "b.json").returncode == 0
    listed = cli.ask("keys", "list", "--keys", "b.json")
    assert listed["name"] == "B"
    assert [(k["name"], k["is"]) for k in listed["keys"]] == [("B", "own"), ("A", "trusted")]
    assert listed["keys"][1]["kid"] == cli.ask("keys", "list", "--keys", "a.json")["keys"][0]["kid"]


def test_no_verb_shows_a_secret(cli: CommandLine) -> None:
    said = [
        cli.duly(*words.split(), *more)
        for words in (
            "keys new A",
            "keys new A --shared-with T --out t.key",
            "keys list",
            "keys trust T --file t.key",
            "keys new A --replace",
        )
        for more in ((), ("--json",))
    ]
    kept = json.loads((cli.folder / "duly-keys.json").read_text())
    secrets = [kept["own"]["secret"], *(peer["key"].get("secret", "-") for peer in kept["peers"])]
    for one in said:
        for secret in secrets:
            assert secret not in one.stdout + one.stderr or secret == "-"
    for file in ("duly-keys.json", "t.key"):
        assert (cli.folder / file).stat().st_mode & 0o777 == 0o600


def test_a_shared_secret_is_trusted_from_its_file(cli: CommandLine) -> None:
    assert cli.duly("keys", "new", "A", "--shared-with", "T", "--out", "t.key").returncode == 0
    assert cli.duly("keys", "trust", "A", "--file", "t.key", "--as", "T", "--keys", "t.json").returncode == 0
    (here,), (there,) = (
        cli.ask("keys", "list")["keys"],
        cli.ask("keys", "list", "--keys", "t.json")["keys"],
    )
    assert (here["name"], here["is"], there["name"], there["is"]) == ("T", "shared", "A", "shared")
    assert here["kid"] == there["kid"]


def test_what_is_no_longer_believed_is_gone(cli: CommandLine) -> None:
    key = cli.ask("keys", "new", "B", "--keys", "b.json")["key"]
    other = cli.ask("keys", "new", "B", "--keys", "b.json", "--replace")
    cli.duly("keys", "new", "A")
    cli.duly("keys", "trust", "B", key)
    cli.duly("keys", "trust", "B", other["key"])
    assert len(cli.ask("keys", "list")["keys"]) == 3
    assert cli.duly("keys", "forget", "B", other["kid"]).returncode == 0
    assert cli.duly("keys", "forget", "B").returncode == 0
    assert [k["is"] for k in cli.ask("keys", "list")["keys"]] == ["own"]
    assert cli.duly("keys", "forget", "B").returncode == 6
    cli.duly("keys", "trust", "B", key)
    cli.duly("keys", "trust", "B", other["key"], "--replace")
    assert [k["kid"] for k in cli.ask("keys", "list")["keys"][1:]] == [other["kid"]]


def test_mistakes_are_said_in_a_sentence(cli: CommandLine) -> None:
    cli.duly("keys", "new", "A")
    for words, code, sentence in (
        ("keys new A", 6, "has a key"),
        ("keys new B", 6, "the keyring of A, not of B"),
        ("keys new a/b", 2, "contains /"),
        ("keys new A --shared-with T", 2, "--out FILE together"),
        ("keys trust B", 2, "either the KEY"),
        ("keys trust B nonsense", 2, "looks like ed25519:"),
        ("keys trust B --file nowhere", 2, "cannot be read"),
        (
            "keys trust B ed25519:O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik= --keys none.json",
            2,
            "no keyring",
        ),
        ("keys list --keys none.json", 2, "cannot be read"),
    ):
        done = cli.duly(*words.split())
        assert (done.returncode, done.stdout) == (code, ""), words
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (cli.folder / "none.json").exists()
