"""Makes the ledgers of earlier schemas, each with the program that had it.

Run it as `python -m tests.storage.old_ledgers.make`. The commits are those of this repository in which a
schema was in use. A schema that is new is added here with the last commit that had the one before, and made
once; the files are kept, and never made anew.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests import servers

HERE = Path(__file__).parent
SQLITE = {
    1: "bce9aa2", 2: "f59fad2", 3: "e9fbc4c", 4: "05a49d7", 5: "890c8f9", 6: "fc7802f", 7: "b6ca63a",
    8: "0825b1e",
}  # fmt: skip
POSTGRES = {
    1: "bce9aa2", 2: "f59fad2", 3: "e9fbc4c", 4: "ee252a2", 5: "05a49d7", 6: "890c8f9", 7: "fc7802f",
    8: "b6ca63a", 9: "0825b1e",
}  # fmt: skip
KILLED = (7, 8)
"""Schemas of SQLite of which there is one that was killed, too."""


def fill(commit: str, url: str, *, kill: bool = False) -> None:
    """Fills a ledger with the program of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", commit, "src"], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        env = os.environ | {"PYTHONPATH": f"{folder}/src"}
        args = [sys.executable, str(HERE / "fill.py"), url, *(["kill"] if kill else [])]
        subprocess.run(args, env=env, check=not kill)


def pack(folder: Path, name: str) -> None:
    """Packs the files of a SQLite ledger; none of them says when or by whom."""
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
        for path in sorted(folder.iterdir()):
            if not path.name.endswith("-shm"):
                info = tarfile.TarInfo(path.name)
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))


def main() -> None:
    """Makes those that are missing."""
    for schema, commit in SQLITE.items():
        for kill in (False, True) if schema in KILLED else (False,):
            name = f"sqlite-{schema}{'-killed' if kill else ''}"
            if not (HERE / f"{name}.tar.xz").exists():
                with tempfile.TemporaryDirectory() as folder:
                    fill(commit, f"sqlite:///{folder}/ledger.db", kill=kill)
                    pack(Path(folder), name)
    with servers.postgres() as server:
        for schema, commit in POSTGRES.items():
            path = HERE / f"postgres-{schema}.sql"
            if not path.exists():
                url = server.create_database()
                fill(commit, url)
                path.write_text(server.dump(url))


if __name__ == "__main__":
    main()
