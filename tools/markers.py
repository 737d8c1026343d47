"""Text between markers: the generated parts of documents that people otherwise write by hand.

A part begins with `<!-- generated NAME -->` and ends with `<!-- /generated NAME -->`, each on a line of its
own. `apply` writes the parts, or with `--check` says which of them are out of date and exits with 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class MissingMarker(Exception):
    """A document lacks the markers of a part that is generated for it."""


def replace(text: str, name: str, content: str) -> str:
    """The text with another content between the markers of this name.

    >>> replace("<!-- generated x -->\\nold\\n<!-- /generated x -->", "x", "new")
    '<!-- generated x -->\\n\\nnew\\n\\n<!-- /generated x -->'
    """
    begin, end = f"<!-- generated {name} -->", f"<!-- /generated {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise MissingMarker(f"'{begin}' and '{end}' must occur once, in this order")
    return pattern.sub(lambda _: f"{begin}\n\n{content.strip()}\n\n{end}", text)


def apply(
    documents: Mapping[str, Mapping[str, str]], tool: str, whole: Mapping[str, str] | None = None
) -> None:
    """Writes `documents[path][name]` between the markers of that name, and `whole[path]` as a file; with
    `--check` only compares."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, parts in documents.items():
        file = ROOT / path
        before = after = file.read_text(encoding="utf-8")
        for name, content in parts.items():
            try:
                after = replace(after, name, content)
            except MissingMarker as problem:
                sys.exit(f"{path}: {problem}")
        if after != before:
            stale.append(path)
            if not check:
                file.write_text(after, encoding="utf-8")
    for path, content in (whole or {}).items():
        file = ROOT / path
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            stale.append(path)
            if not check:
                file.write_text(content, encoding="utf-8")
    if check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run {tool}")
    sys.stdout.write("".join(f"wrote {path}\n" for path in stale))
