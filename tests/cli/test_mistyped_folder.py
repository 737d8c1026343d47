"""A verb that changes what is there makes no ledger in a folder whose name was mistyped."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from duly.cli import app
from duly.cli.common import CommandFailed, Exit

VERBS = (
    "remove phone", "grant phone lock", "revoke phone lock", "profile remove home", "alert ack e1",
    "alert resolve e1", "deliveries retry e1", "floor --mend", "prune", "dashboard logout",
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_mistyped_folder_is_not_made(tmp_path: Path, verb: str) -> None:
    found = CliRunner().invoke(app, [*verb.split(), "--data", str(tmp_path / "dta")])
    assert isinstance(found.exception, CommandFailed), found.output
    assert found.exception.code is Exit.UNREACHABLE
    assert "there is no ledger in" in str(found.exception)
    assert not (tmp_path / "dta").exists()
