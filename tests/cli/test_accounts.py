"""The same verbs through a running hub and without one."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.cli.conftest import CommandLine


@pytest.fixture(params=["through the hub", "in the ledger"])
def office(request: pytest.FixtureRequest, cli: CommandLine) -> CommandLine:
    if request.param == "through the hub":
        cli.up()
    return cli


def test_a_ledger_that_is_named_is_read_and_nothing_is_said_of_a_hub(cli: CommandLine) -> None:
    """With `--ledger` no hub is asked. Beside a running one it said that none runs."""
    cli.up()
    assert cli.duly("add", "device", "lock").returncode == 0
    named = cli.duly("list", "--ledger", f"sqlite:///{cli.folder}/duly-data/ledger.db")
    assert "lock  device  ?" in named.stdout, named.stderr
    assert named.stderr == "(read from the ledger, which does not know who is online)\n"


def test_accounts_and_grants_come_and_go(office: CommandLine) -> None:
    added = office.duly("add", "app", "phone")
    assert added.stdout.startswith("duly_"), "the token alone, so that a script can take it"
    assert added.stdout.count("\n") == 1
    assert added.stdout.strip() not in added.stderr
    assert office.ask("add", "device", "lock").keys() == {"token", "name", "role"}
    assert office.duly("grant", "phone", "lock").stdout == "phone may command lock\n"

    known = office.ask("list")
    assert [(one["name"], one["role"]) for one in known["accounts"]] == [("lock", "device"), ("phone", "app")]
    assert known["grants"] == {"phone": ["lock"]}

    assert office.duly("revoke", "phone", "lock").returncode == 0
    assert office.duly("revoke", "phone", "lock").returncode == 6
    assert office.duly("remove", "phone").returncode == 0
    assert "lock  device" in office.duly("list").stdout


def test_a_key_of_a_device_and_the_hub_is_printed_once_after_the_token(office: CommandLine) -> None:
    added = office.duly("add", "device", "lock", "--key", "shared")
    token, key = added.stdout.splitlines()
    assert token.startswith("duly_")
    assert re.fullmatch(r"[0-9a-f]{16}:[A-Za-z0-9+/]{43}=", key)
    assert key not in office.duly("list", "--json").stdout
    for kind, given in (("device", "hmac"), ("app", "shared")):
        refused = office.duly("add", kind, "shed", "--key", given)
        assert (refused.returncode, "key" in refused.stderr) == (2, True), refused.stderr


def test_a_person_who_never_talked_leaves_a_free_name(office: CommandLine) -> None:
    assert office.duly("add", "user", "ann").returncode == 0
    assert office.duly("remove", "ann").returncode == 0
    assert office.ask("add", "app", "ann")["role"] == "app"


def test_what_cannot_be_done_says_why(office: CommandLine) -> None:
    office.duly("add", "app", "phone")
    taken = office.duly("add", "device", "phone")
    assert (taken.returncode, "is taken" in taken.stderr) == (6, True)
    bad = office.duly("add", "app", "no/slash")
    assert (bad.returncode, "cannot be a name" in bad.stderr) == (2, True)
    nobody = office.duly("grant", "phone", "nobody")
    assert (nobody.returncode, "there is no device named 'nobody'" in nobody.stderr) == (2, True)


def test_the_list_says_who_is_here_and_who_was_last_heard_of_when(cli: CommandLine) -> None:
    hub = cli.up()
    for args in ("add device lock", "add device shed", "add app phone"):
        cli.duly(*args.split())
    before = time.time() * 1000
    lock = cli.device("lock")
    known = cli.ask("list")
    assert known["online"] == ["lock"]
    assert before - 1 <= known["heard"].pop("lock") <= time.time() * 1000
    assert known["heard"] == {}, "the shed never came"
    lock.stop(signal.SIGKILL)
    hub.stop()
    lines = {line.split()[0]: line.split() for line in cli.duly("list").stdout.splitlines()}
    assert lines["lock"][1:3] == ["device", "?"], "without a hub nobody can tell"
    assert ":" in lines["lock"][3]
    assert lines["shed"][1:4] == ["device", "?", "never"]
    assert lines["phone"][1:4] == ["app", "may", "command"]
    for args in ("remove lock", "add device lock"):
        assert cli.duly(*args.split()).returncode == 0
    assert cli.ask("list")["heard"] == {}, "what was heard of its predecessor is not said of another lock"


def test_a_run_file_left_behind_by_a_killed_hub_misleads_no_verb(cli: CommandLine) -> None:
    cli.up().stop(signal.SIGKILL)
    note = cli.folder / "duly-data" / "hub.json"
    # As if its pid had been given to another process since.
    text = note.read_text()
    note.write_text(text[: text.index('"pid":')] + '"pid":1}')
    assert cli.duly("add", "app", "phone").returncode == 0
    assert [one["name"] for one in cli.ask("list")["accounts"]] == ["phone"]


def test_a_hub_on_another_machine_wants_an_admins_token(cli: CommandLine) -> None:
    cli.up()
    url = f"http://127.0.0.1:{cli.port}"
    boss = cli.ask("add", "admin", "boss")["token"]
    app = cli.ask("add", "app", "phone")["token"]
    (cli.folder / "far").mkdir()
    cli.folder = cli.folder / "far"
    assert cli.duly("list", "--url", url).returncode == 2
    assert cli.duly("list", "--url", url, "--token", app).returncode == 4
    assert cli.duly("list", "--url", url, "--token", "duly_nonsense").returncode == 4
    assert cli.duly("list", DULY_URL=url, DULY_TOKEN=boss).returncode == 0
    assert cli.duly("list", "--url", "http://127.0.0.1:1", "--token", boss).returncode == 3
