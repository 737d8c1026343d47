"""Two nodes that sign, from the command line alone, and one that does not."""

from __future__ import annotations

import shlex

from tests import servers
from tests.cli.conftest import CommandLine
from tests.clients.node.nodes import own_name


def test_a_node_that_demands_signatures_says_why_it_did_nothing(
    cli: CommandLine, mosquitto_server: servers.Mosquitto
) -> None:
    a, b = own_name("A"), own_name("B")
    public = {name: cli.ask("keys", "new", name, "--keys", f"{name}.json")["key"] for name in (a, b)}
    for name, other in ((a, b), (b, a)):
        assert cli.duly("keys", "trust", other, public[other], "--keys", f"{name}.json").returncode == 0
    serve = f"node {b} --run turn_on=true --data b.db --keys {b}.json --require-signed"
    node = cli.start(*shlex.split(serve), "--url", mosquitto_server.url(b))
    node.line("online")
    call = ["call", b, "turn_on", "--url", mosquitto_server.url(a), "--expires", "2s"]
    signed = cli.duly(*call, "--keys", f"{a}.json", "--require-signed")
    assert signed.returncode == 0, signed.stderr
    assert cli.duly(*call).returncode in (1, 5), "nobody answers what nobody signed"
    why = cli.duly("why", "--data", "b.db")
    assert "unsigned" in why.stdout
    assert a in why.stdout
    wrong = cli.duly(*call, "--keys", f"{b}.json")
    assert (wrong.returncode, f"the keys of {b}, not of {a}" in wrong.stderr) == (2, True)
