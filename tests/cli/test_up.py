from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.cli.conftest import CommandLine
from tests.guard import GUARD
from tests.stopwatch import Stopwatch


def test_it_says_where_it_serves_and_how_to_go_on(cli: CommandLine) -> None:
    hub = cli.start("up", "--no-mqtt", "--port", "0")
    ready = hub.line()
    assert ready.startswith("ready http://127.0.0.1:")
    assert "duly add device" in hub.line("duly add")
    with socket.create_connection(("127.0.0.1", int(ready.rsplit(":", 1)[1])), timeout=GUARD):
        pass
    assert hub.stop(signal.SIGTERM) == 0


def test_it_says_where_duly_is_if_the_shell_would_not_find_it(cli: CommandLine) -> None:
    hub = cli.start("up", "--no-mqtt", "--port", "0", PATH="/usr/bin:/bin")
    programs = hub.line("export PATH=").partition("=")[2].removesuffix(":$PATH").strip()
    assert (Path(programs) / "duly").exists()
    assert hub.stop(signal.SIGTERM) == 0


def test_a_folder_may_have_any_name(cli: CommandLine) -> None:
    cli.up("--data", "50%41 #1?").stop()
    assert (cli.folder / "50%41 #1?" / "ledger.db").exists()
    assert [one.name for one in cli.folder.iterdir()] == ["50%41 #1?"]


def test_who_reads_one_line_and_goes_does_not_take_it_along(cli: CommandLine) -> None:
    up = [sys.executable, "-m", "duly", "up", "--no-mqtt", "--port", "0"]
    with subprocess.Popen(up, cwd=cli.folder, env=cli.env, stdout=subprocess.PIPE) as hub:
        try:
            assert hub.stdout is not None
            assert hub.stdout.readline().startswith(b"ready")
            hub.stdout.close()
            assert "runs at" in cli.duly("doctor").stdout
        finally:
            hub.send_signal(signal.SIGINT)
        assert hub.wait(GUARD) == 0


def test_it_may_listen_on_an_address_of_ipv6(cli: CommandLine) -> None:
    hub = cli.start("up", "--no-mqtt", "--port", "0", "--listen", "::1")
    assert hub.line("ready").startswith("ready http://[::1]:")
    assert "runs at http://[::1]:" in cli.duly("doctor").stdout


def test_ctrl_c_stops_it_cleanly_and_soon_with_a_device_connected(cli: CommandLine) -> None:
    hub = cli.up()
    cli.duly("add", "device", "lock")
    cli.device("lock")
    took = Stopwatch(hub.process.pid)
    assert hub.stop(signal.SIGINT) == 0
    assert took.seconds < 2
    assert not (cli.folder / "duly-data" / "hub.json").exists()


def test_a_taken_port_is_named_with_a_suggestion(cli: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli.duly("up", "--no-mqtt", "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr
    assert "--port" in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_hubs_cannot_have_one_ledger(cli: CommandLine) -> None:
    cli.up()
    done = cli.duly("up", "--no-mqtt", "--port", "0")
    assert done.returncode == 1
    assert f"a hub runs in duly-data already, at http://127.0.0.1:{cli.port}" in done.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "70000"], "port is a number from 0 to 65535"),
        (["--listen", "0.0.0.0"], "add --tls-cert and --tls-key, or say --insecure"),
        (["--tls-cert", "only.pem"], "TLS needs both"),
        (["--notifier", "redis://localhost"], "a notifier is for hubs that share a ledger"),
        (["--tls-cert", "no.pem", "--tls-key", "no.pem"], "certificate no.pem with no.pem cannot be used"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_sentence(
    cli: CommandLine, flags: list[str], sentence: str
) -> None:
    done = cli.duly("up", "--no-mqtt", "--port", "0", *flags)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_it_would_forget_too_early_it_does_not_accept(cli: CommandLine) -> None:
    done = cli.duly("up", "--no-mqtt", "--port", "0", DULY_REMEMBER="60")
    assert done.returncode == 2
    assert "the horizon of 1 min is shorter than" in done.stderr
    assert "the horizon is 'remember', the expiry 'max_age', in seconds" in done.stderr


def test_it_comes_back_after_kill_9_with_everything(cli: CommandLine) -> None:
    hub = cli.up()
    cli.duly("add", "device", "lock")
    hub.stop(signal.SIGKILL)
    assert (cli.folder / "duly-data" / "hub.json").exists(), "nobody could tidy up"
    assert [one["name"] for one in cli.ask("list")["accounts"]] == ["lock"]
    cli.up()
    assert cli.ask("list")["online"] == []


def test_an_engine_that_dies_takes_the_hub_with_it_and_says_why(cli: CommandLine) -> None:
    broken = """
import sys
from duly.core.inbox import Inbox
def wake(self, now): raise KeyError("a planted bug")
Inbox.wake, Inbox.next_wake = wake, lambda self: 0
sys.argv = ["duly", "up", "--no-mqtt", "--port", "0"]
from duly.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", broken],
        cwd=cli.folder,
        env=cli.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD,
    )
    assert done.returncode == 1
    assert "ended by itself" in done.stderr
    assert "a planted bug" in done.stderr


def test_with_tls_the_verbs_of_this_machine_still_find_it(cli: CommandLine) -> None:
    Authority(cli.folder).issue("hub.example")
    cli.up("--tls-cert", "hub.example.pem", "--tls-key", "hub.example.key")
    for args in ("add app phone", "add device lock", "grant phone lock"):
        assert cli.duly(*args.split()).returncode == 0
    cli.device("lock")
    done = cli.duly("send", "lock", "query")
    assert done.returncode == 0, done.stderr
