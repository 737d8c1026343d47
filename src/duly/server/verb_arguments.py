"""The arguments of the verbs that a hub carries out for admins and for visitors of the dashboard."""

from __future__ import annotations

import msgspec

from duly.errors import Malformed


class VerbArguments(dict[str, str]):
    """The arguments of a verb, by name. Reading one that is missing raises an error that names it.

    >>> VerbArguments(name="lock")["role"]
    Traceback (most recent call last):
    duly.errors.Malformed: 'role' is missing; add it to the JSON object in the body
    """

    def __missing__(self, name: str) -> str:
        raise Malformed(f"{name!r} is missing; add it to the JSON object in the body")


def read_arguments(body: bytes) -> VerbArguments:
    """Read the body of a request, a JSON object whose values are texts; raises `Malformed`."""
    try:
        return VerbArguments(msgspec.json.decode(body, type=dict[str, str]))
    except (msgspec.DecodeError, ValueError) as problem:
        raise Malformed(
            f'the body is not a JSON object of texts, such as {{"name":"lock"}}: {problem}'
        ) from None
