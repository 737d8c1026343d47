"""What a process has flushed survives a loss of power, and what it has not may be lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.power_loss import PowerLoss, build

PROGRAM = """
import os, sys
folder = sys.argv[1]
fd = os.open(folder + "/file", os.O_RDWR | os.O_CREAT)
os.write(fd, b"f" * 2048); os.fsync(fd)
at = os.open(folder, os.O_RDONLY); os.fsync(at); os.close(at)
os.pwrite(fd, b"u" * 1024, 1024)
os.ftruncate(fd, 4096)
late = os.open(folder + "/late", os.O_RDWR | os.O_CREAT); os.write(late, b"l")
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("power"))


def left_after(library: Path, folder: Path, seed: int) -> dict[str, bytes]:
    disk = folder / "disk"
    disk.mkdir(parents=True)
    power = PowerLoss(library, disk, folder / "log")
    done = subprocess.run(
        [sys.executable, "-SE", "-c", PROGRAM, disk], env=os.environ | power.env, check=False
    )
    assert done.returncode == -9
    power.lose(Random(seed))
    return {file.name: file.read_bytes() for file in disk.iterdir()}


def test_what_was_flushed_is_kept_and_the_rest_may_be_lost(library: Path, tmp_path: Path) -> None:
    seen = [left_after(library, tmp_path / str(seed), seed) for seed in range(12)]
    assert all(one["file"][:1024] == b"f" * 1024 for one in seen)
    second = {one["file"][1024:2048] for one in seen}
    old, new = b"f" * 512, b"u" * 512
    assert {old + old, old + new, new + old, new + new} >= second
    assert len(second) > 1, "nothing was ever lost, or everything always"
    assert {len(one["file"]) for one in seen} == {2048, 4096}
    assert {"late" in one for one in seen} == {True, False}


def test_the_same_seed_leaves_the_same(library: Path, tmp_path: Path) -> None:
    first, second = (left_after(library, tmp_path / name, 3) for name in ("a", "b"))
    assert first == second
