"""`duly node call task status`, and the seed's four terminals, with mosquitto_pub and mosquitto_sub."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests import servers
from tests.cli.conftest import Place
from tests.clients.node.nodes import own_name


class Terminals(Place):
    """A place with a broker."""

    port: int
    b: str

    def at(self, name: str) -> list[str]:
        return ["--url", f"mqtt://{name}@127.0.0.1:{self.port}"]

    def sub(self, name: str, kind: str) -> subprocess.Popen[str]:
        args = ["-h", "127.0.0.1", "-p", str(self.port), "-t", f"nodes/{name}/{kind}", "-q", "1", "-u", name]
        sub = subprocess.Popen(
            ["stdbuf", "-oL", "mosquitto_sub", *args, "-P", "x", "-C", "1", "-W", "20", "-d"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert sub.stdout is not None
        while "SUBACK" not in sub.stdout.readline():
            pass
        return sub

    def pub(self, by: str, name: str, kind: str, message: object) -> None:
        args = ["-h", "127.0.0.1", "-p", str(self.port), "-t", f"nodes/{name}/{kind}", "-q", "1", "-u", by]
        text = message if isinstance(message, str) else json.dumps(message)
        subprocess.run(["mosquitto_pub", *args, "-P", "x", "-m", text], check=True, timeout=10)


@pytest.fixture
def place(
    tmp_path_factory: pytest.TempPathFactory, mosquitto_server: servers.Mosquitto
) -> Iterator[Terminals]:
    if shutil.which("mosquitto_pub") is None:
        servers.missing("mosquitto-clients")
    it = Terminals(tmp_path_factory.mktemp("terminals"))
    it.port, it.b = mosquitto_server.port, own_name("B")
    yield it
    it.end()


def heard(sub: subprocess.Popen[str]) -> object:
    assert sub.stdout is not None
    with sub.stdout as lines:
        (message,) = [line for line in lines if line.startswith("{")]
    sub.wait(25)
    return json.loads(message)


def start_b(place: Terminals, *more: str) -> None:
    run = ["--run", "test=echo task completed successfully", "--run", "fail=echo no bulb >&2; exit 3"]
    node = place.start("node", place.b, *place.at(place.b), *run, "--run", "echo=cat", *more)
    node.line("online")


def test_the_four_terminals_with_a_duly_node_as_b(place: Terminals) -> None:
    start_b(place)
    a = own_name("A")
    complete, ack = place.sub(a, "complete"), place.sub(a, "ack")
    task = {"sender": a, "receiver": place.b, "msg_id": "msg001", "action": "test", "time": 1234567890}
    place.pub(a, place.b, "pending", task | {"exp": 9999999999, "payload": {}})
    assert heard(ack) == {"msg_id": "msg001"}
    assert heard(complete) == {"msg_id": "msg001", "value": "task completed successfully"}


def test_the_four_terminals_with_a_duly_node_as_a(place: Terminals) -> None:
    a = own_name("A")
    pending = place.sub(place.b, "pending")
    calling = place.start("call", place.b, "test", '{"lamp":1}', *place.at(a), "--form", "json")
    task = heard(pending)
    assert isinstance(task, dict)
    assert (task["sender"], task["receiver"], task["payload"]) == (a, place.b, {"lamp": 1})
    place.pub(place.b, a, "complete", {"msg_id": task["msg_id"], "value": "task completed successfully"})
    assert calling.line() == '"task completed successfully"'
    assert calling.process.wait(10) == 0


def test_a_call_prints_the_result_and_exits_as_it_ended(place: Terminals) -> None:
    start_b(place)
    a = place.at(own_name("A"))
    done = place.duly("call", place.b, "echo", "[1,2]", *a)
    assert (done.returncode, json.loads(done.stdout)["payload"]) == (0, [1, 2])
    failed = place.duly("call", place.b, "fail", *a)
    assert (failed.returncode, failed.stderr) == (1, f"duly: {place.b} says: no bulb\n")
    assert place.duly("call", "nobody", "x", *a, "--expires", "1s").returncode == 5
    assert place.duly("call", place.b, "x", "{nonsense", *a).returncode == 2
    assert place.duly("call", place.b, "x", "--url", "http://somewhere").returncode == 2


def test_the_newest_task_is_listed_first_whatever_its_id(place: Terminals) -> None:
    node = place.start("node", place.b, *place.at(place.b), "--data", "b.db", "--run", "test=true")
    node.line("online")
    a = own_name("A")
    place.ask("call", place.b, "test", *place.at(a))
    task = {"sender": a, "receiver": place.b, "action": "test", "exp": 9999999999}
    place.pub(a, place.b, "pending", task | {"msg_id": "no time in it"})
    node.line("no time in it")
    (newest,) = place.ask("task", "list", "--limit", "1", "--data", "b.db")
    assert newest["id"] == "no time in it"


def test_tasks_can_be_sent_listed_shown_cancelled_and_retried(place: Terminals) -> None:
    start_b(place, "--data", "b.db")
    a = [*place.at(own_name("A")), "--data", "a.db"]
    sent = place.ask("task", "send", place.b, "echo", "[1,2]", *a)
    assert sent["state"] in ("delivered", "done")
    kept = place.ask("task", "send", "nobody", "echo", '{"n":1}', *a, "--wait", "100ms")
    assert kept["state"] == "sent"
    states = {one["id"]: one["state"] for one in place.ask("task", "list", "--data", "a.db")}
    assert states[sent["id"]] == "done"
    assert place.ask("task", "show", kept["id"], "--data", "a.db")["payload"] == {"n": 1}
    assert place.ask("task", "cancel", kept["id"], "--data", "a.db")["state"] == "cancelled"
    assert place.duly("task", "cancel", kept["id"], "--data", "a.db").returncode == 6
    assert place.duly("task", "show", kept["id"], "--data", "a.db").returncode == 1
    again = place.ask("task", "retry", kept["id"], *a, "--wait", "100ms")
    assert (again["to"], again["state"]) == ("nobody", "sent")
    assert again["id"] != kept["id"]
    (did,) = place.ask("task", "list", "--data", "b.db")
    assert (did["id"], did["state"], did["payload"]) == (sent["id"], "done", [1, 2])


def test_why_reads_a_nodes_own_file(place: Terminals) -> None:
    start_b(place, "--data", "b.db")
    place.pub("A", place.b, "pending", "nonsense")
    place.pub("A", place.b, "complete", {"msg_id": "never-sent"})
    place.pub(
        "A",
        place.b,
        "pending",
        {"sender": "A", "receiver": place.b, "msg_id": "late", "action": "x", "exp": 1},
    )
    _until(lambda: len(place.ask("why", "--data", "b.db")) == 3)
    assert {(one["id"], one["word"]) for one in place.ask("why", "--data", "b.db")} == {
        ("pending", "malformed"), ("never-sent", "unknown_task"), ("late", "expired")
    }  # fmt: skip


def test_status_shows_who_is_online_and_forgets_on_demand(place: Terminals) -> None:
    start_b(place)
    assert place.ask("status", place.b, *place.at("A"))["online"] is True
    everybody = place.duly("status", *place.at("A"))
    assert place.b in everybody.stdout
    (node,) = place._running
    assert node.stop(signal.SIGTERM) == 0
    assert place.ask("status", place.b, *place.at("A"))["online"] is False
    assert place.duly("status", "--delete", *place.at(place.b)).returncode == 0
    assert place.duly("status", place.b, *place.at("A")).returncode == 5


def test_without_a_broker_a_verb_says_so_at_once_and_tries_until_its_time_is_over(place: Terminals) -> None:
    nowhere = ["--url", f"mqtt://A@127.0.0.1:{servers.free_port()}"]
    why = f"duly: cannot reach {nowhere[1]}: Connection refused"
    called = place.duly("call", "B", "test", *nowhere, "--expires", "2s")
    assert called.stderr == f"{why}; trying again for 2 s, until the task expires\n{why}\n"
    assert (called.returncode, called.stdout) == (3, "")
    assert place.duly("status", *nowhere).returncode == 3
    node = place.start("node", "B", *nowhere, "--run", "test=true")
    node.line("Connection refused")


def test_a_task_is_stored_also_without_a_broker_and_goes_out_with_the_next(place: Terminals) -> None:
    a, nowhere = own_name("A"), f"127.0.0.1:{servers.free_port()}"
    sent = place.duly(
        "task", "send", place.b, "echo", "[1]", "--url", f"mqtt://{a}@{nowhere}", "--data", "a.db"
    )
    assert sent.returncode == 3
    assert "it is stored" in sent.stderr
    start_b(place, "--data", "b.db")
    place.ask("task", "send", place.b, "echo", "[2]", *place.at(a), "--data", "a.db")
    _until(
        lambda: sorted(one["payload"] for one in place.ask("task", "list", "--data", "b.db")) == [[1], [2]]
    )


def _until(true: Callable[[], bool]) -> None:
    for _ in range(40):
        if true():
            return
    raise AssertionError
