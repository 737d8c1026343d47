"""`duly node call task status`, and the four terminals of the FD document,
with mosquitto_pub and mosquitto_sub."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests import servers
from tests.cli.conftest import CommandLine
from tests.clients.node.nodes import own_name
from tests.guard import GUARD


class Terminals(CommandLine):
    """A command line with a broker beside it."""

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
        subprocess.run(["mosquitto_pub", *args, "-P", "x", "-m", text], check=True, timeout=GUARD)


@pytest.fixture
def cli(tmp_path_factory: pytest.TempPathFactory, mosquitto_server: servers.Mosquitto) -> Iterator[Terminals]:
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
    sub.wait(GUARD)
    return json.loads(message)


def start_b(cli: Terminals, *more: str) -> None:
    run = ["--run", "test=echo task completed successfully", "--run", "fail=echo no bulb >&2; exit 3"]
    node = cli.start("node", cli.b, *cli.at(cli.b), *run, "--run", "echo=cat", *more)
    node.line("online")


def test_the_four_terminals_with_a_duly_node_as_b(cli: Terminals) -> None:
    start_b(cli)
    a = own_name("A")
    complete, ack = cli.sub(a, "complete"), cli.sub(a, "ack")
    task = {"sender": a, "receiver": cli.b, "msg_id": "msg001", "action": "test", "time": 1234567890}
    cli.pub(a, cli.b, "pending", task | {"exp": 9999999999, "payload": {}})
    assert heard(ack) == {"msg_id": "msg001"}
    assert heard(complete) == {"msg_id": "msg001", "value": "task completed successfully"}


def test_the_four_terminals_with_a_duly_node_as_a(cli: Terminals) -> None:
    a = own_name("A")
    pending = cli.sub(cli.b, "pending")
    calling = cli.start("call", cli.b, "test", '{"lamp":1}', *cli.at(a), "--form", "json")
    task = heard(pending)
    assert isinstance(task, dict)
    assert (task["sender"], task["receiver"], task["payload"]) == (a, cli.b, {"lamp": 1})
    cli.pub(cli.b, a, "complete", {"msg_id": task["msg_id"], "value": "task completed successfully"})
    assert calling.line() == '"task completed successfully"'
    assert calling.process.wait(GUARD) == 0


def test_a_call_prints_the_result_and_exits_as_it_ended(cli: Terminals) -> None:
    start_b(cli)
    a = cli.at(own_name("A"))
    done = cli.duly("call", cli.b, "echo", "[1,2]", *a)
    assert (done.returncode, json.loads(done.stdout)["payload"]) == (0, [1, 2])
    failed = cli.duly("call", cli.b, "fail", *a)
    assert (failed.returncode, failed.stderr) == (1, f"duly: {cli.b} says: no bulb\n")
    assert cli.duly("call", "nobody", "x", *a, "--expires", "1s").returncode == 5
    assert cli.duly("call", cli.b, "x", "{nonsense", *a).returncode == 2
    assert cli.duly("call", cli.b, "x", "--url", "http://somewhere").returncode == 2


def test_the_newest_task_is_listed_first_whatever_its_id(cli: Terminals) -> None:
    node = cli.start("node", cli.b, *cli.at(cli.b), "--data", "b.db", "--run", "test=true")
    node.line("online")
    a = own_name("A")
    cli.ask("call", cli.b, "test", *cli.at(a))
    task = {"sender": a, "receiver": cli.b, "action": "test", "exp": 9999999999}
    cli.pub(a, cli.b, "pending", task | {"msg_id": "no time in it"})
    node.line("no time in it")
    (newest,) = cli.ask("task", "list", "--limit", "1", "--data", "b.db")
    assert newest["id"] == "no time in it"


def test_tasks_can_be_sent_listed_shown_cancelled_and_retried(cli: Terminals) -> None:
    start_b(cli, "--data", "b.db")
    a = [*cli.at(own_name("A")), "--data", "a.db"]
    sent = cli.ask("task", "send", cli.b, "echo", "[1,2]", *a)
    assert sent["state"] in ("delivered", "done")
    kept = cli.ask("task", "send", "nobody", "echo", '{"n":1}', *a, "--wait", "100ms")
    assert kept["state"] == "sent"
    states = {one["id"]: one["state"] for one in cli.ask("task", "list", "--data", "a.db")}
    assert states[sent["id"]] == "done"
    assert cli.ask("task", "show", kept["id"], "--data", "a.db")["payload"] == {"n": 1}
    assert cli.ask("task", "cancel", kept["id"], "--data", "a.db")["state"] == "cancelled"
    assert cli.duly("task", "cancel", kept["id"], "--data", "a.db").returncode == 6
    assert cli.duly("task", "show", kept["id"], "--data", "a.db").returncode == 1
    again = cli.ask("task", "retry", kept["id"], *a, "--wait", "100ms")
    assert (again["to"], again["state"]) == ("nobody", "sent")
    assert again["id"] != kept["id"]
    (did,) = cli.ask("task", "list", "--data", "b.db")
    assert (did["id"], did["state"], did["payload"]) == (sent["id"], "done", [1, 2])


def test_why_reads_a_nodes_own_file(cli: Terminals) -> None:
    start_b(cli, "--data", "b.db")
    cli.pub("A", cli.b, "pending", "nonsense")
    cli.pub("A", cli.b, "complete", {"msg_id": "never-sent"})
    cli.pub(
        "A",
        cli.b,
        "pending",
        {"sender": "A", "receiver": cli.b, "msg_id": "late", "action": "x", "exp": 1},
    )
    _until(lambda: len(cli.ask("why", "--data", "b.db")) == 3)
    assert {(one["id"], one["word"]) for one in cli.ask("why", "--data", "b.db")} == {
        ("pending", "malformed"), ("never-sent", "unknown_task"), ("late", "expired")
    }  # fmt: skip


def test_status_shows_who_is_online_and_forgets_on_demand(cli: Terminals) -> None:
    start_b(cli)
    assert cli.ask("status", cli.b, *cli.at("A"))["online"] is True
    everybody = cli.duly("status", *cli.at("A"))
    assert cli.b in everybody.stdout
    (node,) = cli._running
    assert node.stop(signal.SIGTERM) == 0
    assert cli.ask("status", cli.b, *cli.at("A"))["online"] is False
    assert cli.duly("status", "--delete", *cli.at(cli.b)).returncode == 0
    assert cli.duly("status", cli.b, *cli.at("A")).returncode == 5


def test_without_a_broker_a_verb_says_so_at_once_and_tries_until_its_time_is_over(cli: Terminals) -> None:
    nowhere = ["--url", f"mqtt://A@127.0.0.1:{servers.free_port()}"]
    why = f"duly: cannot reach {nowhere[1]}: Connection refused"
    called = cli.duly("call", "B", "test", *nowhere, "--expires", "2s")
    assert called.stderr == f"{why}; trying again for 2 s, until the task expires\n{why}\n"
    assert (called.returncode, called.stdout) == (3, "")
    assert cli.duly("status", *nowhere).returncode == 3
    node = cli.start("node", "B", *nowhere, "--run", "test=true")
    node.line("Connection refused")


def test_a_task_is_stored_also_without_a_broker_and_goes_out_with_the_next(cli: Terminals) -> None:
    a, nowhere = own_name("A"), f"127.0.0.1:{servers.free_port()}"
    sent = cli.duly("task", "send", cli.b, "echo", "[1]", "--url", f"mqtt://{a}@{nowhere}", "--data", "a.db")
    assert sent.returncode == 3
    assert "it is stored" in sent.stderr
    start_b(cli, "--data", "b.db")
    cli.ask("task", "send", cli.b, "echo", "[2]", *cli.at(a), "--data", "a.db")
    _until(lambda: sorted(one["payload"] for one in cli.ask("task", "list", "--data", "b.db")) == [[1], [2]])


def _until(true: Callable[[], bool]) -> None:
    for _ in range(40):
        if true():
            return
    raise AssertionError
