"""The judge of floods is not blind: each way of spoiling a sound history is found, by its name."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.flood_judge import judge, judge_tasks

STAMP = 1_700_000_000_000
DONE = 10
CONV = "person0+person1"


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sound(folder: Path) -> Path:
    """Three commands, two lines and an alert, and all is well; the third command was superseded."""
    ids = [f"{STAMP}_{n}" for n in range(3)]
    write(
        folder / "app0.history", ["ordered", True], *(["sent", id_, "dev0"] for id_ in ids),
        ["accepted", ids[0], 0], ["end", ids[0], "done", {"n": ids[0]}], ["end", ids[1], "superseded", None],
        ["end", ids[2], "done", {"n": ids[2]}],
    )  # fmt: skip
    write(folder / "dev0.history", ["did", "app0", ids[0], ids[0]], ["did", "app0", ids[2], ids[2]])
    write(
        folder / "person0.history", ["connected"], ["sent", ids[0], "person1"], ["stored", ids[0], CONV, 1],
        ["told", CONV, 2, f"<person1 {ids[1]}>"],
    )  # fmt: skip
    write(
        folder / "person1.history", ["connected"], ["told", CONV, 1, f"<person0 {ids[0]}>"],
        ["sent", ids[1], "person0"], ["stored", ids[1], CONV, 2],
    )  # fmt: skip
    write(folder / "guard0.history", ["sent", ids[0], ""], ["stored", f"guard0-{ids[0]}"])
    write(folder / "told", [f"guard0-{ids[0]}", "d1", ""])
    db = sqlite3.connect(folder / "ledger.db")
    db.execute("CREATE TABLE journal (n INTEGER)")
    db.execute(
        "CREATE TABLE messages (key BLOB, kind TEXT, recipient TEXT, body BLOB, state INTEGER, answer BLOB)"
    )
    db.execute("CREATE TABLE entries (stream TEXT, n INTEGER, body BLOB)")
    for id_, state in zip(ids, (DONE, 13, DONE), strict=True):
        body = json.dumps({"n": id_}).encode()
        db.execute(
            "INSERT INTO messages VALUES (?, 'lock_control', 'dev0', ?, ?, ?)", (b"", body, state, body)
        )
    event = b"\0" * 6 + b"guard0\0guard0-" + ids[0].encode()
    db.execute("INSERT INTO messages VALUES (?, 'alert_event', '', '', ?, NULL)", (event, DONE))
    for n in (0, 1):
        db.execute(
            "INSERT INTO entries VALUES ('chat/person0+person1', ?, ?)",
            (n + 1, f"<person{n} {ids[n]}>".encode()),
        )
    db.commit()
    db.close()
    return folder


Spoil = Callable[[Path], None]


def without(name: str, n: int) -> Spoil:
    """Remove a line."""

    def spoil(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        del lines[n]
        (folder / name).write_text("".join(lines))

    return spoil


def more(name: str, *line: object) -> Spoil:
    """Add a line."""

    def spoil(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    return spoil


def stored(statement: str) -> Spoil:
    """Change the hub's file."""

    def spoil(folder: Path) -> None:
        db = sqlite3.connect(folder / "ledger.db")
        db.execute(statement)
        db.commit()
        db.close()

    return spoil


FIRST, SECOND = f"{STAMP}_0", f"{STAMP}_1"
SPOILED: dict[str, list[Spoil]] = {
    "lost: done, and nothing happened": [without("dev0.history", 0)],
    "double: done twice": [more("dev0.history", "did", "app0", FIRST, FIRST)],
    "phantom: done and never sent": [more("dev0.history", "did", "app0", f"{STAMP}_9", f"{STAMP}_9")],
    "phantom: done elsewhere": [more("dev1.history", "did", "app0", FIRST, FIRST)],
    "wrong answer in the hub's file": [
        stored("UPDATE messages SET answer = NULL WHERE state = 10"),
        stored(f"UPDATE messages SET answer = CAST('{{\"n\": \"{STAMP}_9\"}}' AS BLOB) WHERE state = 10"),
    ],
    "phantom: told what others say": [more("person0.history", "told", "person1+person2", 1, "")],
    "phantom: said elsewhere": [more("person0.history", "sent", FIRST, "person2")],
    "wrong content": [more("dev0.history", "did", "app0", SECOND, "other")],
    "wrong answer: superseded, and it happened": [more("dev0.history", "did", "app0", SECOND, SECOND)],
    "wrong answer: it ended twice": [more("app0.history", "end", FIRST, "failed", None)],
    "unsettled: no end was learned": [without("app0.history", 5)],
    "lost: accepted, and no end": [more("app0.history", "accepted", f"{STAMP}_7", 0)],
    "out of order": [more("dev0.history", "did", "app0", SECOND, SECOND)],
    "unknown, and more than may be": [more("app0.history", "end", "x", "unknown", None)],
    "the hub's file and the apps differ": [stored("UPDATE messages SET state = 2 WHERE state = 13")],
    "refused": [more("app0.history", "refused", FIRST, {}), more("guard0.history", "refused", "g", {})],
    "lost: a gap in a conversation of the hub's file": [stored("DELETE FROM entries WHERE n = 1")],
    "lost: a line that was stored": [stored("DELETE FROM entries WHERE n = 1")],
    "double: a line is stored twice": [
        stored("INSERT INTO entries SELECT stream, 3, body FROM entries WHERE n = 1")
    ],
    "phantom: stored and never sent": [without("person0.history", 1)],
    "unsettled: no answer to a line": [without("person0.history", 2)],
    "wrong answer: another number for a repeat": [more("person0.history", "stored", FIRST, CONV, 5)],
    "wrong content: told other than stored": [more("person1.history", "told", CONV, 3, "<person0 other>")],
    "out of order: told after a later one": [more("person0.history", "told", CONV, 1, "")],
    "lost: a line that was never told": [
        stored(f"INSERT INTO entries VALUES ('chat/person0+person1', 3, CAST('<person0 {STAMP}_4>' AS BLOB))")
    ],
    "lost: an alert that was not told": [without("told", 0)],
    "double: an alert told as two": [more("told", f"guard0-{FIRST}", "d2", "")],
    "unsettled: an alert that has not ended": [
        stored("UPDATE messages SET state = 1 WHERE kind = 'alert_event'")
    ],
    "unsettled: no answer to an alert": [without("guard0.history", 1)],
    "phantom: an alert that was never sent": [more("told", "guard0-other", "d2", "")],
    "unreadable": [stored("INSERT INTO journal VALUES (1)")],
}  # fmt: skip


def test_a_sound_history_is_found_sound(tmp_path: Path) -> None:
    found = judge(sound(tmp_path))
    assert found.wrong == {}
    assert dict(found.messages) == {"commands": 3, "lines": 2, "alerts": 1}


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    ("kind", "spoil"), [(kind, spoil) for kind, spoils in SPOILED.items() for spoil in spoils]
)
def test_what_is_wrong_is_found_by_its_name(tmp_path: Path, kind: str, spoil: Spoil, forgets: bool) -> None:
    spoil(sound(tmp_path))
    assert kind in judge(tmp_path, forgets=forgets).wrong


def test_commands_and_alerts_may_be_missing_only_in_the_file_of_a_hub_that_forgets_them(
    tmp_path: Path,
) -> None:
    stored("DELETE FROM messages")(sound(tmp_path))
    assert judge(tmp_path, forgets=True).wrong == {}
    assert judge(tmp_path).wrong.keys() == {
        "the hub's file and the apps differ", "unsettled: an alert that has not ended",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "line", "kind"),
    [
        ("B.did", "A.0", "double: done twice"),
        ("B.did", "A.7", "phantom: done and never sent"),
        ("A.ended", "A.0 done", "wrong answer: it ended twice"),
        ("A.ended", "A.1 unknown", "unsettled, or a wrong answer"),
    ],
)
def test_what_is_wrong_with_tasks_is_found(tmp_path: Path, file: str, line: str, kind: str) -> None:
    for name, other in ("AB", "BA"):
        (tmp_path / f"{name}.did").write_text(f"{other}.0\n{other}.1\n")
        (tmp_path / f"{name}.ended").write_text(f"{name}.0 done\n{name}.1 done\n")
        db = sqlite3.connect(tmp_path / f"{name}.db")
        db.execute("CREATE TABLE journal (n INTEGER)")
        db.execute("CREATE TABLE messages (key BLOB, kind TEXT, state INTEGER)")
        for scope in "AB":
            for n in (0, 1):
                key = b"\0" * 6 + f"{scope}\0{scope}.{n}".encode()
                db.execute("INSERT INTO messages VALUES (?, 'work', ?)", (key, DONE))
        db.commit()
        db.close()
    assert judge_tasks(tmp_path, ("A", "B"), 2).wrong == {}
    with (tmp_path / file).open("a") as out:
        out.write(line + "\n")
    assert kind in judge_tasks(tmp_path, ("A", "B"), 2).wrong
