"""The proof: its parts, what it keeps, and the documents it writes."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from proof.__main__ import StepFailed, prove
from proof.counts import total
from proof.hostile import FRAMES, KINDS, attack
from proof.leaks import held
from proof.parts import COUNTED, FAULTS, FAULTS_OF, PYTHON, Part, Step, parts
from proof.record import ROOT, PublishedRun

from duly.apps.alerts.channels import webhook
from duly.storage.sqlite.file import LedgerFile
from proof import document, hostile, hostile_ledgers, hostile_webhooks, record

COUNT = "import proof.counts as c; c.count('cases', 3); c.count('cases', 4)"

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]

ENVIRONMENT = re.compile(r"DULY_[A-Z_]+=\w+")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "OUT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "0123456789")
    return tmp_path


def part_of(*programs: str) -> Part:
    steps = tuple(Step(str(n), (sys.executable, "-c", program)) for n, program in enumerate(programs))
    return Part("some", ("cases",), steps)


def run_of(part: str, *steps: str, commit: str = "0123456789", hour: int = 10, **counts: int) -> PublishedRun:
    """A run of steps; `power_losses=3` is what it counted."""
    counted = {what.replace("_", " "): many for what, many in counts.items()}
    date = f"2026-11-20T{hour}:00Z"
    return PublishedRun(part, [*steps], commit, date, "a machine", 9, counted, "make proof")


def test_what_programs_count_is_added_up(out: Path) -> None:
    done = prove([part_of(COUNT, COUNT)], "short", fresh=False, minutes=1)
    assert done["some"].counts == {"cases": 14}


def test_a_step_is_not_run_again_at_the_same_commit(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = out / "ran"
    part = part_of(f"open({str(mark)!r}, 'a').write('x'); {COUNT}")
    for fresh in (False, False, True):
        assert prove([part], "short", fresh=fresh, minutes=1)["some"].counts == {"cases": 7}
    assert mark.read_text() == "xx"
    monkeypatch.setattr(record, "commit", lambda: "another")
    prove([part], "short", fresh=False, minutes=1)
    assert mark.read_text() == "xxx"


def test_a_part_that_was_stopped_counts_what_was_run(out: Path) -> None:
    assert prove([part_of(COUNT, COUNT)], "short", fresh=False, minutes=0) == {}
    prove([part_of(COUNT)], "short", fresh=False, minutes=1)
    assert prove([part_of(COUNT, COUNT)], "short", fresh=False, minutes=0)["some"].counts == {"cases": 7}


def test_steps_run_beside_each_other_but_for_those_that_take_all_cores(out: Path) -> None:
    """The first two wait for each other; of the last two each fails if the other is there."""
    meet = "import pathlib, time\nme, other = (pathlib.Path({0!r}) / name for name in {1!r})\nme.touch()\n"
    meet += "while not other.exists(): time.sleep(0.01)\n" + COUNT
    alone = "import pathlib, sys, time\nmark = pathlib.Path({0!r}) / 'alone'\nif mark.exists(): sys.exit(1)\n"
    alone += "mark.touch(); time.sleep(0.2); mark.unlink()\n" + COUNT
    programs = [meet.format(str(out), ("a", "b")), meet.format(str(out), ("b", "a"))]
    beside = part_of(*programs).steps
    ones = tuple(
        Step(f"alone {n}", (sys.executable, "-c", alone.format(str(out))), alone=True) for n in range(2)
    )
    part = Part("some", ("cases",), (*beside, *ones))
    done = prove([part], "short", fresh=False, minutes=1, jobs=2)["some"]
    assert (done.counts, done.steps, done.of) == ({"cases": 28}, 4, 4)


def test_what_is_printed_to_replay_a_step_is_what_was_run(out: Path) -> None:
    """Every command as printed, read by a shell, is the step's own."""
    for part in (*parts(short=True), *parts(short=False)):
        for step in part.steps:
            words = shlex.split(step.line)
            named = [f"{name}={value}" for name, value in step.env.items()]
            assert words == [*named, PYTHON, *step.command[1:]]
            assert all(ENVIRONMENT.fullmatch(word) for word in named)
        paths = [word for step in part.steps for word in step.command if word.startswith("tests/")]
        assert all((ROOT / path.partition("::")[0]).exists() for path in paths)


def test_every_fault_has_its_steps() -> None:
    tests = re.findall(r"^async def (test_\w+)", (ROOT / FAULTS).read_text(), re.MULTILINE)
    assert sorted(tests) == sorted(FAULTS_OF.values())


def test_a_step_that_fails_says_how_to_replay_it(out: Path) -> None:
    with pytest.raises(StepFailed, match=r"replay: \.venv/bin/python -c") as failed:
        prove([part_of("print('what went wrong'); raise SystemExit(1)")], "short", fresh=False, minutes=1)
    assert "what went wrong" in str(failed.value)


@pytest.mark.parametrize("short", [True, False])
def test_every_part_has_steps_of_different_names(short: bool) -> None:
    for part in parts(short=short):
        paths = [record.path_of("short", part.name, step.name) for step in part.steps]
        assert len(set(paths)) == len(paths) > 0
    assert all((ROOT / path).exists() for path in COUNTED)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results.json"
    monkeypatch.setattr(record, "RECORD", path)
    return path


def test_runs_of_several_commits_are_added_up_and_each_names_its_commit(results: Path) -> None:
    every, here = parts(short=False), record.commit().rstrip("+")
    record.publish(every, [run_of("flood", "seed 0", commit=here, faults=3, messages_under_faults=100)])
    later = run_of("flood", "seed 1", commit="bbb", hour=11, faults=4, messages_under_faults=200)
    record.publish(every, [later])
    flood = record.results()["flood"]
    assert (flood.counts, flood.steps, flood.of) == ({"faults": 7, "messages under faults": 300}, 2, 21)
    said = document.measured("en", flood, "messages under faults")
    gone = document.GONE["en"]
    assert said == f"2026-11-20, `{here}`: 100; 2026-11-20, `bbb`{gone}: 200, 2 of 21 steps"


def test_a_run_that_did_not_count_a_figure_is_not_named_beside_it(results: Path) -> None:
    every = parts(short=False)
    record.publish(every, [run_of("hostile", "fd, 0", hostile_input=9)])
    later = run_of("hostile", "fd, 1", commit="bbb", hostile_input=9, watched_for_leaks=8)
    record.publish(every, [later])
    said = document.measured("en", record.results()["hostile"], "watched for leaks")
    assert said == f"2026-11-20, `bbb`{document.GONE['en']}, 1 of 78 steps"


def test_a_step_that_is_run_anew_is_not_counted_twice(results: Path) -> None:
    """A run that was counted together with others goes with them: how much of it was whose is not known."""
    every = parts(short=False)
    record.publish(every, [run_of("power", "seed 0", "seed 1", power_losses=50)])
    record.publish(every, [run_of("power", "seed 2", power_losses=25)])
    record.publish(every, [run_of("power", "seed 1", commit="bbb", power_losses=24)])
    assert record.results()["power"].counts == {"power losses": 49}


@pytest.mark.parametrize(("part", "what"), [("planted", "planted bugs"), ("soak", "soaked seconds")])
def test_where_each_run_counts_the_same_again_the_last_one_stands_for_all(
    results: Path, part: str, what: str
) -> None:
    every = parts(short=False)
    record.publish(every, [replace(run_of(part, "short"), counts={what: 20})])
    record.publish(every, [replace(run_of(part, "long"), counts={what: 30})])
    record.publish(every, [run_of("power", "seed 0", power_losses=1)])
    assert [*record.results()[part].counts.values()] == [30]


def test_what_was_counted_at_any_commit_is_left_out_where_only_new_seeds_are_wanted(out: Path) -> None:
    part = part_of(COUNT, "raise SystemExit('it was run again')")
    done = prove([part], "short", fresh=False, minutes=1, counted={("some", "1")})["some"]
    assert [run.steps for run in done.runs] == [["0"]]


@pytest.mark.parametrize(("before", "again"), [("aaa", False), ("aaa+", True), ("", True)])
def test_what_was_run_at_another_commit_stands_where_only_new_seeds_are_wanted(
    out: Path, monkeypatch: pytest.MonkeyPatch, before: str, again: bool
) -> None:
    """… if the tree was that commit."""
    for at in (before, "bbb"):
        monkeypatch.setattr(record, "commit", lambda at=at: at)
        done = prove([part_of(COUNT)], "short", fresh=False, minutes=1, counted=())["some"]
    assert [run.commit for run in done.runs] == ["bbb" if again else before]


def test_no_step_is_published_twice() -> None:
    published = [(run.part, step) for run in record.published() for step in run.steps]
    assert len(published) == len(set(published))


def test_what_is_published_names_a_commit_that_can_be_checked_out() -> None:
    asked = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).stdout.strip() != b"false":
        pytest.skip("a clone without history")
    for at, unreachable in {(run.commit, run.unreachable) for run in record.published()}:
        assert record.is_reachable(at) is not unreachable, f"{at}: proof/results.json says otherwise"


def test_every_row_of_the_document_is_counted_by_a_part() -> None:
    counted = {(part.name, what) for part in parts(short=False) for what in part.counts}
    assert {row[:2] for row in document.ROWS} <= counted


def test_the_documents_say_what_the_results_say() -> None:
    assert document.stale() == [], "run 'python -m proof.document'"


def test_a_document_that_differs_from_the_results_is_noticed(tmp_path: Path) -> None:
    for path in document.DOCUMENTS.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    results = record.results([run_of("power", "seed 0", power_losses=4_321, messages_under_faults=1)])
    assert document.stale(results, tmp_path) == list(document.DOCUMENTS.values())
    document.write(results, tmp_path)
    assert document.stale(results, tmp_path) == []
    assert "4,321" in (tmp_path / document.DOCUMENTS["zh"]).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_refused_by_an_error_of_ours(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as in the proof: what else runs in this one opens descriptors as well."""
    monkeypatch.setenv("DULY_PROOF_COUNTS", str(tmp_path / "counts"))
    command = [sys.executable, "-m", "proof.hostile", kind, "2000", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert total(tmp_path / "counts") == {"hostile input": 2_000, "watched for leaks": 1_000}


async def test_hostile_answers_of_webhooks_end_in_ways_that_a_tower_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DULY_PROOF_COUNTS", str(tmp_path / "counts"))
    monkeypatch.setattr(webhook, "SECONDS", webhook.SECONDS)
    await hostile_webhooks.attack(64, seed=0)
    assert total(tmp_path / "counts") == {"hostile input": 64}


async def test_damaged_files_of_ledgers_are_refused_or_read_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DULY_PROOF_COUNTS", str(tmp_path / "counts"))
    await hostile_ledgers.attack(60, seed=0)
    assert total(tmp_path / "counts") == {"hostile input": 60, "watched for leaks": 0}


async def test_a_reader_that_takes_damaged_files_of_ledgers_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not measure them: SQLite reads a page that is cut as if zeros followed."""
    monkeypatch.setattr(LedgerFile, "_inspect_length", lambda self, db: None)
    with pytest.raises(AssertionError, match="reads as another"):
        await hostile_ledgers.attack(400, seed=0)


async def test_a_channel_with_another_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def careless(self: webhook.WebhookChannel, notification: object) -> None:
        raise ValueError("an answer that was not expected")

    monkeypatch.setattr(webhook, "SECONDS", webhook.SECONDS)
    monkeypatch.setattr(webhook.WebhookChannel, "send", careless)
    with pytest.raises(ValueError, match="not expected"):
        await hostile_webhooks.attack(1, seed=0)


def test_a_decoder_with_another_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(raw: bytes) -> object:
        return raw.decode()

    monkeypatch.setitem(KINDS, "careless", (KINDS["frames"][0], careless))
    with pytest.raises(SystemExit, match=r"UnicodeDecodeError.*replay: python -m proof.hostile careless"):
        attack("careless", 2_000, seed=0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "it would end a later test"


def _keeps(raw: bytes, kept: list[object] = []) -> None:  # noqa: B006
    kept.append(raw)


@functools.cache
def _remembers(raw: bytes) -> bytes:
    return raw[::-1]


def _grows(raw: bytes, kept: bytearray = bytearray()) -> None:  # noqa: B008
    kept.extend(raw * 40)


def _allocates(raw: bytes) -> None:
    """As a library in C does, behind Python's back."""
    ctypes.memset(LIBC.malloc(1 << 14), 1, 1 << 14)


OPENED: list[int] = []


def _opens(raw: bytes) -> None:
    if raw.startswith(b"x" * 400):  # one case in some hundred
        OPENED.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


@pytest.mark.parametrize(
    ("leaky", "what"),
    [
        (_keeps, "blocks more"), (_remembers, "blocks more"), (_grows, "resident bytes more"),
        (_allocates, "resident bytes more"), (_opens, "descriptors more"),
    ],
)  # fmt: skip
def test_a_decoder_that_leaks_is_caught(
    leaky: Callable[[bytes], object], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DULY_PROOF_COUNTS", str(tmp_path / "counts"))
    monkeypatch.setitem(KINDS, "leaky", ([b"x" * 50], leaky))
    said = f"{what}.* after 4,000 cases; replay: python -m proof.hostile leaky"
    with pytest.raises(SystemExit, match=said):
        attack("leaky", 4_000, seed=0)
    assert total(tmp_path / "counts") == {}, "nothing is counted as watched"
    while OPENED:
        os.close(OPENED.pop())


def test_a_decoder_that_remembers_a_bounded_number_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = functools.lru_cache(4_096)(_remembers.__wrapped__)
    monkeypatch.setitem(KINDS, "bounded", (FRAMES, bounded))
    attack("bounded", 6_000, seed=0)


class _Lazy:
    """As Django's settings are, in a process that has imported them and uses none."""

    @property  # type: ignore[misc]  # a property, where a type declares a class
    def __class__(self) -> type:
        raise RuntimeError("not configured")


def test_what_a_process_holds_is_counted_beside_objects_that_do_not_tell_their_class() -> None:
    lazy = _Lazy()
    assert held().blocks > 0
    del lazy


async def test_a_channel_that_keeps_its_connections_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[socket.socket] = []

    async def careless(self: webhook.WebhookChannel, notification: object) -> None:
        left.append(socket.socket())

    monkeypatch.setattr(webhook, "SECONDS", webhook.SECONDS)
    monkeypatch.setattr(hostile_webhooks, "SLOW", 0.2)
    monkeypatch.setattr(webhook.WebhookChannel, "send", careless)
    with pytest.raises(TimeoutError):
        await hostile_webhooks.attack(3, seed=0)
    for each in left:
        each.close()


def test_a_slow_decoder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "SLOW", -1)
    with pytest.raises(SystemExit, match=r"took more than .*replay: python -m proof.hostile frames"):
        attack("frames", 2_000, seed=0)


def test_a_decoder_that_does_not_come_back_is_ended() -> None:
    """In C too, where no handler of Python's would run: the regular expression takes years."""
    stuck = "h.KINDS['stuck'] = ([b'x'], lambda raw: re.match('(a*)*b', 'a' * 60))"
    program = f"import re, proof.hostile as h; h.STUCK = 0.3; {stuck}; h.attack('stuck', 1, 0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGVTALRM
