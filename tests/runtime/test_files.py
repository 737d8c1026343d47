"""Files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from duly.runtime.files import close_to_others


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_open_files_and_folders_are_closed(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    file.chmod(0o644)
    folder.chmod(0o755)
    close_to_others([file, folder, tmp_path / "missing"])
    assert (mode(file), mode(folder)) == (0o600, 0o700)


def test_pipes_devices_and_links_are_left_as_they_are(tmp_path: Path) -> None:
    """A path such as /dev/null belongs to every program of the machine."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    target.touch()
    target.chmod(0o644)
    link.symlink_to(target)
    close_to_others([pipe, link])
    assert (mode(pipe), mode(target)) == (0o666, 0o644)
