"""The texts say what is true: examples run as printed, links lead somewhere, names exist."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import duly
from tests.guard import GUARD

ROOT = Path(__file__).parent.parent
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OF_CONTRIBUTORS = {"release.md"}
"""The documents that only contributors need; they are in English alone."""
GUIDES = sorted(path for path in ROOT.glob("docs/*.md") if path.name not in OF_CONTRIBUTORS)
FIGURES = ROOT / "docs/performance.md"
"""Figures are written once, in English; the Chinese text says what is measured and how to read it."""
PAIRS = [(ROOT / "README.md", ROOT / "README.zh-CN.md")] + [
    (path, ROOT / "docs/zh" / path.name) for path in GUIDES if path != FIGURES
]
"""The texts that say the same in both languages."""
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(duly.__path__, "duly.") if not m.name.endswith("__main__")
)


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readmes_example_runs_as_printed(readme: str, tmp_path: Path) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code
    assert shown
    for _ in range(2):  # and again: the stored answer comes back
        done = subprocess.run(
            [sys.executable, "-c", code[1]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=GUARD,
        )
        assert done.stdout == shown[1]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_module_opens_with_its_law(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.parametrize("name", duly.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(duly, name).__doc__


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_the_texts_lead_somewhere(text: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", text.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (text.parent / target).exists(), f"{text.name} points to {target}"


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_a_heading_lead_to_one(text: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text.read_text(encoding="utf-8")):
        if target.endswith(".md") or not target:
            page = text.parent / target if target else text
            assert anchor in anchors(page), f"{text.name} points to {target}#{anchor}"


def test_the_promises_are_the_designs_own_words() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for promise in (
        "P1 Accepted means stored.",
        "P2 One id, one outcome.",
        "P3 Effects.",
        "P4 Order.",
        "P5 No silent end.",
    ):
        assert f"**{promise}**" in readme


@pytest.mark.parametrize("tool", ["tools/map", "tools/reference", "tools/js"])
def test_the_generated_parts_are_up_to_date(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, tool, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_texts_use_the_words_of_the_program(text: Path) -> None:
    """Neither names that were given up nor the documents that the design once began with."""
    if text.name in {"CHANGELOG.md", "0031-layout-and-names.md"}:
        return
    words = text.read_text(encoding="utf-8")
    given_up = r"(?i)\b(?:doorbell|courier|vigil|borrow\w*|shel[fv]\w*|seed 00\d)\b|种子 00\d|门铃"
    assert not re.findall(given_up, words)


def test_the_map_shows_the_files_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tree = text.split("<!-- generated tree -->")[1].split("<!-- /generated tree -->")[0]
    shown = set(re.findall(r"\b(\w+)\.py\b", tree))
    here = {path for path in (ROOT / "src/duly").rglob("*.py") if not path.stem.startswith("__")}
    assert shown == {path.stem for path in here}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_the_texts_name_exist(text: Path) -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text.read_text(encoding="utf-8"))
    missing = [
        name for name in named if not any((base / name).exists() for base in (ROOT / "src/duly", ROOT))
    ]
    assert not missing, f"{text.name} names {', '.join(missing)}"


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        (
            "hub.md",
            "`patience` `window` `max_age` `remember` app.download( device.serve( --no-resend app.online",
        ),
        (
            "wire.md",
            "`timeout` `progress` `online` `last_heard` `media_download` `media_download_chunk` sha256",
        ),
        ("wire.md", '`from` `seq_id` order.after --no-resend "state":"delivered" welcome'),
    ],
)
@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_what_the_author_of_a_device_needs_is_written_down(folder: str, guide: str, words: str) -> None:
    """Settings, fields, and the rules that a device must follow, in both languages."""
    text = (ROOT / folder / guide).read_text(encoding="utf-8")
    missing = [word for word in words.split() if word not in text]
    assert not missing, f"{folder}/{guide} does not name {', '.join(missing)}"


@pytest.mark.parametrize("text", GUIDES, ids=lambda path: path.name)
def test_every_guide_exists_in_chinese_and_is_on_the_site(text: Path) -> None:
    assert (ROOT / "docs/zh" / text.name).exists()
    assert f": zh/{text.name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "chinese"), PAIRS, ids=lambda path: path.name)
def test_the_chinese_texts_have_the_same_parts(text: Path, chinese: Path) -> None:
    """Headings, paragraphs, rows of tables, items of lists and blocks of code, in the same order."""
    assert skeleton(chinese) == skeleton(text)


@pytest.mark.parametrize(("text", "chinese"), PAIRS, ids=lambda path: path.name)
def test_the_chinese_texts_name_the_same_things(text: Path, chinese: Path) -> None:
    """Every option, field, command and setting of the English text; placeholders are translated."""
    here, there = (
        set(re.findall(r"`([a-z_]\w+|--[a-z-]+|GET [^`\s]+|duly [a-z ]+)`", prose(path)))
        for path in (text, chinese)
    )
    assert here <= there, f"{chinese.name} lacks {', '.join(sorted(here - there))}"


def test_the_chinese_map_shows_the_packages_that_exist() -> None:
    text = (ROOT / "docs/zh/architecture.md").read_text(encoding="utf-8")
    tree = text.split("<!-- packages -->")[1].split("<!-- /packages -->")[0]
    shown = re.findall(r"^  +(\w+)/ ", tree, re.MULTILINE)
    here = [
        path.name
        for path in (ROOT / "src/duly").rglob("*")
        if path.is_dir() and path.name != "__pycache__" and path.parent.name != "sql"
    ]
    assert sorted(shown) == sorted(here)


def anchors(text: Path) -> set[str]:
    """The anchors of a text's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def prose(text: Path) -> str:
    """A text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def skeleton(text: Path) -> list[str]:
    """What a text is made of, without its words."""
    parts: list[str] = []
    code, begins = False, True
    for line in text.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            code = not code
            parts.append("code" if code else "end")
        elif not code and (mark := re.match(r"#+ |\||- |\d+\. ", line)):
            parts.append(mark[0])
        elif not code and begins and re.match(r"[^\s<]", line):
            parts.append("paragraph")
        begins = not line or line.startswith("```")
    return parts


def test_the_python_reference_names_everything_public_and_nothing_else() -> None:
    """`make docs` cannot be built otherwise; errors have a page of their own."""
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    for name in named:
        module, _, own = name.rpartition(".")
        assert hasattr(importlib.import_module(module), own), f"there is no {name}"
    errors = {name for name in duly.__all__ if name in vars(duly.errors)} | {"errors"}
    assert {f"duly.{name}" for name in duly.__all__ if name not in errors} <= set(named)
