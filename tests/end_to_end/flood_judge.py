"""Judges a flood by its clients' histories, its devices' effects, what a webhook receiver took and the hub's
file.

    python -m tests.end_to_end.flood_judge FOLDER

The law: nothing is lost, double, phantom, wrong or unsettled. Nothing here imports duly, or what the clients
are made of: it reads files. Their lines are JSON arrays that begin with a word.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

STATES: Final = {10: "done", 11: "failed", 12: "expired", 13: "superseded", 14: "cancelled", 15: "unknown"}
WITHOUT_EFFECT: Final = ("superseded", "expired", "failed", "cancelled")
_TEXT: Final = re.compile(rb"<([a-z0-9]+) ([0-9]+_[0-9]+)>")
_NUMBER: Final = re.compile(rb'"n":\s*"([0-9_]+)"')


class Verdicts:
    """What was found wrong: how often, and the first cases of each kind."""

    def __init__(self) -> None:
        self.wrong: dict[str, list[object]] = {}
        self.messages: Counter[str] = Counter()

    def note(self, kind: str, case: object) -> None:
        """Add a case."""
        self.wrong.setdefault(kind, []).append(case)

    def __str__(self) -> str:
        found = [f"{kind}: {len(cases)}, such as {cases[:5]}" for kind, cases in self.wrong.items()]
        return "\n".join(found) or "nothing lost, double, phantom, wrong or unsettled"


def lines_of(path: Path) -> Iterator[list[Any]]:
    """The lines of a history."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def judge(folder: Path, *, unknown: int = 0, forgets: bool = False) -> Verdicts:
    """Judge the histories in a folder. `unknown`: of how many commands it may be unknown whether they
    happened. `forgets`: the hub's file may lack commands and alerts, which it keeps for minutes only."""
    found = Verdicts()
    histories = {path.stem: path for path in sorted(folder.glob("*.history"))}
    db = sqlite3.connect(f"file:{folder}/ledger.db?mode=ro", uri=True)
    try:
        if db.execute("SELECT count(*) FROM journal").fetchone() != (0,):
            found.note("unreadable", "the hub's file still has a journal")
        commands = {n: p for n, p in histories.items() if n.startswith(("app", "dev"))}
        _commands(found, commands, db, unknown, forgets=forgets)
        _lines(found, {n: p for n, p in histories.items() if n.startswith("person")}, db)
        guards = {n: p for n, p in histories.items() if n.startswith("guard")}
        _alerts(found, guards, folder, db, forgets=forgets)
    finally:
        db.close()
    return found


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def _commands(
    found: Verdicts, histories: dict[str, Path], db: sqlite3.Connection, unknown: int, *, forgets: bool
) -> None:
    effects: Counter[tuple[str, str]] = Counter()
    places: set[tuple[str, str, str]] = set()
    order: dict[tuple[str, str], list[int]] = {}
    for device, path in histories.items():
        for what, *rest in lines_of(path) if device.startswith("dev") else ():
            if what == "did":
                app, seq_id, said = rest
                effects[app, seq_id] += 1
                places.add((app, seq_id, device))
                order.setdefault((app, device), []).append(int(seq_id.split("_")[1]))
                if said != seq_id:
                    found.note("wrong content", (device, app, seq_id, said))
    stored: Counter[tuple[str, str, str]] = Counter()
    for recipient, body, state, answer in db.execute(
        "SELECT recipient, body, state, answer FROM messages WHERE kind = 'lock_control'"
    ):
        (number,) = _NUMBER.findall(body)
        if STATES.get(state) == "done" and _NUMBER.findall(answer or b"") != [number]:
            found.note("wrong answer in the hub's file", (recipient, number.decode(), answer))
        stored[recipient, number.decode(), STATES.get(state, f"open ({state})")] += 1
    learned: Counter[tuple[str, str, str]] = Counter()
    known: set[tuple[str, str, str]] = set()
    doubts = 0
    for app, path in histories.items():
        if app.startswith("app"):
            doubts += _app(found, app, path, effects, order, learned, known)
    sent = {case[:2] for case in known}
    for place in places - known:
        found.note(f"phantom: done {'elsewhere' if place[:2] in sent else 'and never sent'}", place)
    for case, times in effects.items():
        if times > 1:
            found.note("double: done twice", (case, times))
    for end in (stored - learned) + (Counter() if forgets else learned - stored):
        found.note("the hub's file and the apps differ", (end, stored[end], learned[end]))
    if doubts > unknown:
        found.note("unknown, and more than may be", (doubts, unknown))


def _app(
    found: Verdicts, app: str, path: Path, effects: Counter[tuple[str, str]],
    order: dict[tuple[str, str], list[int]], learned: Counter[tuple[str, str, str]],
    known: set[tuple[str, str, str]],
) -> int:  # fmt: skip
    """Judge the commands of one app; of how many it is unknown whether they happened."""
    sent: dict[str, str] = {}
    ends: dict[str, tuple[str, Any]] = {}
    accepted: Counter[str] = Counter()
    ordered = False
    for what, *rest in lines_of(path):
        match what, rest:
            case "ordered", [bool(ordered)]:
                pass
            case "sent", [seq_id, to]:
                sent[seq_id] = to
            case "accepted", [seq_id, _]:
                accepted[seq_id] += 1
            case "refused", [seq_id, frame]:
                found.note("refused", (app, seq_id, frame))
            case "end", [seq_id, state, data]:
                before = ends.get(seq_id)
                if before is not None and before[0] != "unknown" and before != (state, data):
                    found.note("wrong answer: it ended twice", (app, seq_id, before, state))
                ends[seq_id] = (state, data)
    known.update((app, seq_id, to) for seq_id, to in sent.items())
    found.messages["commands"] += len(sent)
    for seq_id, to in sent.items():
        state, data = ends.get(seq_id, ("", None))
        times = effects[app, seq_id]
        learned[to, seq_id, state] += 1
        if not state:
            found.note("unsettled: no end was learned", (app, seq_id))
        elif state == "done" and times != 1:
            found.note("lost: done, and nothing happened", (app, seq_id))
        elif state == "done" and data != {"n": seq_id}:
            found.note("wrong answer", (app, seq_id, data))
        elif state in WITHOUT_EFFECT and times:
            found.note(f"wrong answer: {state}, and it happened", (app, seq_id))
        elif state == "superseded" and not ordered:
            found.note("superseded without an order", (app, seq_id))
    for (who, device), numbers in order.items():
        late = [pair for pair in pairwise(numbers) if pair[1] < pair[0]]
        if who == app and ordered and late:
            found.note("out of order", (app, device, late[:3]))
    for seq_id in accepted.keys() - ends.keys():
        found.note("lost: accepted, and no end", (app, seq_id))
    for seq_id in ends.keys() - sent.keys():
        found.note("phantom: an end of what was never sent", (app, seq_id))
    return sum(state == "unknown" for state, _ in ends.values())


# ── lines ────────────────────────────────────────────────────────────────────────────────────────


def _lines(found: Verdicts, histories: dict[str, Path], db: sqlite3.Connection) -> None:
    streams: dict[str, dict[int, tuple[str, str]]] = {}
    for stream, n, body in db.execute(
        "SELECT stream, n, body FROM entries WHERE stream LIKE 'chat/%' ORDER BY stream, n"
    ):
        said = _TEXT.search(body)
        text = (said[1].decode(), said[2].decode()) if said else ("", "")
        streams.setdefault(stream.removeprefix("chat/"), {})[n] = text
    where: dict[tuple[str, str], tuple[str, int]] = {}
    for conv, entries in streams.items():
        if list(entries) != list(range(1, len(entries) + 1)):
            found.note("lost: a gap in a conversation of the hub's file", conv)
        for n, text in entries.items():
            if text in where and text[0]:
                found.note("double: a line is stored twice", (text, where[text], (conv, n)))
            where[text] = (conv, n)
    sent: set[tuple[str, str]] = set()
    members: dict[str, set[str]] = {}
    for person, path in histories.items():
        _person(found, person, path, streams, where, sent, members)
    for text in where.keys() - sent - {("", "")}:
        found.note("phantom: stored and never sent", text)


def _person(
    found: Verdicts, person: str, path: Path, streams: dict[str, dict[int, tuple[str, str]]],
    where: dict[tuple[str, str], tuple[str, int]], sent: set[tuple[str, str]], members: dict[str, set[str]],
) -> None:  # fmt: skip
    own: dict[str, str] = {}
    stored: dict[str, tuple[str, int]] = {}
    told: dict[str, set[int]] = {}
    last: dict[str, int] = {}
    for what, *rest in lines_of(path):
        match what, rest:
            case "connected", _:
                last.clear()
            case "sent", [seq_id, to]:
                own[seq_id] = to if to.startswith("#") else "+".join(sorted((person, to)))
            case "refused", [seq_id, frame]:
                found.note("refused", (person, seq_id, frame))
            case "told", [conv, n, _] if conv[0] != "#" and person not in conv.strip("~").split("+"):
                found.note("phantom: told what others say", (person, conv, n))
            case "stored", [seq_id, conv, n]:
                if stored.setdefault(seq_id, (conv, n)) != (conv, n):
                    found.note("wrong answer: another number for a repeat", (person, seq_id))
            case "told", [conv, n, text]:
                seen = told.setdefault(conv, set())
                # What was not acknowledged is told again; what is told for the first time comes in order.
                if n <= last.get(conv, 0) and n not in seen:
                    found.note("out of order: told after a later one", (person, conv, n))
                last[conv] = max(n, last.get(conv, 0))
                seen.add(n)
                if text and f"<{' '.join(streams.get(conv, {}).get(n, ('', '')))}>" != text:
                    found.note("wrong content: told other than stored", (person, conv, n, text))
    found.messages["lines"] += len(own)
    sent.update((person, seq_id) for seq_id in own)
    for seq_id, conv in own.items():
        if seq_id in stored and stored[seq_id][0] != conv:
            found.note("phantom: said elsewhere", (person, seq_id, conv, stored[seq_id]))
        if seq_id not in stored:
            found.note("unsettled: no answer to a line", (person, seq_id))
        elif where.get((person, seq_id)) != stored[seq_id]:
            found.note("lost: a line that was stored", (person, seq_id, where.get((person, seq_id))))
    for conv, seen in told.items():
        missing = {n for n, (author, _) in streams.get(conv, {}).items() if author != person} - seen
        if missing:
            found.note("lost: a line that was never told", (person, conv, sorted(missing)[:5], len(missing)))


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────


def _alerts(
    found: Verdicts, histories: dict[str, Path], folder: Path, db: sqlite3.Connection, *, forgets: bool
) -> None:
    told: dict[str, set[str]] = {}
    for event, delivery, _ in lines_of(folder / "told"):
        told.setdefault(event, set()).add(delivery)
    ends = {
        key[6:].split(b"\0")[1].decode(): STATES.get(state, f"open ({state})")
        for key, state in db.execute("SELECT key, state FROM messages WHERE kind = 'alert_event'")
    }
    sent: set[str] = set()
    for guard, path in histories.items():
        stored = set()
        for what, *rest in lines_of(path):
            match what, rest:
                case "sent", [seq_id, _]:
                    sent.add(f"{guard}-{seq_id}")
                    found.messages["alerts"] += 1
                case "stored", [event]:
                    stored.add(event)
                case "refused", [event, frame]:
                    found.note("refused", (guard, event, frame))
        for event in {one for one in sent if one.startswith(f"{guard}-")} - stored:
            found.note("unsettled: no answer to an alert", event)
    for event in sent:
        if event not in told:
            found.note("lost: an alert that was not told", (event, ends.get(event)))
        elif len(told[event]) > 1:
            found.note("double: an alert told as two", (event, told[event]))
        if ends.get(event) != "done" and not (forgets and event not in ends):
            found.note("unsettled: an alert that has not ended", (event, ends.get(event)))
    for event in (told.keys() | ends.keys()) - sent:
        found.note("phantom: an alert that was never sent", event)


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def judge_tasks(folder: Path, names: tuple[str, str], many: int) -> Verdicts:
    """Judge the tasks that two nodes have sent each other, `many` each: by what each did, how each of its own
    ended, and their files."""
    found = Verdicts()
    for sender, receiver in (names, names[::-1]):
        did = Counter((folder / f"{receiver}.did").read_text().splitlines())
        ended = [line.split() for line in (folder / f"{sender}.ended").read_text().splitlines()]
        wanted = {f"{sender}.{n}" for n in range(many)}
        found.messages["tasks"] += many
        for task, times in Counter(task for task, _ in ended).items():
            if times > 1:
                found.note("wrong answer: it ended twice", task)
        for task in wanted - {task for task, _ in ended}:
            found.note("unsettled: no end was learned", task)
        for task, state in ended:
            if state != "done":
                found.note("unsettled, or a wrong answer", (task, state))
        for task, times in did.items():
            if times > 1:
                found.note("double: done twice", (task, times))
        for task in wanted - did.keys():
            found.note("lost: done, and nothing happened", task)
        for task in did.keys() - wanted:
            found.note("phantom: done and never sent", task)
        for name in (sender, receiver):
            _tasks_in(found, folder / f"{name}.db", wanted)
    return found


def _tasks_in(found: Verdicts, path: Path, wanted: set[str]) -> None:
    """Compare the tasks of one sender with the file of a node that has sent or done them."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        if db.execute("SELECT count(*) FROM journal").fetchone() != (0,):
            found.note("unreadable", f"{path.name} still has a journal")
        rows = db.execute("SELECT key, state FROM messages WHERE kind = 'work'").fetchall()
    finally:
        db.close()
    states = {key[6:].split(b"\0")[1].decode(): STATES.get(state, f"open ({state})") for key, state in rows}
    for task in wanted:
        if states.get(task) != "done":
            found.note("a node's file and its history differ", (path.name, task, states.get(task)))


if __name__ == "__main__":
    verdicts = judge(Path(sys.argv[1]), unknown=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sys.stdout.write(f"{dict(verdicts.messages)}: {verdicts}\n")
    sys.exit(bool(verdicts.wrong))
