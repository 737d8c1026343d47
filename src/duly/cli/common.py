"""The common part of all verbs: finds the selected hub or ledger, queries it, and reports failures.

The law: a verb either succeeds, or prints one sentence on stderr that says why not and what to do, and exits
with a code that a script can act on; with --json that sentence is JSON, on stdout, as the last line. A verb
queries the running hub; if none runs, it opens the ledger. The run file of a hub may be stale (kill -9); the
ledger's lock never is.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

import typer

from duly import extras
from duly.cli.output import guard_logs, note, pad, print_json, say, style, table, tint, traceback_lines
from duly.errors import (
    ConnectionLost,
    ConnectionRefused,
    DulyError,
    LedgerUnavailable,
    Malformed,
    MissingExtra,
    NotAllowed,
    NotAuthenticated,
    SecretKeyMissing,
    SenderError,
    Unknown,
)

if TYPE_CHECKING:
    from ssl import SSLContext

    from duly.settings import Settings
    from duly.storage.ledger import Ledger
    from duly.storage.secret_box import SecretBox

__all__ = [
    "CommandFailed",
    "Exit",
    "HubClient",
    "HubUnreachable",
    "JsonObject",
    "clock",
    "code_of",
    "count",
    "find_hub",
    "guarded",
    "local_hub",
    "need_hub",
    "note",
    "open_to_read",
    "pad",
    "poll",
    "print_json",
    "say",
    "say_changed",
    "settings_of",
    "state_code",
    "style",
    "table",
    "tint",
    "took",
]
"""With the printing functions of `output`: a verb imports both from here."""

ASK_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.1

Found = TypeVar("Found")

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object in a hub's answer."""


class Exit(IntEnum):
    """The exit codes of the command line."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_ALLOWED = 4
    UNKNOWN = 5
    REFUSED = 6


class CommandFailed(Exception):
    """A verb failed: the sentence to print, and the exit code."""

    def __init__(self, code: Exit, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def code_of(problem: DulyError) -> Exit:
    """Return the exit code of an error.

    >>> code_of(Malformed("the id is missing")).name
    'USAGE'
    """
    match problem:
        case NotAuthenticated() | NotAllowed() | ConnectionRefused():
            return Exit.NOT_ALLOWED
        case Malformed():
            return Exit.USAGE
        case SenderError():
            return Exit.REFUSED
        case LedgerUnavailable() | ConnectionLost():
            return Exit.UNREACHABLE
        case Unknown():
            return Exit.UNKNOWN
        case _:
            return Exit.FAILED


def guarded(verbs: Callable[..., object]) -> NoReturn:
    """Run the command line. Every failure ends as one sentence and an exit code."""
    json = "--json" in sys.argv
    guard_logs()
    logging.getLogger("duly.link").addHandler(logging.NullHandler())  # verbs report these failures themselves
    try:
        # With --json, usage errors are printed as JSON here, not by Typer.
        raise SystemExit(verbs(standalone_mode=not json))
    except CommandFailed as problem:
        _give_up(json, problem.code, problem.code.name.lower(), str(problem))
    except DulyError as problem:
        _give_up(json, code_of(problem), problem.word, str(problem))
    except ModuleNotFoundError as problem:
        extra = extras.of(problem)
        if extra is None:
            raise
        _give_up(json, Exit.FAILED, MissingExtra.word, extras.sentence(f"'duly {_verb()}'", extra))
    except typer.TyperException as problem:
        _give_up(json, Exit(problem.exit_code), "usage", problem.format_message())
    except OSError as problem:  # a folder without access, a missing file
        said = problem.strerror or str(problem)
        said = f"{problem.filename}: {said}" if problem.filename else said
        _give_up(json, Exit.FAILED, "failed", said)
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except Exception as bug:
        note(*traceback_lines())
        _give_up(json, Exit.FAILED, "bug", f"this is a bug, please report it: {type(bug).__name__}: {bug}")


def _verb() -> str:
    """Return the verb on the command line."""
    return next((word for word in sys.argv[1:] if not word.startswith("-")), "")


def _give_up(json: bool, code: Exit, word: str, sentence: str) -> NoReturn:
    if json:
        print_json({"error": word, "detail": sentence, "exit": code})
    else:
        note(f"duly: {sentence}")
    raise SystemExit(code) from None


# ── which hub ────────────────────────────────────────────────────────────────────────────────────


class HubClient:
    """A hub that a verb queries: its address and a token. `local`: both are from the run file in the data
    folder."""

    def __init__(self, url: str, token: str, *, local: bool) -> None:
        self.url = url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
        self.token = token
        self.local = local

    @property
    def tls(self) -> SSLContext | None:
        """The TLS context for this hub. A local hub's certificate is not checked: it names the hub's public
        name, and the owner of the data folder knows the token anyway."""
        if not self.url.startswith("https:"):
            return None
        import ssl

        return ssl._create_unverified_context() if self.local else ssl.create_default_context()

    def ask(self, path: str, body: dict[str, str] | None = None) -> JsonObject:
        """Return the JSON at a path; a body is sent with POST. Raises `HubUnreachable` or `CommandFailed`."""
        import msgspec

        from duly.wire import any_json

        status, said = self._fetch(path, body)
        if status >= 400:
            raise _refusal(status, said)
        try:
            return any_json.read_object(said)
        except msgspec.DecodeError as problem:
            raise HubUnreachable(self.url, problem) from None

    def post(self, path: str, frame: object) -> JsonObject:
        """Post a frame, and return the hub's answer, even if it is a refusal."""
        import msgspec

        from duly.wire import any_json

        status, said = self._fetch(path, frame)
        try:
            return any_json.read_object(said)
        except msgspec.DecodeError:
            raise _refusal(status, said) from None

    def _fetch(self, path: str, body: object) -> tuple[int, bytes]:
        import urllib.error
        import urllib.request

        import msgspec

        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        # A proxy in the environment is for the internet, not for a hub.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.tls)
        )
        try:
            with opener.open(request, timeout=ASK_SECONDS) as answer:
                return int(answer.status), bytes(answer.read())
        except urllib.error.HTTPError as problem:
            return problem.code, problem.read()
        except (OSError, ValueError) as problem:
            raise HubUnreachable(self.url, getattr(problem, "reason", problem)) from None

    def knock(self) -> None:
        """Raise `HubUnreachable` if no hub listens at the address. A client would retry for ever."""
        import socket
        from urllib.parse import urlsplit

        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except OSError as problem:
            raise HubUnreachable(self.url, problem) from None

    def temporary_token(self, name: str) -> str:
        """Return a temporary token of this account. It expires when the hub stops, or when it is unused for a
        while."""
        return str(self.ask("/v1/admin/temporary_token", {"name": name})["token"])


def say_changed(done: JsonObject, sentence: str, missing: str, *, json: bool) -> None:
    """Print what a hub has done; fail with the sentence `missing` if there was nothing to change."""
    if not done["changed"]:
        raise CommandFailed(Exit.REFUSED, missing)
    if json:
        print_json(done)
    else:
        say(sentence)


def poll(look: Callable[[], Found | None], within: float) -> Found | None:
    """Call `look` until it returns something, at least once and for at most `within` seconds; return that, or
    None. A verb waits in this way for changes that the hub does not report by itself."""
    until = time.monotonic() + within
    while (found := look()) is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return found


class HubUnreachable(CommandFailed):
    """No hub answers at this address."""

    def __init__(self, url: str, why: object) -> None:
        super().__init__(
            Exit.UNREACHABLE,
            f"the hub at {url} does not answer ({why}); is it running? Start it with 'duly up'",
        )


def _refusal(status: int, body: bytes) -> CommandFailed:
    import msgspec

    try:
        said = msgspec.json.decode(body, type=JsonObject)
    except msgspec.DecodeError:
        said = {}
    code = {400: Exit.USAGE, 401: Exit.NOT_ALLOWED, 403: Exit.NOT_ALLOWED, 404: Exit.UNKNOWN}.get(status)
    if code is None:
        code = Exit.UNREACHABLE if status >= 500 else Exit.REFUSED
    return CommandFailed(code, str(said.get("detail") or f"the hub answers with HTTP status {status}"))


def settings_of(folder: str | None, ledger: str | None = None) -> Settings:
    """Return the settings with this data folder and ledger; `folder` may also be the file of a node."""
    from pathlib import Path

    from duly.settings import load
    from duly.storage import file_url

    if folder is not None and ledger is None and Path(folder).is_file():
        # The memory of a node is a single file.
        folder, ledger = str(Path(folder).parent), file_url(folder)
    return load({"data": folder, "ledger": ledger})


def local_hub(folder: str | None) -> HubClient | None:
    """Return the hub of this data folder, if one runs."""
    from pathlib import Path

    from duly.server import runfile

    if folder is not None and Path(folder).is_file():
        return None
    posted = runfile.read(Path(settings_of(folder).data))
    return None if posted is None else HubClient(posted.url, posted.token, local=True)


def find_hub(folder: str | None, url: str | None = None, token: str | None = None) -> HubClient | None:
    """Return the selected hub: the one at this address, or the one of the data folder if it runs. The latter
    is queried with the token of its run file, since DULY_TOKEN is usually an app's."""
    if url is not None:
        if not re.match(r"(https?|wss?)://", url):
            raise CommandFailed(Exit.USAGE, f"{url!r} is not a hub's address; write http://127.0.0.1:7800")
        if token is None:
            raise CommandFailed(
                Exit.USAGE, "a hub named by --url needs a token; give it with --token or DULY_TOKEN"
            )
        return HubClient(url, token, local=False)
    return local_hub(folder)


def need_hub(folder: str | None, url: str | None = None, token: str | None = None) -> HubClient:
    """Return the selected hub; fail if there is none."""
    hub = find_hub(folder, url, token)
    if hub is None:
        raise CommandFailed(
            Exit.UNREACHABLE,
            f"no hub runs in {settings_of(folder).data}; start one with 'duly up', or say where it is: "
            "--data, or --url with --token",
        )
    return hub


def need_ledger(settings: Settings) -> None:
    """Raise if there is no ledger in the data folder, and none is named either."""
    from pathlib import Path

    path = Path(settings.data) / "ledger.db"
    was_there = path.with_name(path.name + ".lock")  # then the ledger's own error says what is missing
    if not settings.ledger and not path.exists() and not was_there.exists():
        raise CommandFailed(
            Exit.UNREACHABLE,
            f"there is no ledger in {settings.data} yet; start a hub with 'duly up', or use --data",
        )


async def open_to_read(folder: str | None, ledger: str | None) -> Ledger:
    """Open the ledger for reading, also while another process writes it."""
    from duly.storage import open_ledger

    settings = settings_of(folder, ledger)
    url = settings.ledger_url
    need_ledger(settings)
    if url.startswith("sqlite:") and "mode=" not in url:
        url += "&mode=ro" if "?" in url else "?mode=ro"
    return await open_ledger(url)


async def box_of(book: Ledger, settings: Settings, *, reading: bool) -> SecretBox | None:
    """Return what decrypts this ledger's secrets. With `reading`, a missing key only prints a warning. A new
    key is made only for a ledger in the data folder: hubs that share a ledger must be given the same key."""
    from pathlib import Path

    from duly.storage.secret_box import open_box

    try:
        own = not settings.ledger
        return await open_box(book, Path(settings.data), settings.secret_key, make=own, reading=reading)
    except SecretKeyMissing as problem:
        if not reading:
            raise
        note(f"duly: {problem}")
        return None


# ── words for times and numbers ───────────────────────────────────────────────────────────────────


def clock(ms: float) -> str:
    """Format a time in milliseconds: the time of day, after the date if that is not today."""
    moment = time.localtime(ms / 1000)
    day = "" if moment[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", moment)
    return f"{day}{time.strftime('%H:%M:%S', moment)}.{int(ms) % 1000:03d}"


def took(ms: float) -> str:
    """Format a length of time in milliseconds.

    >>> took(3.14), took(250), took(12_000)
    ('3.1 ms', '250 ms', '12.0 s')
    """
    if abs(ms) < 10:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if abs(ms) < 10_000 else f"{ms / 1000:.1f} s"


def count(n: int, noun: str, many: str = "") -> str:
    """Format a number with its noun.

    >>> count(1, "cut"), count(2, "cut"), count(2, "delivery", "deliveries")
    ('1 cut', '2 cuts', '2 deliveries')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {many or noun + 's'}"


def state_code(state: str) -> Exit:
    """Return the exit code for a command in this state.

    >>> state_code("done").name, state_code("expired").name, state_code("sent").name
    ('OK', 'FAILED', 'UNKNOWN')
    """
    match state:
        case "done":
            return Exit.OK
        case "failed" | "expired" | "superseded" | "cancelled":
            return Exit.FAILED
        case _:
            return Exit.UNKNOWN
