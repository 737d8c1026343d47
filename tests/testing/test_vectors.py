"""The conformance vectors: up to date, and passed by the clients of every language."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from duly.clients.media import Media
from duly.testing import vectors
from duly.testing.loops import VirtualLoop
from tests.servers import missing

ROOT = Path(__file__).parents[2]
CLIENTS = Path(str(files("duly"))) / "clients"
WINDOWS = vectors.read("windows")["windows"]
Case = dict[str, Any]


def name_of(case: Case) -> str:
    return str(case.get("name") or case.get("why") or case.get("id"))


@pytest.fixture(scope="module")
def tool() -> Any:
    """`tools/vectors`, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        loader = SourceFileLoader("vectors_tool", str(ROOT / "tools" / "vectors"))
        module = module_from_spec(spec_from_loader("vectors_tool", loader) or pytest.fail("no such tool"))
        loader.exec_module(module)
        return module


@pytest.mark.parametrize("name", vectors.NAMES)
def test_they_are_what_the_core_makes_of_them(tool: Any, name: str) -> None:
    file = files("duly.testing.vectors").joinpath(f"{name}.json")
    assert tool.written(name) == file.read_text(encoding="utf-8"), "run tools/vectors"


@pytest.mark.parametrize("name", vectors.NAMES)
def test_every_file_is_in_the_package_and_says_what_it_is_about(name: str) -> None:
    cases = vectors.read(name)
    assert cases
    assert all(cases.values())


def test_the_readme_names_every_group() -> None:
    readme = files("duly.testing.vectors").joinpath("README.md").read_text()
    for name in vectors.NAMES:
        assert f"`{name}.json`" in readme
        for group in vectors.read(name):
            assert f"`{group}`" in readme


@pytest.mark.parametrize("case", vectors.read("media")["files"], ids=lambda case: case["media"]["size"])
def test_the_python_client_puts_chunks_together(case: Case) -> None:
    media = Media(**case["media"])
    parts = [base64.b64decode(chunk["data"]) for chunk in case["chunks"]]
    assert media.chunks == len(parts)
    assert b"".join(parts) == base64.b64decode(case["content"])
    assert hashlib.sha256(b"".join(parts)).hexdigest() == media.sha256


# ── MicroPython ──────────────────────────────────────────────────────────────────────────────────

ON_A_BOARD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from duly_device import Command, Memory, moment

def asked(question):
    verb, words = question[0], question[1:]
    if verb == "id":
        try:
            ms, n = moment(words[0])
        except ValueError:
            return "malformed"
        return [ms, str(n)]
    if verb == "sorted":
        return sorted(words[0], key=moment)
    if verb == "print":
        return Command(words[0]).print
    return played(*words)

def played(size, steps, folder):
    file = folder + "/flash.json"
    memory, said = Memory(size, file), []
    for step in steps:
        if "restart" in step:
            memory = Memory(size, file)
            continue
        command = Command({"type": "lock_control", "from": step["sender"], "seq_id": step["id"]})
        if memory.find(command):
            said.append("duplicate")
        elif memory.forgot(command):
            said.append("stale")
        else:
            said.append("fresh")
            if not step.get("refused"):
                memory.add(command)
                memory.save()
    return said

for question in json.loads(sys.stdin.read()):
    print(json.dumps(asked(question)))
"""


def ask_board(tmp_path: Path, questions: list[list[object]]) -> list[Any]:
    """What `duly_device.py` says, in MicroPython."""
    python = shutil.which("micropython") or missing("micropython")
    program = tmp_path / "board.py"
    program.write_text(ON_A_BOARD)
    command = [python, str(program), str(CLIENTS / "micropython")]
    asked = json.dumps(questions)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_micropython_reads_and_compares_ids(tmp_path: Path) -> None:
    ids = vectors.read("ids")
    asked: list[list[object]] = [["id", case["id"]] for case in ids["parse"]]
    asked += [["sorted", case["ascending"][::-1]] for case in ids["order"]]
    expected = ["malformed" if "malformed" in case else [case["ms"], case["n"]] for case in ids["parse"]]
    assert ask_board(tmp_path, asked) == expected + [case["ascending"] for case in ids["order"]]


@pytest.mark.parametrize("case", WINDOWS, ids=name_of)
def test_micropython_remembers_as_it_must(tmp_path: Path, case: Case) -> None:
    (said,) = ask_board(tmp_path, [["window", case["size"], case["steps"], str(tmp_path)]])
    assert said == [step["verdict"] for step in case["steps"] if "verdict" in step]


def test_micropython_tells_another_command_by_its_print(tmp_path: Path) -> None:
    cases = [case for case in vectors.read("fingerprints")["frames"] if device_sees(case)]
    said = ask_board(tmp_path, [["print", {**case["frame"], "from": "phone"}] for case in cases])
    assert [one == said[0] for one in said] == [case["same"] for case in cases]


def device_sees(case: Case) -> bool:
    """A hub tells a device neither `queue` nor another device's commands, and refuses an id that comes with
    another order, timeout or meaningless field itself."""
    return not case["frame"].keys() & {"queue", "order", "timeout", "traceparent", "n"} and (
        case["frame"]["to"] == "lock"
    )


@pytest.mark.parametrize("case", vectors.read("lanes")["device"], ids=name_of)
def test_micropython_keeps_the_order_of_each_lane(tmp_path: Path, case: Case) -> None:
    """In virtual time, with the Python that has it."""
    library: Any = run_path(str(CLIENTS / "micropython" / "duly_device.py"))
    loop = VirtualLoop()
    ended: dict[tuple[str, str], list[tuple[str, str]]] = {}
    lanes = {(one["sender"], one["id"]): (one["sender"], one["order"]["key"]) for one in case["arrive"]}

    def end(sender: str, id_: str, word: str) -> None:
        ended.setdefault(lanes[sender, id_], []).append((id_, word))

    async def arrive() -> None:
        device = library["Device"]("ws://hub", "token", file=str(tmp_path / "flash.json"))

        async def say(frame: dict[str, Any]) -> None:
            if frame.get("state") == "superseded":
                end(frame["to"], frame["seq_id"], "superseded")

        device._send = say
        device.on("lock_control")(lambda command: end(command.sender, command.id, "run"))
        worker = asyncio.create_task(device._work())
        for one in case["arrive"]:
            await asyncio.sleep(one["at"] / 1000 - loop.time())
            frame = {
                "type": "lock_control",
                "from": one["sender"],
                "seq_id": one["id"],
                "order": one["order"],
            }
            await device._take(library["Command"](frame))
        await asyncio.sleep(2)
        worker.cancel()

    loop.play(arrive())
    expected: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for one in case["outcome"]:
        expected.setdefault(lanes[one["sender"], one["id"]], []).append((one["id"], one["end"]))
    assert ended == expected


# ── C ────────────────────────────────────────────────────────────────────────────────────────────


@cache
def c_program(folder: Path, size: int) -> Path:
    compiler = shutil.which("gcc") or missing("gcc")
    target = folder / f"vectors-{size}"
    source = Path(__file__).parents[1] / "clients" / "c_device" / "vectors.c"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", f"-DDULY_IDS={size}"]
    done = subprocess.run(
        [compiler, *flags, f"-I{CLIENTS / 'c'}", "-o", target, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vectors")


def ask_c(program: Path, questions: Iterable[str]) -> list[str]:
    text = "\n".join(["new", *questions, ""])
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_c_reads_ids(folder: Path) -> None:
    cases = vectors.read("ids")["parse"]
    said = ask_c(c_program(folder, 100), (f"id {case['id']}" for case in cases))
    assert said == ["malformed" if "malformed" in case else f"{case['ms']} {case['n']}" for case in cases]


def test_c_compares_ids(folder: Path) -> None:
    for case in vectors.read("ids")["order"]:
        pairs = [(i, k) for i in range(len(case["ascending"])) for k in range(len(case["ascending"]))]
        said = ask_c(
            c_program(folder, 100),
            (f"compare {case['ascending'][i]} {case['ascending'][k]}" for i, k in pairs),
        )
        assert said == [str((i > k) - (i < k)) for i, k in pairs]


@pytest.mark.parametrize("case", WINDOWS, ids=name_of)
def test_c_remembers_as_it_must(folder: Path, case: Case) -> None:
    lines = (
        "restart" if "restart" in step else
        f"{'check' if 'refused' in step else 'see'} {step['sender']} {step['id']}" for step in case["steps"]
    )  # fmt: skip
    said = ask_c(c_program(folder, case["size"]), lines)
    assert said == [step["verdict"] for step in case["steps"] if "verdict" in step]


def test_c_tells_another_command_by_its_print(folder: Path) -> None:
    cases = [case for case in vectors.read("fingerprints")["frames"] if device_sees(case)]
    cases = [case for case in cases if case["why"] != "a field of its own"]  # over MQTT it is in the payload
    frames = [case["frame"] for case in cases]
    said = ask_c(
        c_program(folder, 3), (f"print {frame['type']} {json.dumps(frame['data'])}" for frame in frames)
    )
    assert [one == said[0] for one in said] == [case["same"] for case in cases]


# ── JavaScript ───────────────────────────────────────────────────────────────────────────────────

IN_NODE = """
import { readFileSync } from "node:fs";
const [source, file] = process.argv.slice(2);
const text = readFileSync(source, "utf8") + "\\nexport { nextId };";
const { nextId } = await import("data:text/javascript;base64," + Buffer.from(text).toString("base64"));
const cases = JSON.parse(readFileSync(file, "utf8")).cases;
for (const { last, now, next } of cases.mint) {
  const made = nextId(last, now);
  if (made !== next) throw new Error(`after ${last} at ${now}: ${made}, not ${next}`);
}
console.log(cases.mint.length);
"""


def test_javascript_mints_ids(tmp_path: Path) -> None:
    node = shutil.which("node") or missing("node")
    program = tmp_path / "vectors.mjs"
    program.write_text(IN_NODE)
    file = Path(str(files("duly.testing.vectors"))) / "ids.json"
    done = subprocess.run(
        [node, program, CLIENTS / "js" / "duly.js", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(vectors.read("ids")["mint"])
