"""What a hub keeps: readable by its owner alone, and with no secret in it that its key does not protect."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from argon2 import PasswordHasher

from duly.apps.alerts.profiles import ADDRESSES, ProfileDraft, Profiles
from duly.errors import SecretKeyMissing
from duly.identity.accounts import Accounts, Role
from duly.server import data_folder
from duly.server.hub import Hub
from duly.settings import Settings
from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from duly.storage.secret_box import FILE
from tests.local_hub import LocalHub
from tests.servers import Postgres

SMTP = "hunter2-planted-smtp-password"
TOKEN = "123456789:PlantedApprise-Token_abcdefghijklmno"
HOOK = "planted-path-of-a-webhook"
SECRET = "whsec_cGxhbnRlZC13ZWJob29rLXNlY3JldC1vZi0zMi1i"
PLANTED = (SMTP, TOKEN, HOOK, SECRET, SECRET.removeprefix("whsec_"))

DRAFT = ProfileDraft(
    send=(f"mailto://ann:{SMTP}@mail.example.com?to=ann@example.com", f"https://hooks.example.com/{HOOK}"),
    escalate=((600.0, f"tgram://{TOKEN}/987654321/"),),
    secret=SECRET,
)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Whoever forgets to say how a file is to be made makes it for everybody."""
    old = os.umask(0)
    yield
    os.umask(old)


def open_to_others(folder: Path) -> dict[str, str]:
    everything = [folder, *folder.rglob("*")]
    return {str(path): oct(path.lstat().st_mode) for path in everything if path.lstat().st_mode & 0o077}


def found_in(folder: Path) -> dict[str, list[str]]:
    """In which files of a folder, the key's own excepted, a planted secret can be read."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != FILE]
    texts = {str(path): path.read_bytes() for path in files}
    found = {path: [one for one in PLANTED if one.encode() in raw] for path, raw in texts.items()}
    return {path: some for path, some in found.items() if some}


async def prepare_plain(ledger: Ledger) -> None:
    """A ledger as an older version has left it."""
    await Profiles(ledger).set("home", DRAFT)
    accounts = Accounts(ledger)
    await accounts.add(Role.DEVICE, "lock")
    await accounts.register("ann", PasswordHasher().hash("correct horse"))


# ── only its owner may read it ───────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_umask")
async def test_everything_a_hub_makes_is_private_from_the_beginning(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    hub = Hub(Settings(data=str(data), port=0, mqtt_port=0))
    await hub.start()
    try:
        await hub.accounts.add(Role.DEVICE, "lock")
        await hub.maintenance.archive.add("alerts", [{"id": 1}], hub.ledger.clock.now())
        assert open_to_others(data) == {}
        names = {path.name for path in data.rglob("*")}
        assert {"ledger.db", "ledger.db-wal", "hub.json", "client_id", FILE, "nats.conf", "nats.log"} <= names
    finally:
        await hub.stop()
    assert open_to_others(data) == {}


async def test_what_an_older_version_left_open_is_closed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    (data / "broker" / "jetstream").mkdir(parents=True)
    (data / "archive").mkdir()
    (data / "notifications").mkdir()
    for file in (
        "ledger.db",
        "broker/nats.conf",
        "broker/jetstream/1.blk",
        "archive/alerts-2026-01.jsonl.gz",
        "notifications/alerts",
    ):
        (data / file).touch(0o644)
    for folder in (data, data / "broker", data / "archive", data / "notifications"):
        folder.chmod(0o755)
    data_folder.prepare(data)
    assert open_to_others(data) == {}
    assert f"closed {data} to other users; it was open (mode 0755)" in caplog.text
    assert f"closed {data / 'ledger.db'} to other users; it was open (mode 0644)" in caplog.text
    caplog.clear()
    data_folder.prepare(data)
    assert caplog.text == ""


async def test_a_data_folder_among_other_things_leaves_those_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "README").touch(0o644)
    data_folder.prepare(Path())
    assert (tmp_path.stat().st_mode & 0o777, (tmp_path / "README").stat().st_mode & 0o777) == (0o755, 0o644)


# ── a copy of the ledger gives nothing away ──────────────────────────────────────────────────────


async def test_no_file_but_the_key_gives_a_secret_away(tmp_path: Path) -> None:
    local = LocalHub(tmp_path / "hub", allow_private_webhooks=True)
    await local.start()
    await local.hub.alerts.profiles.set("home", DRAFT)
    assert found_in(local.folder) == {}
    await local.stop()
    assert found_in(local.folder) == {}
    await local.start()
    label = next(iter(local.hub.alerts.profiles.all()["home"].steps)).to[0]
    address = local.hub.alerts.profiles.address(label)
    assert address is not None
    assert SMTP in address.url
    await local.stop()


async def test_secrets_in_plain_are_encrypted_at_the_start_and_their_old_bytes_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    async with await open_ledger(f"sqlite:///{folder}/ledger.db") as ledger:
        await prepare_plain(ledger)
        labels = set(await ledger.bucket(ADDRESSES))
    assert found_in(folder) != {}
    local = LocalHub(folder)
    await local.start()
    try:
        assert found_in(folder) == {}, "nor in the log, while the hub runs"
        assert "encrypted 4 secrets that the ledger held in plain" in caplog.text
        assert set(local.hub.alerts.profiles._addresses) == labels, "deliveries under way still know theirs"
        await local.hub.people.log_in("ann", "correct horse", "127.0.0.1", "")
    finally:
        await local.stop()
    assert found_in(folder) == {}
    raw = b"".join(path.read_bytes() for path in folder.glob("ledger.db*"))
    assert b"$argon2" not in raw


def dump(url: str, server: Postgres) -> bytes:
    command = [str(server._bin / "pg_dump"), "--dbname", url]
    return subprocess.run(command, check=True, capture_output=True).stdout


async def test_a_dump_of_postgres_gives_no_secret_away(tmp_path: Path, postgres_server: Postgres) -> None:
    url = postgres_server.create_database()
    async with await open_ledger(url) as ledger:
        await prepare_plain(ledger)
    assert SMTP.encode().hex().encode() in dump(url, postgres_server)
    local = LocalHub(tmp_path / "hub", ledger=url)
    await local.start()
    try:
        await local.hub.alerts.profiles.set("office", DRAFT)
        said = dump(url, postgres_server)
        assert [one for one in PLANTED if one.encode() in said or one.encode().hex().encode() in said] == []
        connection = await asyncpg.connect(url)
        rows = await connection.fetchval("SELECT string_agg(encode(body, 'escape'), ' ') FROM duly_items")
        await connection.close()
        assert [one for one in (*PLANTED, "$argon2", "$2b$") if one in rows] == []
    finally:
        await local.stop()


# ── the key ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_hub_without_the_key_of_its_ledger_does_not_start(tmp_path: Path) -> None:
    local = LocalHub(tmp_path / "hub")
    await local.start()
    await local.stop()
    key = local.folder / FILE
    key.rename(tmp_path / "kept")
    with pytest.raises(SecretKeyMissing, match=r"with key [0-9a-f]{8}, and .*secret.key is not there"):
        await local.start()
    key.write_text("0123456789" * 5)
    with pytest.raises(SecretKeyMissing, match="holds key"):
        await local.start()
    (tmp_path / "kept").replace(key)
    await local.start()
    await local.stop()


async def test_hubs_on_one_postgres_need_the_same_key(tmp_path: Path, postgres_server: Postgres) -> None:
    url = postgres_server.create_database()
    first, second = (LocalHub(tmp_path / name, ledger=url) for name in ("first", "second"))
    await first.start()
    try:
        with pytest.raises(SecretKeyMissing, match=r"copy secret\.key from the data folder of a hub"):
            await second.start()
        third = LocalHub(tmp_path / "third", ledger=url, secret_key=str(first.folder / FILE))
        await third.start()
        await third.stop()
    finally:
        await first.stop()


async def test_a_given_key_is_used_and_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = tmp_path / "key"
    key.write_text("correct horse battery staple and more")
    key.chmod(0o644)
    local = LocalHub(tmp_path / "hub", secret_key=str(key))
    with caplog.at_level(logging.WARNING):
        await local.start()
    await local.stop()
    assert key.stat().st_mode & 0o777 == 0o600
    assert not (local.folder / FILE).exists()


async def test_a_ledger_that_is_gone_is_not_begun_anew_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalHub(tmp_path / "hub")
    for times in range(3):
        await local.start()
        await local.stop()
        said = [one for one in caplog.messages if "there is no ledger.db" in one]
        assert len(said) == (times == 2), said
        if times == 1:
            for path in local.folder.glob("ledger.db*"):
                path.unlink()
