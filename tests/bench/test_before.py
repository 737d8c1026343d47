"""An earlier revision is unpacked into a folder of its own; the repository is left as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bench.before import run, unpack
from bench.measure import ROOT, Options


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(not git("rev-parse", "HEAD"), reason="not a git repository")
def test_the_source_of_a_revision_is_unpacked(tmp_path: Path) -> None:
    source = unpack("HEAD", tmp_path / "source")
    assert (source / "duly" / "__init__.py").read_text() == git("show", "HEAD:src/duly/__init__.py")
    assert str(tmp_path) not in git("worktree", "list")


def test_a_revision_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no revision 'no-such-revision'"):
        unpack("no-such-revision", tmp_path / "source")


async def test_without_a_revision_nothing_is_compared() -> None:
    report = await run(Options())
    assert (report.figures, report.notes) == (
        [],
        ["name a revision with --before REV to compare this program with it"],
    )
