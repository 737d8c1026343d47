"""`duly demo`: what duly is for, in a few seconds."""

from __future__ import annotations


def demo() -> None:
    """A hub, a lock and a lamp behind a bad network, and what happened."""
