"""The rules for names, sizes and types that every file of `src/duly` keeps, checked by reading the source.

Each rule finds violations as pairs of a place ("core/inbox.py", "core/inbox.py Inbox") and a number. A
place that still breaks a rule is listed under that rule in `EXCEPTIONS` with the number it may reach. The
lists only get shorter: an entry that is no longer needed, or larger than needed, fails as well. `python -m
tests.test_house` prints the lists as they would have to be now.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).parents[1] / "src" / "duly"
FILES: Final = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
COPIED_WHOLE: Final = "clients/micropython/"
"""One file that a user copies to a small device: it repeats names of the program and may be longer."""

LINES_OF_A_FILE: Final = 600
LINES_OF_A_FUNCTION: Final = 60
PUBLIC_METHODS: Final = 25
"""Of one class, without those that it inherits; properties count, names with an underscore do not."""
USES_OF_ANY: Final = 225
"""In the whole program, imports not counted."""
HEAPS: Final = frozenset({"core/fair_queue.py", "core/timers.py"})

_RIDDLES: Final = """
vigil watched courier manifest endings parcel parcels route homes pulse neighbours elsewhere desk audience
seat place departures lines reception journal notice doorbell shelf image bet gather seal unseal express
look rough borrow town
"""
RIDDLES: Final = frozenset(_RIDDLES.split())
"""Words that tell a newcomer nothing about what the thing is."""
PLAIN_IN_A_FUNCTION: Final = frozenset({"lines", "place", "route", "look up", "see off"})
"""Words that are riddles only in the name of a module or class: a function may return lines."""

EXCEPTIONS: Final[dict[str, dict[str, int]]] = {
    "long_files": {
        "apps/gateway/mqtt_devices.py": 606,
        "apps/gateway/service.py": 603,
        "wire/fd.py": 611,
    },
    "long_functions": {
        "cli/acl.py try_": 61,
        "cli/alerts.py trigger": 70,
        "cli/node.py call": 61,
        "cli/profiles.py set_profile": 99,
        "cli/send.py send": 63,
        "cli/sentinel.py watch": 77,
        "cli/up.py up": 86,
        "clients/node/mailbox.py Mailbox.__init__": 63,
        "storage/interpreter.py Interpreter.apply": 82,
        "storage/memory.py MemoryLedger._apply": 80,
        "storage/sqlite/bulk.py UsualCase.add": 66,
    },
    "large_classes": {
        "apps/chat/subscriptions.py Subscriptions": 27,
        "apps/gateway/service.py GatewayService": 27,
        "clients/chat.py Chat": 28,
        "storage/ledger.py Ledger": 42,
        "storage/postgres/ledger.py PostgresLedger": 33,
        "storage/sqlite/ledger.py SqliteLedger": 27,
    },
    "repeated_classes": {
        "_Named": 2,
    },
    "missing_docstrings": {
        "apps/chat/conversations.py": 11,
        "apps/chat/friends.py": 1,
        "apps/chat/groups.py": 6,
        "apps/chat/receipts.py": 1,
        "apps/chat/remote_hubs.py": 5,
        "apps/chat/service.py": 8,
        "apps/chat/store.py": 13,
        "apps/chat/subscriptions.py": 9,
        "apps/gateway/control.py": 3,
        "apps/gateway/mqtt_devices.py": 5,
        "apps/gateway/presence.py": 2,
        "apps/gateway/pushes.py": 3,
        "apps/gateway/remote_hubs.py": 7,
        "apps/gateway/service.py": 13,
        "apps/gateway/unaddressed_acks.py": 2,
        "cli/__init__.py": 2,
        "cli/accounts.py": 1,
        "cli/bad_network.py": 2,
        "cli/common.py": 5,
        "cli/demo.py": 1,
        "cli/device.py": 6,
        "cli/node.py": 3,
        "clients/app.py": 2,
        "clients/chat.py": 14,
        "clients/http_link.py": 3,
        "clients/media.py": 5,
        "clients/mqtt_link.py": 4,
        "clients/node/mailbox.py": 2,
        "clients/node/outgoing.py": 4,
        "clients/node/peers.py": 2,
        "clients/node/statuses.py": 1,
        "clients/node/tasks.py": 3,
        "clients/pushes.py": 2,
        "clients/sentinel.py": 1,
        "clients/websocket_link.py": 4,
        "cluster/notifier.py": 3,
        "cluster/notifiers/local.py": 2,
        "cluster/notifiers/postgres.py": 2,
        "cluster/notifiers/redis.py": 2,
        "cluster/registry.py": 1,
        "core/acl.py": 1,
        "core/backlog.py": 2,
        "core/fair_queue.py": 2,
        "core/fanout/active.py": 3,
        "core/fanout/attempts.py": 1,
        "core/fanout/machine.py": 9,
        "core/fanout/plan.py": 1,
        "core/fanout/recipient_queue.py": 5,
        "core/high_water.py": 1,
        "core/inbox.py": 9,
        "core/lane.py": 3,
        "core/lifecycle.py": 3,
        "core/messages.py": 3,
        "core/monitor/devices.py": 4,
        "core/monitor/machine.py": 8,
        "core/monitor/pending.py": 7,
        "core/monitor/signals.py": 4,
        "core/monitor/suppression.py": 2,
        "core/ordering.py": 2,
        "core/outbox.py": 12,
        "core/signing.py": 2,
        "core/window.py": 1,
        "runtime/engine.py": 8,
        "runtime/tasks.py": 1,
        "server/router.py": 4,
        "storage/group_commit.py": 1,
        "storage/interpreter.py": 4,
        "storage/ledger.py": 11,
        "storage/memory.py": 8,
        "storage/postgres/flush.py": 3,
        "storage/postgres/ledger.py": 9,
        "storage/postgres/watch.py": 2,
        "storage/secret_box.py": 1,
        "storage/sql/__init__.py": 2,
        "storage/sql/rows.py": 11,
        "storage/sqlite/bulk.py": 1,
        "storage/sqlite/ledger.py": 9,
        "storage/sqlite/verbs.py": 1,
        "transports/connections.py": 5,
        "transports/http/alerts.py": 2,
        "transports/http/bodies.py": 2,
        "transports/http/fast_path.py": 6,
        "transports/http/logins.py": 12,
        "transports/http/messages.py": 23,
        "transports/http/static.py": 1,
        "transports/mqtt/address.py": 1,
        "transports/mqtt/link.py": 1,
        "transports/mqtt/packets.py": 1,
        "transports/mqtt/session.py": 9,
        "transports/websocket.py": 6,
        "wire/fd.py": 8,
        "wire/fields.py": 3,
        "wire/frames.py": 3,
        "wire/session.py": 8,
    },
    "riddles": {
        "apps/chat/remote_hubs.py": 2,
        "apps/chat/subscriptions.py": 2,
        "apps/gateway/mqtt_devices.py": 1,
        "apps/gateway/pushes.py": 1,
        "apps/gateway/remote_hubs.py": 2,
        "apps/gateway/service.py": 1,
        "cli/common.py": 1,
        "clients/node/outgoing.py": 1,
        "cluster/registry.py": 1,
        "core/fanout/machine.py": 1,
        "core/fanout/plan.py": 1,
        "runtime/engine.py": 1,
        "storage/interpreter.py": 1,
        "storage/postgres/ledger.py": 2,
        "storage/postgres/watch.py": 1,
        "storage/secret_box.py": 1,
        "storage/sqlite/bulk.py": 1,
        "storage/sqlite/file.py": 1,
        "storage/sqlite/ledger.py": 1,
        "transports/http/messages.py": 1,
        "transports/http/page_cursors.py": 1,
        "transports/mqtt/session.py": 1,
        "transports/websocket.py": 1,
    },
    "stray_heaps": {
        "apps/chat/subscriptions.py": 1,
        "core/fanout/active.py": 1,
        "core/fanout/recipient_queue.py": 1,
        "core/inbox.py": 1,
        "core/monitor/pending.py": 1,
        "core/ordering.py": 1,
        "core/outbox.py": 1,
    },
    "ignored_types": {
        "cli/output.py": 1,
    },
    "uses_of_any": {
        "src/duly": 348,
    },
}

Rule = Callable[[], Iterator[tuple[str, int, str]]]
"""Yields a place, a number and a sentence for each violation."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def text(file: str) -> str:
    return (SOURCE / file).read_text()


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(text(file))


def definitions(file: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Every class and function of a file with its dotted name; functions within functions are left out."""

    def within(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef | Function):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")

    return within(tree(file).body, "")


def length(node: ast.ClassDef | Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def words(name: str) -> list[str]:
    """The words of a name.

    >>> words("_look_for_Sleepers"), words("ImageEntry")
    (['look', 'for', 'sleepers'], ['image', 'entry'])
    """
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────


def long_files() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        lines = len(text(file).splitlines())
        if lines > LINES_OF_A_FILE and not file.startswith(COPIED_WHOLE):
            yield file, lines, f"has {lines} lines; at most {LINES_OF_A_FILE}"


def long_functions() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        for name, node in definitions(file):
            if isinstance(node, Function) and length(node) > LINES_OF_A_FUNCTION:
                yield (
                    f"{file} {name}",
                    length(node),
                    f"is {length(node)} lines long; at most {LINES_OF_A_FUNCTION}",
                )


def large_classes() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        for name, node in definitions(file):
            if isinstance(node, ast.ClassDef):
                public = {
                    each.name
                    for each in node.body
                    if isinstance(each, Function) and not each.name.startswith("_")
                }
                if len(public) > PUBLIC_METHODS:
                    yield (
                        f"{file} {name}",
                        len(public),
                        f"has {len(public)} public methods; at most {PUBLIC_METHODS}",
                    )


def repeated_classes() -> Iterator[tuple[str, int, str]]:
    count = Counter(
        node.name
        for file in FILES
        if not file.startswith(COPIED_WHOLE)
        for _, node in definitions(file)
        if isinstance(node, ast.ClassDef)
    )
    for name, times in sorted(count.items()):
        if times > 1:
            yield name, times, f"is the name of {times} classes; a class name occurs once"


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {
        node.name: node for file in FILES for _, node in definitions(file) if isinstance(node, ast.ClassDef)
    }


def inherits_docstring(owner: str, method: str) -> bool:
    """Whether a class of the program that the owner derives from says what the method does."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in classes()[owner].bases]
    known = [classes()[base.id] for base in bases if isinstance(base, ast.Name) and base.id in classes()]
    return any(
        any(
            isinstance(each, Function) and each.name == method and ast.get_docstring(each)
            for each in base.body
        )
        or inherits_docstring(base.name, method)
        for base in known
    )


def needs_docstring(name: str, node: ast.ClassDef | Function) -> bool:
    """Whether a public class or function lacks a docstring; a method may inherit its own."""
    *owners, own = name.split(".")
    if any(part.startswith("_") for part in (*owners, own)) or ast.get_docstring(node):
        return False
    return not (owners and isinstance(node, Function) and inherits_docstring(owners[-1], own))


def missing_docstrings() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        if file.startswith(COPIED_WHOLE):
            continue
        missing = [name for name, node in definitions(file) if needs_docstring(name, node)]
        if missing:
            yield file, len(missing), f"has no docstring for {', '.join(missing)}"


def riddles() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        modules = words(file.removesuffix(".py").replace("/", "_"))
        found = [each for each in modules if each in RIDDLES]
        for name, node in definitions(file):
            said = words(node.name)
            if isinstance(node, ast.ClassDef):
                strange = RIDDLES & set(said)
            else:
                pairs = {f"{one} {other}" for one, other in pairwise(said)}
                plain = {
                    each for allowed in PLAIN_IN_A_FUNCTION & (pairs | set(said)) for each in allowed.split()
                }
                strange = (RIDDLES & set(said)) - plain
                strange |= {"see off"} & pairs
            if strange:
                found.append(name)
        if found:
            yield file, len(found), f"uses words that are riddles to a newcomer: {', '.join(found)}"


def stray_heaps() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        uses = sum(
            (isinstance(node, ast.Import) and any(each.name == "heapq" for each in node.names))
            or (isinstance(node, ast.ImportFrom) and node.module == "heapq")
            for node in ast.walk(tree(file))
        )
        if uses and file not in HEAPS:
            yield file, uses, f"imports heapq; timers and queues are in {' and '.join(sorted(HEAPS))}"


def ignored_types() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        bare = []
        for token in tokenize.generate_tokens(io.StringIO(text(file)).readline):
            if token.type == tokenize.COMMENT and "type: ignore" in token.string:
                after = re.search(r"type: ignore\[[a-z, -]+\](.*)", token.string)
                if after is None or not re.search(r"\w{2}", after[1]):
                    bare.append(str(token.start[0]))
        if bare:
            yield file, len(bare), f"ignores a type without a code and a reason in line {', '.join(bare)}"


def uses_of_any() -> Iterator[tuple[str, int, str]]:
    uses = sum(
        isinstance(node, ast.Name) and node.id == "Any" for file in FILES for node in ast.walk(tree(file))
    )
    if uses > USES_OF_ANY:
        yield "src/duly", uses, f"uses Any {uses} times; at most {USES_OF_ANY}"


RULES: Final[tuple[Rule, ...]] = (
    long_files,
    long_functions,
    large_classes,
    repeated_classes,
    missing_docstrings,
    riddles,
    stray_heaps,
    ignored_types,
    uses_of_any,
)


@cache
def violations(rule: Rule) -> list[tuple[str, int, str]]:
    return list(rule())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    allowed = EXCEPTIONS.get(rule.__name__, {})
    broken = [
        f"{place} {sentence}"
        for place, number, sentence in violations(rule)
        if number > allowed.get(place, 0)
    ]
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_exception_is_larger_than_it_has_to_be(rule: Rule) -> None:
    found = {place: number for place, number, _ in violations(rule)}
    stale = [
        f"{place}: {allowed} is allowed, {found.get(place, 0)} needed; correct EXCEPTIONS[{rule.__name__!r}]"
        for place, allowed in EXCEPTIONS.get(rule.__name__, {}).items()
        if found.get(place, 0) < allowed
    ]
    assert not stale, "\n".join(["", *stale])


def test_the_exceptions_are_sorted_and_belong_to_a_rule() -> None:
    assert EXCEPTIONS.keys() <= {rule.__name__ for rule in RULES}
    for rule, places in EXCEPTIONS.items():
        assert list(places) == sorted(places), f"the exceptions of {rule} are not sorted"


if __name__ == "__main__":
    for each in RULES:
        if found := sorted((place, number) for place, number, _ in each()):
            print(f'    "{each.__name__}": {{')  # noqa: T201
            for place, number in found:
                print(f'        "{place}": {number},')  # noqa: T201
            print("    },")  # noqa: T201
