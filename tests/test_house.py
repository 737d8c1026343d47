"""The rules for names, sizes and types that every file of `src/duly` keeps, checked by reading the source.
That a type is ignored only for a reason holds for tests, benchmarks and examples, too; that a class name
occurs once holds for the program and for the tests, each for itself.

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
ROOT: Final = SOURCE.parents[1]
TYPED_TOO: Final = sorted(
    "../../" + path.relative_to(ROOT).as_posix()
    for folder in ("tests", "bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
"""Files outside of the program that mypy reads as strictly."""
COPIED_WHOLE: Final = "clients/micropython/"
"""One file that a user copies to a small device: it repeats names of the program and may be longer."""

LINES_OF_A_FILE: Final = 600
LINES_OF_A_FUNCTION: Final = 60
PUBLIC_METHODS: Final = 25
"""Of one class, without those that it inherits; properties count, names with an underscore do not."""
ALL_METHODS: Final = 28
"""Of one class, private ones too, without those that it inherits."""
USES_OF_ANY: Final = 140
"""In the whole program, imports not counted."""
HEAPS: Final = frozenset({"core/timers.py"})
SIMULATION: Final = "testing/sim/"
"""It drives production code from inside, and crashes it where no caller could."""

_RIDDLES: Final = """
vigil watched courier manifest endings parcel parcels route homes pulse neighbours elsewhere desk audience
seat place departures lines reception notice doorbell shelf image bet gather seal unseal express
look rough borrow town
"""
RIDDLES: Final = frozenset(_RIDDLES.split())
"""Words that tell a newcomer nothing about what the thing is."""
PLAIN_IN_A_FUNCTION: Final = frozenset({"lines", "place", "route", "look up", "see off"})
"""Words that are riddles only in the name of a module or class: a function may return lines."""
VAGUE_PEOPLE: Final = re.compile(r"\b(nobody|somebody|whoever|anybody)\b", re.IGNORECASE)
"""Pronouns where the program has a noun: a recipient, a sender, an account, a process."""

DESCRIBES: Final = re.compile(
    r"(the|a|an|all|every|each|one|whether|what|when|where|how|this|these)\b"
    r"|(?!(pass|process|press|address|guess)\b)[a-z]+s\b",
    re.IGNORECASE,
)
"""How a docstring begins that describes a thing, or says what a function does and not what it is to do."""
LAWS: Final = "testing/"
"""Its checkers are laws, which their docstrings state; what a world calls says when it is called."""

WAITS: Final = frozenset({"create_task", "ensure_future", "call_later", "call_at"})
"""What makes a timer or a task; `asyncio.sleep` and `time.sleep` count with them."""
VERB: Final = "the tasks of one verb, which ends with them"
OWN_WAITS: Final[dict[str, tuple[int, str]]] = {
    "broker/embedded.py": (2, "waits for the child to end, or for the stop, whichever is first"),
    "broker/verify.py": (3, "a check of a broker: what must not arrive is given a moment to arrive"),
    "cli/bad_network.py": (4, "a network that delays frames and lets some overtake others"),
    "cli/chat.py": (2, VERB),
    "cli/common.py": (1, "`poll`, the one wait of the command line for what a hub does not tell by itself"),
    "cli/demo.py": (1, "the pace at which a person presses buttons"),
    "cli/device.py": (3, VERB),
    "cli/home_assistant.py": (1, "the moment that a broker has before the verb complains"),
    "cli/node.py": (5, f"{VERB}, and the moment that a broker has before a verb complains"),
    "cli/sentinel.py": (5, VERB),
    "cli/top.py": (1, "the pace at which metrics are shown"),
    "cli/up.py": (2, VERB),
    "clients/chat_positions.py": (1, "acknowledges many lines at once, a little later"),
    "clients/node/mailbox.py": (1, "the moment in which another process may claim the mailbox"),
    "clients/node/outgoing.py": (1, "stores many receipts at once, a little later"),
    "clients/node/peers.py": (1, "lets the refusals of one moment be written together"),
    "clients/node/tasks.py": (1, "the caller's own limit for its wait"),
    "idempotency/leases.py": (1, "renews the leases of all runs under way with one timer"),
    "idempotency/ledgers.py": (
        2,
        "opens a ledger for all callers that wait for it; keys are forgotten by a timer: a loop that is "
        "closed without being shut down would complain of a task",
    ),
    "idempotency/runs.py": (
        2,
        "a write that a cancelled caller must not cut short; one that its caller waits for later",
    ),
    "integrations/asgi.py": (1, "the answer to a request whose handler goes on; the request waits for it"),
    "integrations/guarded_application.py": (
        1,
        "a request whose client may go; the request waits for it, and its failure is logged if that has gone",
    ),
    "runtime/backoff.py": (1, "the pause between two tries"),
    "runtime/engine.py": (4, "the task that drives the machines, and what it waits for"),
    "runtime/refusal_tally.py": (1, "the pause between two records, in a job of the supervisor"),
    "runtime/tasks.py": (5, "the supervisor"),
    "runtime/wake_timer.py": (1, "the timer of all machines"),
    "server/router.py": (1, "a turn for other clients between the frames of one array"),
    "storage/item_loader.py": (1, "one read for all that ask in one turn of the loop"),
    "storage/postgres/watch.py": (5, "notices a database that does not answer"),
    "storage/sql/polled.py": (1, "looks for what another process has ended, for all who wait"),
    "storage/sqlite/flushes.py": (2, "the tables follow the journal, and a flush waits for them at times"),
    "storage/sqlite/lock_file.py": (
        1,
        "a process that only looks whether a file is held does so for a moment",
    ),
    "storage/sqlite/shared.py": (3, "waits for another process: to open, to write; and ends a session"),
    "transports/connections.py": (2, "limits of a connection: time to log in, time to read the last answer"),
    "transports/frame_socket.py": (1, "a turn for other clients between the messages of one read"),
    "transports/http/alertmanager.py": (1, "a turn for other clients between the alerts of one webhook"),
    "transports/http/fast_path.py": (1, "one task for a request; it ends with its connection"),
    "transports/http/frame_batches.py": (
        2,
        "the caller's own limit for its wait: of one, and of all together",
    ),
    "transports/mqtt/link.py": (2, "waits for several things, whichever is first"),
    "transports/mqtt/session.py": (1, "the keepalive of one connection"),
    "transports/websocket.py": (3, "the writer of one connection, and the limit for its close"),
}
"""Where tasks and timers are made outside of `testing/`, how many, and why not by the engine or the
supervisor."""

EXCEPTIONS: Final[dict[str, dict[str, int]]] = {
    "crowded_classes": {
        "core/inbox.py Inbox": 35,
        "core/ordering.py Lanes": 35,
    },
    "foreign_privates": {
        "cli/common.py": 1,
        "storage/postgres/ledger.py": 1,
        "transports/connections.py": 1,
    },
    "vague_people": {
        "apps/alerts/profiles.py": 3,
        "cli/profiles.py": 2,
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


def methods(node: ast.ClassDef) -> set[str]:
    """The names of the methods that a class defines itself; a property with a setter is one."""
    return {each.name for each in node.body if isinstance(each, Function)}


def large_classes() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        for name, node in definitions(file):
            if isinstance(node, ast.ClassDef):
                public = {each for each in methods(node) if not each.startswith("_")}
                if len(public) > PUBLIC_METHODS:
                    yield (
                        f"{file} {name}",
                        len(public),
                        f"has {len(public)} public methods; at most {PUBLIC_METHODS}",
                    )


def crowded_classes() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        for name, node in definitions(file):
            number = len(methods(node)) if isinstance(node, ast.ClassDef) else 0
            if number > ALL_METHODS:
                yield f"{file} {name}", number, f"has {number} methods; at most {ALL_METHODS}"


def repeated_classes() -> Iterator[tuple[str, int, str]]:
    tests = [file for file in TYPED_TOO if file.startswith("../../tests/")]
    for where, files in (("the program", FILES), ("the tests", tests)):
        count = Counter(
            node.name
            for file in files
            if not file.startswith(COPIED_WHOLE)
            for _, node in definitions(file)
            if isinstance(node, ast.ClassDef)
        )
        for name, times in sorted(count.items()):
            if times > 1:
                yield name, times, f"is the name of {times} classes of {where}; a class name occurs once"


def named_types(file: str) -> Iterator[str]:
    """The names of the type aliases at the top of a file: `Name: TypeAlias = …`, or `Name = Callable[…]`."""
    for node in tree(file).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][a-z]\w*", target.id):
            yield target.id


def ambiguous_types() -> Iterator[tuple[str, int, str]]:
    """Names of types that only an underscore tells apart, or that are a class and an alias."""
    files = [file for file in FILES if not file.startswith(COPIED_WHOLE)]
    classes = [
        node.name.lstrip("_")
        for file in files
        for _, node in definitions(file)
        if isinstance(node, ast.ClassDef)
    ]
    aliases = {name.lstrip("_") for file in files for name in named_types(file)}
    for name, times in sorted((Counter(classes) + Counter(aliases)).items()):
        if times > 1:
            yield name, times, f"is the name of {times} types, an underscore aside; a name means one thing"


def is_overload(node: ast.ClassDef | Function) -> bool:
    """Whether this is one signature of a function that is defined below it."""
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def says_nothing(node: ast.ClassDef | Function) -> bool:
    """Whether a docstring has no words but those of the name that it explains."""
    said = set(words(ast.get_docstring(node) or ""))
    return said <= {*words(node.name), "a", "an", "the"}


def needs_docstring(name: str, node: ast.ClassDef | Function) -> bool:
    """Whether a public class, function or method lacks a docstring that says more than its name."""
    own = name.rpartition(".")[2]
    return not own.startswith("_") and not is_overload(node) and says_nothing(node)


def missing_docstrings() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        missing = [name for name, node in definitions(file) if needs_docstring(name, node)]
        if missing:
            yield file, len(missing), f"has no docstring with more than the name for {', '.join(missing)}"


def is_value(node: Function) -> bool:
    """Whether a function is read as an attribute, and so described by a noun."""
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def docstrings_without_order() -> Iterator[tuple[str, int, str]]:
    """Docstrings of functions that describe a thing, and do not begin like an order: "Return the …"."""
    for file in FILES:
        if file.startswith((LAWS, COPIED_WHOLE)):
            continue
        found = [
            name
            for name, node in definitions(file)
            if isinstance(node, Function)
            and not is_value(node)
            and DESCRIBES.match(ast.get_docstring(node) or "")
        ]
        if found:
            yield file, len(found), f"does not say what to do (Return …, Send …) in {', '.join(found)}"


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


def vague_people() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        found = VAGUE_PEOPLE.findall(text(file))
        if found:
            yield file, len(found), f"says {', '.join(sorted(set(found)))} where it has a noun"


def vague_tests() -> Iterator[tuple[str, int, str]]:
    """Names of tests with such a pronoun, where the account, sender or recipient could be named."""
    for file in TYPED_TOO:
        names = [node.name for _, node in definitions(file) if isinstance(node, Function)]
        found = [name for name in names if VAGUE_PEOPLE.search(" ".join(words(name)))]
        if found:
            yield file, len(found), f"has names that say nobody or somebody: {', '.join(found)}"


def private(name: str) -> bool:
    """Whether a name is its owner's alone; those that every named tuple has are public."""
    of_a_tuple = name in ("_replace", "_asdict", "_fields", "_make")
    return name.startswith("_") and not name.startswith("__") and not of_a_tuple


def foreign_privates() -> Iterator[tuple[str, int, str]]:
    """Uses of another object's underscore names; a class may use those of its own kind."""
    for file in FILES:
        if file.startswith(SIMULATION):
            continue
        nodes = list(ast.walk(tree(file)))
        own = {node.name for node in nodes if isinstance(node, Function)}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and of_itself(node)}
        found = [
            ast.unparse(node)
            for node in nodes
            if isinstance(node, ast.Attribute)
            and private(node.attr)
            and node.attr not in own
            and not of_itself(node)
        ]
        if found:
            yield file, len(found), f"uses underscore names of other objects: {', '.join(found)}"


def of_itself(node: ast.Attribute) -> bool:
    """Whether this is an attribute of `self`, `cls` or `super()`."""
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def stray_heaps() -> Iterator[tuple[str, int, str]]:
    for file in FILES:
        uses = sum(
            (isinstance(node, ast.Import) and any(each.name == "heapq" for each in node.names))
            or (isinstance(node, ast.ImportFrom) and node.module == "heapq")
            for node in ast.walk(tree(file))
        )
        if uses and file not in HEAPS:
            yield file, uses, "imports heapq; the timer queue is core/timers.py"


@cache
def waits(file: str) -> list[str]:
    """The places of a file that make a task or a timer, or sleep."""
    return [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute)
        and (node.attr in WAITS or ast.unparse(node) in ("asyncio.sleep", "time.sleep"))
    ]


def unexplained_waits() -> Iterator[tuple[str, int, str]]:
    """Work that goes on is the supervisor's, and what is due later the engine's: so it is logged, counted,
    restarted and stopped. Anything else needs a reason."""
    for file in FILES:
        if file.startswith(("testing/", COPIED_WHOLE)):
            continue
        allowed, _ = OWN_WAITS.get(file, (0, ""))
        if len(waits(file)) > allowed:
            found = ", ".join(waits(file))
            yield file, len(waits(file)), f"has tasks or timers of its own, {allowed} with a reason: {found}"


def ignored_types() -> Iterator[tuple[str, int, str]]:
    for file in (*FILES, *TYPED_TOO):
        bare = []
        if "type: ignore" not in text(file):
            continue  # most of the files: the tokens of all take three seconds
        for token in tokenize.generate_tokens(io.StringIO(text(file)).readline):
            if token.type == tokenize.COMMENT and re.search(r"#\s*type: ignore", token.string):
                after = re.search(r"type: ignore\[[a-z, -]+\](.*)", token.string.partition("# noqa")[0])
                if after is None or not re.search(r"\w{2}", after[1]):
                    bare.append(str(token.start[0]))
        if bare:
            yield file, len(bare), f"ignores a type without a code and a reason in line {', '.join(bare)}"


def folders_called_data() -> Iterator[tuple[str, int, str]]:
    """`data` is a payload; a parameter or field that holds a path has another name."""
    for file in FILES:
        found = [
            node.lineno
            for node in ast.walk(tree(file))
            if (isinstance(node, ast.arg) and node.arg == "data")
            or (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == "data"
            )
            if node.annotation is not None and re.search(r"\bPath\b", ast.unparse(node.annotation))
        ]
        if found:
            yield file, len(found), f"calls a path `data` in line {', '.join(map(str, found))}"


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
    crowded_classes,
    repeated_classes,
    ambiguous_types,
    missing_docstrings,
    riddles,
    docstrings_without_order,
    vague_people,
    vague_tests,
    foreign_privates,
    stray_heaps,
    unexplained_waits,
    ignored_types,
    folders_called_data,
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


def test_every_reason_for_a_wait_is_still_needed() -> None:
    needed = {file: len(waits(file)) if file in FILES else 0 for file in OWN_WAITS}
    assert needed == {file: number for file, (number, _) in OWN_WAITS.items()}
    assert list(OWN_WAITS) == sorted(OWN_WAITS)


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
