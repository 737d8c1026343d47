"""An extension of griffe: the examples in docstrings are shown as code.

Docstrings show examples as plain doctests; without a fence, Markdown takes `>>>` for a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*(?:\n\s*\n>>> .*(?:\n(?!\s*$).*)*)*", re.MULTILINE)
"""Lines from a prompt up to the next empty line, together with the examples that follow directly."""


def fenced(text: str) -> str:
    """The text of a docstring, with its doctests in fences."""
    return _EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", text)


class FencedDoctests(griffe.Extension):
    """Puts the doctests of every docstring into fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
