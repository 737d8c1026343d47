"""`duly dashboard` and `duly audit`, with and without a running hub."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from duly.core.operations import RewriteEntry
from duly.server.audit_chain import STREAM
from duly.storage import file_url, open_ledger
from tests.guard import GUARD


def duly(folder: Path, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "duly", *words, "--data", str(folder)],
        input=said,
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )


def test_what_is_done_without_a_hub_is_recorded_and_verified(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert duly(folder, "add", "device", "lock").returncode == 0
    done = duly(folder, "dashboard", "password", "ann", "--role", "viewer", said="correct horse\n")
    assert done.returncode == 0, done.stderr
    link = json.loads(duly(folder, "dashboard", "link", "--role", "operator", "--json").stdout)
    assert link["url"].startswith("http://127.0.0.1:7800/login#")
    assert (link["name"], link["role"]) == ("local", "operator")
    assert json.loads(duly(folder, "dashboard", "users", "--json").stdout) == {"users": {"ann": "viewer"}}

    listed = json.loads(duly(folder, "audit", "list", "--json").stdout)["entries"]
    assert [one["action"] for one in listed] == ["dashboard.link", "dashboard.password", "add"]
    assert listed[2]["target"] == "device lock"
    assert "correct horse" not in json.dumps(listed)

    head = json.loads(duly(folder, "audit", "verify", "--json").stdout)["head"]
    assert duly(folder, "dashboard", "remove", "ann").returncode == 0
    assert duly(folder, "audit", "verify", "--head", head).returncode == 0
    assert duly(folder, "audit", "verify", "--head", "0" * 64).returncode == 1

    for mistyped in (head[:12], head + "0", "HEAD"):
        refused = duly(folder, "audit", "verify", "--head", mistyped)
        assert refused.returncode == 2
        assert "64 digits 0-9 and a-f" in " ".join(refused.stderr.split())

    asyncio.run(forge(folder))
    broken = duly(folder, "audit", "verify")
    assert broken.returncode == 1
    assert "the audit chain is broken: entry 2 does not follow entry 1" in broken.stderr


async def forge(folder: Path) -> None:
    async with await open_ledger(file_url(folder / "ledger.db")) as ledger:
        (entry,) = await ledger.entries(STREAM, 0, 1)
        await ledger.write(RewriteEntry(STREAM, 1, entry.body.replace(b"lock", b"door")))


def test_a_mistyped_folder_is_not_made(tmp_path: Path) -> None:
    refused = duly(tmp_path / "dta", "dashboard", "link")
    assert refused.returncode == 3
    assert "there is no ledger in" in refused.stderr
    assert not (tmp_path / "dta").exists()


def test_a_password_that_is_too_short_is_refused(tmp_path: Path) -> None:
    done = duly(tmp_path / "data", "dashboard", "password", "ann", said="short\n")
    assert done.returncode == 2
    assert "8 to 1024" in done.stderr
    assert not (tmp_path / "data").exists(), "a refusal leaves nothing behind"
