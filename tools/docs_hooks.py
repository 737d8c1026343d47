"""Hooks of mkdocs: the texts at the root of the repository are pages of the site, too.

Their links are written for readers of the repository; on the site they lead to the same pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
LANGUAGES = {"py": "python", "sh": "sh", "pl": "perl"}
"""The languages of the examples, by the endings of their files."""
_LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?(\))")


def target(link: str, page: str) -> str:
    """Where a link of a text at the root leads on the site, as seen from its page."""
    inside = PAGES.get(link) or link.removeprefix("docs/").replace("examples/", "examples.md")
    if inside.endswith("adr/"):
        inside += "README.md"
    return f"../{inside}" if page.startswith("zh/") else inside


def for_site(text: str, page: str) -> str:
    """The text of a page, with its links as the site has them."""
    return _LINK.sub(lambda m: f"{m[1]}{target(m[2], page)}{m[3] or ''}{m[4]}", text)


def examples() -> str:
    """The list of examples, and each of them in full."""
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    programs = re.findall(r"\]\((\w+)\.(py|sh|pl)\)", text)
    shown = [re.sub(r"\]\((\w+)\.(py|sh|pl)\)", r"](#\1\2)", text)]
    for name, kind in programs:
        code = (ROOT / f"examples/{name}.{kind}").read_text(encoding="utf-8")
        shown.append(f"## {name}.{kind}\n\n```{LANGUAGES[kind]}\n{code}```\n")
    return "\n".join(shown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the texts at the root."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=for_site(text, page)))
    files.append(File.generated(config, "examples.md", content=examples()))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Links from a document up to a text at the root, or to an example, lead to its page."""
    for name, inside in PAGES.items():
        markdown = markdown.replace(f"](../{name})", f"]({inside})")
        markdown = markdown.replace(f"](../../{name})", f"](../{inside})")
    return re.sub(r"\]\(\.\./((?:\.\./)?)examples/(\w+)\.(py|sh|pl)\)", r"](\1examples.md#\2\3)", markdown)
