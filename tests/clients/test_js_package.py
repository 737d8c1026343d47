"""The JavaScript package: its types, its size, the one file that the hub serves, and its stores."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import servers
from tests.clients.test_js_node import HERE, PACKAGE, ROOT, node
from tests.guard import GUARD

COMPILER = ["typescript@7.0.2", "@types/node@20"]
APP_LIMIT = 12 * 1024
"""Bytes that an app may cost a page, compressed."""


@pytest.fixture(scope="module")
def compiler() -> Path:
    """A folder with TypeScript in it, installed once."""
    folder = ROOT / ".cache" / "typescript"
    if not (folder / "node_modules" / ".bin" / "tsc").exists():
        npm = shutil.which("npm")
        if npm is None:
            servers.missing("npm")
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [npm, "install", "--no-save", "--no-package-lock", "--no-audit", "--no-fund", *COMPILER],
            cwd=folder, capture_output=True, text=True, check=False, timeout=GUARD,
        )  # fmt: skip
        if done.returncode:
            servers.unable("TypeScript cannot be installed: the npm registry is out of reach")
    return folder / "node_modules"


def check(compiler: Path, *words: str, cwd: Path = PACKAGE) -> None:
    done = subprocess.run(
        [str(compiler / ".bin" / "tsc"), "--typeRoots", str(compiler / "@types"), *words],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=GUARD,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_modules_are_typed_strictly_and_their_declarations_are_up_to_date(
    compiler: Path, tmp_path: Path
) -> None:
    check(compiler, "-p", ".", "--outDir", str(tmp_path))
    made = {path.name: path.read_text() for path in tmp_path.glob("*.d.ts")}
    kept = {path.name: path.read_text() for path in (PACKAGE / "types").glob("*.d.ts")}
    assert made == kept, "run 'tsc -p src/duly/clients/js'"


def test_a_program_in_typescript_is_checked_by_the_packages_types(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "duly").symlink_to(PACKAGE)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(HERE / "usage.ts", tmp_path)
    for n, guide in enumerate(("docs/js.md", "docs/zh/js.md")):
        (example,) = re.findall(r"```ts\n(.*?)```", (ROOT / guide).read_text(), re.DOTALL)
        (tmp_path / f"guide{n}.ts").write_text(example)
    words = "--strict --noEmit --module nodenext --target es2022 --types node usage.ts guide0.ts guide1.ts"
    check(compiler, *words.split(), cwd=tmp_path)


def test_the_package_says_what_it_is() -> None:
    about = json.loads((PACKAGE / "package.json").read_text())
    assert about["version"] == version("duly")
    assert not {"dependencies", "peerDependencies", "scripts"} & about.keys()
    for entry in about["exports"].values():
        assert (PACKAGE / entry["default"]).is_file()
        assert (PACKAGE / entry["types"]).is_file()


def test_an_app_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "js"), "--size"], capture_output=True, text=True, check=True
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{done.stdout}")
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)\.js: (\d+)", done.stdout)}
    assert sizes["app"] < APP_LIMIT
    assert sizes["index"] == len(gzip.compress((PACKAGE / "duly.js").read_bytes(), mtime=0))


def test_stores_hold_through_crashes() -> None:
    done = subprocess.run(
        node("--test", str(HERE)), capture_output=True, text=True, check=False, timeout=GUARD
    )
    assert done.returncode == 0, done.stdout
