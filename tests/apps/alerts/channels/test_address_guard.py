"""Where private addresses are not allowed, no channel connects to one: whatever is written, whatever a name
leads to, wherever a redirect points."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from duly.apps.alerts.channels import address_guard as guard
from duly.apps.alerts.channels import check_url, open_channel
from duly.apps.alerts.channels.channel import Notification
from duly.errors import Declined, Malformed

NOTICE = Notification(
    "alert_1", "critical: fall", "words", {"type": "alert.event", "timestamp": "", "data": {}}
)

WRITTEN = [
    "127.0.0.1", "127。0。0。1", "１２７.0.0.1", "127.1", "0x7f000001", "2130706433", "localhost",
    "LOCALHOST.",
    "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "[fd00::1]", "[fe80::1]", "224.0.0.1", "10.1.2.3", "[::]", "[::127.0.0.1]",
]  # fmt: skip
SERVICES = ["json", "form", "xml", "ntfy", "gotify"]


class Inside:
    """A web server inside our network: a visit there went too far. `leads_to` is where it redirects."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.visits: list[str] = []
        self.leads_to = ""
        inside = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                inside.visits.append(self.path)
                self.send_response(307 if inside.leads_to else 200)
                if inside.leads_to:
                    self.send_header("Location", inside.leads_to)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer((host, 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def inside() -> Iterator[Inside]:
    it = Inside()
    yield it
    it.close()


@pytest.mark.parametrize("host", WRITTEN)
@pytest.mark.parametrize("scheme", ["http", "mailto", "json"])
def test_a_private_address_is_refused_when_it_is_written_in_any_spelling(scheme: str, host: str) -> None:
    url = f"mailto://{host}?from=a@b.c&to=d@e.f" if scheme == "mailto" else f"{scheme}://{host}/x"
    with pytest.raises(Malformed):
        check_url(url, private=False)


def test_the_refusal_names_the_command_that_allows_it() -> None:
    with pytest.raises(Malformed, match="'duly up --allow-private-webhooks'"):
        check_url("http://127.0.0.1/x", private=False)


async def tell(url: str) -> None:
    channel = open_channel(url, private=False)
    try:
        await channel.send(NOTICE)
    finally:
        await channel.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127。0。0。1", "１２７.0.0.1", "evil.example"])
async def test_a_webhook_does_not_connect_to_a_private_address(
    host: str, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    _names_lead_home(monkeypatch)
    monkeypatch.setattr("duly.apps.alerts.channels.webhook.check_host", lambda *_, **__: None)
    with pytest.raises(Declined, match="private network"):
        await tell(f"http://{host}:{inside.port}/hook")
    assert inside.visits == []


@pytest.mark.parametrize("scheme", SERVICES)
@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
async def test_a_service_does_not_connect_to_a_private_address(
    scheme: str, host: str, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    _names_lead_home(monkeypatch)
    with pytest.raises(Declined, match="private network"):
        await tell(f"{scheme}://{host}:{inside.port}/topic")
    assert inside.visits == []


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one loopback address")
@pytest.mark.parametrize("scheme", SERVICES)
async def test_a_service_does_not_follow_a_redirect_into_our_network(
    scheme: str, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Inside("127.0.0.2")
    inside.leads_to = f"http://127.0.0.2:{hidden.port}/secret"
    monkeypatch.setattr(guard, "is_public", lambda address: str(address) == "127.0.0.1")
    try:
        with pytest.raises(Declined, match="private network"):
            await tell(f"{scheme}://127.0.0.1:{inside.port}/topic")
    finally:
        hidden.close()
    assert inside.visits
    assert hidden.visits == []


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Apprise leaves its socket open
async def test_a_service_that_passes_the_error_on_is_declined_as_well() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(0)
        with pytest.raises(Declined, match="private network"):
            await tell(f"rsyslog://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(BlockingIOError):
            listener.recv(1)
    gc.collect()


async def test_mail_does_not_connect_to_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _names_lead_home(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = listener.getsockname()[1]
        with pytest.raises(Declined, match="private network"):
            await tell(f"mailto://evil.example:{port}?from=a@b.c&to=d@e.f")
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_threads_that_a_guarded_thread_starts_are_guarded_too() -> None:
    problems: list[BaseException] = []

    def connect() -> None:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        except OSError as problem:
            problems.append(problem)

    with guard.public_only() as kept:
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
    assert [type(one) for one in problems] == [guard.PrivateAddress]
    assert kept.refused
    connect()
    assert not isinstance(problems[-1], guard.PrivateAddress), "outside, nothing is guarded"


def _names_lead_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some names lead to this machine."""
    real = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == "evil.example" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
