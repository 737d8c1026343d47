"""The conformance vectors: up to date, and passed by the clients of every language."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
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
from duly_device import Command, Memory, moment, next_id
from duly_mqtt import Key, content, split_id

def asked(question):
    verb, words = question[0], question[1:]
    if verb == "mint":
        return next_id(words[0] or "", words[1])
    if verb == "sign":
        try:
            return Key(words[0]).sign(words[1])
        except ValueError:
            return "malformed"
    if verb == "content":
        return content(json.loads(words[0]), words[1])
    if verb == "task":
        try:
            return list(split_id(words[0]))
        except ValueError:
            return "malformed"
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


def test_micropython_mints_ids_of_pushes(tmp_path: Path) -> None:
    cases = vectors.read("ids")["mint"]
    said = ask_board(tmp_path, [["mint", case["last"], case["now"]] for case in cases])
    assert said == [case["next"] for case in cases]


def test_micropython_signs(tmp_path: Path) -> None:
    cases = [case for case in vectors.read("signatures")["signed"] if case["kid"] == HMAC_KEY["kid"]]
    assert cases
    key = f"{HMAC_KEY['kid']}:{HMAC_KEY['secret']}"
    asked: list[list[object]] = [["sign", key, fields_in(case["canonical"])] for case in cases]
    asked += [["sign", wrong, []] for wrong in ("", "kid", key[:-4], key[1:], key.replace(":", " "))]
    expected = [json.loads(case["message"])["sig"] for case in cases]
    assert ask_board(tmp_path, asked) == [*expected, *["malformed"] * 5]


def fields_in(canonical: str) -> list[str]:
    """The fields in canonical bytes: each is led by its length."""
    data, fields = bytes.fromhex(canonical), []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        fields.append(data[4:end].decode())
        data = data[end:]
    return fields


def test_micropython_takes_the_ids_of_tasks_apart(tmp_path: Path) -> None:
    cases = vectors.read("ids")["task"]
    said = ask_board(tmp_path, [["task", case["msg_id"]] for case in cases])
    assert said == ["malformed" if "malformed" in case else [case["app"], case["seq_id"]] for case in cases]


def test_micropython_reads_contents_whose_form_is_told(tmp_path: Path) -> None:
    """A hub always tells it. Bytes that are no text have no meaning as a command's data."""
    cases = [case for case in vectors.read("contents")["read"] if case["enc"]]
    meant = [meaning(case) for case in cases]
    said = ask_board(tmp_path, [["content", case["raw"], case["enc"]] for case in cases])
    assert [one for one, value in zip(said, meant, strict=True) if value is not NO_TEXT] == [
        value for value in meant if value is not NO_TEXT
    ]


NO_TEXT = object()


def meaning(case: Case) -> object:
    data = base64.b64decode(case["bytes"])
    if case["form"] == "json" and case["raw"].startswith('"'):
        return data.decode()
    try:
        return json.loads(data) if data else None
    except ValueError:
        pass
    try:
        return data.decode()
    except UnicodeDecodeError:
        return NO_TEXT


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


@pytest.mark.parametrize("case", vectors.read("lanes")["device"], ids=name_of)
def test_c_keeps_the_order_of_each_lane(folder: Path, case: Case) -> None:
    lanes = {f"{one['sender']}:{one['id']}": (one["sender"], one["order"]["key"]) for one in case["arrive"]}
    said = ask_c(
        c_program(folder, 100),
        [
            f"arrive {one['at']} {one['sender']} {one['id']} {one['order']['key'] or '-'} "
            f"{one['order']['mode']} {one['order']['after']}"
            for one in case["arrive"]
        ]
        + ["pass 2000"],
    )
    ended: dict[tuple[str, str], list[tuple[str, str]]] = {}
    began: dict[str, int] = {}
    for line in said:
        end, name, *at = line.split()
        name = ":".join(name.split(":")[:2])
        ended.setdefault(lanes[name], []).append((name, end))
        began[name] = int(at[0]) if at else 0
    expected: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for one in case["outcome"]:
        name = f"{one['sender']}:{one['id']}"
        expected.setdefault(lanes[name], []).append((name, one["end"]))
        assert one["end"] != "run" or began[name] >= one["at"]
    assert ended == expected


HMAC_KEY = next(key for key in vectors.read("signatures")["keys"] if key["algorithm"] == "hmac-sha256")


def signed_fields(case: Case) -> list[str]:
    """The fields of a message that are signed, in their order; a content is led by '='."""
    said = json.loads(case["message"])

    def content(name: str) -> str:
        return "=" + (json.dumps(said[name]) if said.get(name) is not None else "")

    match case["kind"]:
        case "pending":
            order = [json.dumps(said["order"], separators=(",", ":"))] if said.get("order") else []
            return [
                said["msg_id"],
                said["action"],
                str(said["time"]),
                str(said["exp"]),
                content("payload"),
                *order,
            ]
        case "status":
            fields = [
                str(said[name]) for name in ("time", "battery", "rssi", "ip", "version", "uptime", "session")
            ]
            return [
                fields[0],
                str(int(said["online"])),
                *fields[1:],
                content("data"),
                str(said["heartbeat"] * 1000),
            ]
        case kind:
            return [
                said["msg_id"],
                content({"ack": "progress", "complete": "value", "failed": "error"}[kind]),
            ]


def c_key() -> str:
    return f"key {HMAC_KEY['kid']}:{HMAC_KEY['secret']}"


def test_c_signs_fields_led_by_their_length(folder: Path) -> None:
    secret = base64.b64decode(HMAC_KEY["secret"])
    cases = vectors.read("signatures")["canonical"]
    said = ask_c(
        c_program(folder, 100),
        [c_key(), *("fields" + "".join(f"\t{field}" for field in case["fields"]) for case in cases)],
    )
    assert said == [
        "taken",
        *(hmac.digest(secret, bytes.fromhex(one["bytes"]), "sha256").hex() for one in cases),
    ]


def test_c_signs_messages(folder: Path) -> None:
    cases = [case for case in vectors.read("signatures")["signed"] if case["kid"] == HMAC_KEY["kid"]]
    assert {case["kind"] for case in cases} == {"pending", "ack", "complete", "failed", "status"}
    said = ask_c(
        c_program(folder, 100),
        [
            c_key(),
            *(
                f"signed {case['kind']} {case['prefix']} {case['signer']} {case['reader'] or '-'}"
                + "".join(f"\t{field}" for field in signed_fields(case))
                for case in cases
            ),
        ],
    )
    signatures = [base64.b64decode(json.loads(case["message"])["sig"]).hex() for case in cases]
    assert said == ["taken", *signatures]


@pytest.mark.parametrize(
    "key", ["", "a654bd828d36d296", f"a654:{HMAC_KEY['secret']}", "a654bd828d36d296:ICEi", "x" * 61]
)
def test_c_takes_no_key_that_is_none(folder: Path, key: str) -> None:
    assert ask_c(c_program(folder, 100), [f"key {key}"]) == ["refused"]


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
