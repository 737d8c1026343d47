"""`duly chat`: chat in a terminal.

The law: a typed line is sent once, however often the hub goes away; a line of another person is shown once,
and as plain text, so that it cannot control the terminal. Lines from a pipe work as well, so scripts can
chat; then the exit code says whether the hub took all of them."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    HubClient,
    HubUnreachable,
    JsonObject,
    clock,
    local_hub,
    note,
    print_json,
    say,
    style,
)
from duly.cli.options import HubOptions, Json, grouped
from duly.cli.output import rendered
from duly.core.printable import printable
from duly.errors import DulyError

if TYPE_CHECKING:
    from duly.clients.chat import Chat, Line, News

HELP = """\
  /to NAME|GROUP          talk to a person, or in a group; then just type
  /list                   your conversations            /history [HOW MANY]
  /edit N TEXT            edit line N                   /delete N
  /receipts N             who has line N, who has read it
  /group NAME [PEOPLE]    make a group                  /invite NAME   /join GROUP   /leave
  /members                /remove NAME                  /role NAME owner|admin|member
  /friends                /friend NAME                  /accept NAME   /unfriend NAME
  /block NAME             /unblock NAME                 /quit"""


NEWS = {
    "delete": "{who} has deleted line {n}",
    "group_create": "{who} has made the group {name}",
    "group_invite": "{who} invites you to {name}: /join {group}",
    "group_join": "{who} has joined",
    "group_leave": "{who} has left",
    "group_remove": "{who} has removed {user} from the group",
    "friend_ask": "{who} would like to be your friend: /accept {who}",
    "friend_accept": "{who} is your friend now",
    "friend_remove": "{who} is not your friend any more",
}
RANKS = {"owner": "the owner", "admin": "an admin", "member": "a member"}


@grouped
def chat(
    as_: Annotated[str, typer.Option("--as", metavar="NAME", help="Your account.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="NAME", help="The person or group to talk to first. [none]")
    ] = None,
    register: Annotated[bool, typer.Option("--register", help="Create the account first.")] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="FILE", help="A file that keeps unsent lines and your position. [none]"
        ),
    ] = None,
    *,
    at: HubOptions,
    json: Json = False,
) -> None:
    """Chat with people and groups. Type /help when it runs.

    On the machine of the hub no password is needed, and an unknown account is created. On another machine use
    --url; then it logs in with --token, or with a password, which it asks for or takes from DULY_PASSWORD.
    """
    hub = _as_whom(as_, at.url, at.token, at.folder, register)
    ours = keep is None and (at.url is None or at.token is None)
    if not asyncio.run(_chat(hub, at.url or hub.url, to, keep, json, ours)):
        raise typer.Exit(Exit.REFUSED)


def _as_whom(name: str, url: str | None, token: str | None, folder: str | None, register: bool) -> HubClient:
    if url is not None and token is not None:
        return _first_there(url, token)
    if url is None:
        hub = local_hub(folder)
        if hub is None:
            raise CommandFailed(
                Exit.UNREACHABLE, "no hub runs here; start one with 'duly up', or name one with --url"
            )
        known = {one["name"]: one["role"] for one in hub.ask("/v1/admin/list", {})["accounts"]}
        if name not in known:
            hub.ask("/v1/admin/add", {"role": "user", "name": name})
            note(f"{name} is new here")
        elif known[name] != "user":
            raise CommandFailed(
                Exit.USAGE, f"{name} is not a person but a {known[name]}; choose another name"
            )
        # A login, not a temporary token: that would end with the hub, and the chat outlives it.
        entered = hub.ask("/v1/admin/login", {"name": name, "device": "terminal"})
        return HubClient(hub.url, str(entered["token"]), local=True)
    password = os.environ.get("DULY_PASSWORD") or typer.prompt("password", hide_input=True, err=True)
    hub = _first_there(url)
    credentials = {"name": name, "password": password, "device": f"terminal of {os.uname().nodename}"}
    if register:
        hub.ask("/v1/people", credentials)
    return HubClient(hub.url, str(hub.ask("/v1/login", credentials)["token"]), local=False)


def _first_there(urls: str, token: str = "") -> HubClient:
    """Return the first hub that answers, of those named, separated by commas."""
    one, _, others = urls.partition(",")
    hub = HubClient(one.strip(), token, local=False)
    try:
        hub.knock()
    except HubUnreachable:
        if not others:
            raise
        return _first_there(others, token)
    return hub


async def _chat(hub: HubClient, urls: str, to: str | None, keep: str | None, json: bool, ours: bool) -> bool:
    """Return whether the hub took every line of a script. `ours`: the login was made for this run, and ends
    with it."""
    from duly.clients.chat import Chat
    from duly.clients.websocket_link import Access

    async with AsyncExitStack() as stack:
        typed = _Terminal() if sys.stdin.isatty() and not json else _Pipe()
        client = await stack.enter_async_context(
            Chat(urls, hub.token, store=keep, access=Access(tls=hub.tls))
        )
        out = stack.enter_context(typed.printing())
        talk = _TerminalTalk(client, out, json=json)
        if to is not None:
            await talk.turn_to(to)
        elif not json:
            note(f"you are {client.name}; /to NAME to begin, /help for more")
        listening = asyncio.create_task(talk.listen())
        try:
            async for line in typed.lines(lambda: talk.prompt):
                if not await talk.take(line.strip()):
                    break
        finally:
            await talk.finish(patient=isinstance(typed, _Pipe))
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            if ours and client.connected:
                with suppress(CommandFailed):
                    await asyncio.to_thread(hub.ask, "/v1/logout", {})
        return talk.taken or isinstance(typed, _Terminal)


class _Printer:
    """Prints lines of conversations, and what the program says about them."""

    def __init__(self, out: Callable[[str], None], *, json: bool) -> None:
        self._out = out
        self._json = json

    def show(self, line: Line, where: str = "") -> None:
        """Print a line of a conversation; `where` names the conversation, if it is not the current one."""
        data: JsonObject = line.data if isinstance(line.data, dict) else {}
        who, about = line.sender, {name: data.get(name, "") for name in ("n", "name", "group", "user")}
        match line.type:
            case "one_chat" | "group_chat":
                what = f"{who}: {line.text}" + (" (edited)" if line.edited else "")
            case "edit" if "data" not in data:
                what = f"{who} edited line {about['n']}, which was deleted later"
            case "edit":
                said = data.get("data")
                text = said.get("text", said) if isinstance(said, dict) else said
                what = f"{who} edited line {about['n']}: {text}"
            case "deleted" | "expired":
                what = f"{who}: ({line.type})"
            case "group_role":
                what = f"{who} has made {about['user']} {RANKS.get(data.get('role', ''), 'something else')}"
            case _:
                what = NEWS.get(line.type, "{who}: {type}").format(who=who, type=line.type, **about)
        number = "" if line.conv.startswith("~") else f"  ·{line.n}"
        self.tell(f"{clock(line.time)[:5]} {where}{what}{number}")

    def tell(self, *lines: str) -> None:
        """Print lines; with --json to stderr, for people."""
        if self._json:
            note(*lines)
        else:
            for line in lines:
                self._out(line)

    def dim(self, text: str) -> None:
        """Print a line that only comments on others."""
        self.tell(style(text, "dim"))


class _TerminalTalk:
    """One conversation at a terminal: typed lines and verbs, and what arrives."""

    def __init__(self, client: Chat, out: Callable[[str], None], *, json: bool) -> None:
        self._chat = client
        self._print = _Printer(out, json=json)
        self._json = json
        self._names: dict[str, str] = {}
        self._shown: set[tuple[str, int]] = set()
        """lines that /history showed and that may still arrive as news"""
        self._saying: set[asyncio.Task[None]] = set()
        self.taken = True
        """nothing was refused so far"""
        self.to = ""
        verbs: dict[str, Callable[[list[str]], Awaitable[object]]] = {
            "to": lambda a: self.turn_to(a[0]),
            "list": lambda _: self._list(),
            "history": lambda a: self._history(int(a[0]) if a else 20),
            "edit": lambda a: self._did(self._chat.edit(self._conv(), int(a[0]), " ".join(a[1:]))),
            "delete": lambda a: self._did(self._chat.delete(self._conv(), int(a[0]))),
            "receipts": lambda a: self._receipts(int(a[0])),
            "group": lambda a: self._make_group(a[0], a[1:]),
            "invite": lambda a: self._did(self._chat.invite(self._group(), a[0])),
            "join": lambda a: self._join(a[0]),
            "leave": lambda _: self._leave(),
            "members": lambda _: self._members(),
            "remove": lambda a: self._did(self._chat.remove(self._group(), a[0])),
            "role": lambda a: self._did(self._chat.set_role(self._group(), a[0], _rank(a[1]))),
            "friends": lambda _: self._friends(),
            "friend": lambda a: self._did(self._chat.ask_friend(a[0])),
            "accept": lambda a: self._did(self._chat.accept_friend(a[0])),
            "unfriend": lambda a: self._did(self._chat.remove_friend(a[0])),
            "block": lambda a: self._did(self._chat.block(a[0])),
            "unblock": lambda a: self._did(self._chat.unblock(a[0])),
            "help": lambda _: self._help(),
        }
        self._verbs = verbs

    @property
    def prompt(self) -> str:
        """Return the prompt: the name of the conversation."""
        return f"{self._names.get(self.to, self.to)}> "

    # ── typing ───────────────────────────────────────────────────────────────────────────────────

    async def take(self, line: str) -> bool:
        """Carry out one typed line; return whether to read another."""
        if line in ("/quit", "/exit", "/q"):
            return False
        if line.startswith("/"):
            verb, *words = line[1:].split()
            await self._do(verb, words)
        elif line and not self.to:
            self._print.tell("to whom? /to NAME")
        elif line:
            # Not awaited, so that the user can go on typing. The client keeps the order.
            task = asyncio.create_task(self._say(self.to, line))
            self._saying.add(task)
            task.add_done_callback(self._saying.discard)
            if self._chat.denied:
                self._print.tell(f"(you were logged out: {self._chat.denied}; /quit, and log in again)")
            elif not self._chat.connected:
                self._print.tell("(no connection; it goes out as soon as the hub is back)")
        return True

    async def _do(self, verb: str, words: list[str]) -> None:
        do = self._verbs.get(verb)
        if do is None:
            self._print.tell(f"there is no /{verb}; /help shows what there is")
            return
        try:
            await do(words)
        except (IndexError, ValueError):
            self._print.tell(f"/{verb} needs other arguments; see /help")
            self.taken = False
        except DulyError as problem:
            self._print.tell(str(problem))
            self.taken = False

    async def _did(self, doing: Awaitable[object]) -> None:
        await doing
        if not self._json:
            self._print.dim("  · done")

    async def _say(self, to: str, text: str) -> None:
        try:
            sent = await self._chat.send(to, text)
        except DulyError as problem:
            self._print.tell(f"{problem}: {text[:60]}")
            self.taken = False
            return
        if self._json:
            print_json({"sent": {"conv": sent.conv, "n": sent.n, "to": to, "text": text}})
        else:
            self._print.dim(f"  · {sent.n} stored")

    async def finish(self, *, patient: bool) -> None:
        """Wait until every typed line is sent. A script waits for a hub that is away, a person does not."""
        while self._saying:
            await asyncio.wait(self._saying, timeout=1)
            if self._saying and (self._chat.denied or not (patient or self._chat.connected)):
                self._print.tell(
                    f"not sent: {len(self._saying)} of your lines; {self._chat.denied or 'no connection'}"
                )
                self.taken = False
                for task in self._saying:
                    task.cancel()
                return

    async def turn_to(self, to: str) -> None:
        """Talk to this person or group from now on, and show the last lines."""
        if to.startswith("#"):
            await self._name(to)
        else:
            known = {name: group for group, name in self._names.items()}
            to = known.get(to, to)
        self.to = to
        if not self._json:
            last = await self._history(10)
            if last:
                self._chat.read(self._conv(), last)

    def _conv(self) -> str:
        from duly.apps.chat.conversations import direct

        if not self.to:
            raise ValueError
        return self.to if self.to.startswith("#") else direct(self._chat.name, self.to)

    def _group(self) -> str:
        if not self.to.startswith("#"):
            raise ValueError
        return self.to

    async def _make_group(self, name: str, people: list[str]) -> None:
        group = await self._chat.create_group(name, *people)
        self._names[group] = name
        self.to = group
        self._print.tell(f"{name} is {group}")

    async def _leave(self) -> None:
        group = self._group()
        await self._chat.leave(group)
        self.to = ""
        self._print.tell(f"you have left {self._names.get(group, group)}")

    async def _join(self, group: str) -> None:
        await self._chat.join(group)
        await self.turn_to(group)

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def _history(self, count: int) -> int | None:
        """Show the last lines; return the number of the very last, if there is one."""
        lines = await self._chat.history(self._conv(), limit=min(max(count, 1), 200))
        for line in lines:
            self._print.show(line)
            self._shown.add((line.conv, line.n))
        return lines[-1].n if lines else None

    async def _list(self) -> None:
        for one in await self._chat.conversations():
            if "name" in one:
                one["name"] = self._names[one["conv"]] = printable(one["name"])
            unread = one.get("unread", 0)
            where = f"{one['name']} ({one['conv']})" if "name" in one else one["with"]
            self._print.tell(f"  {where}, {one['last']} lines" + (f", {unread} unread" if unread > 0 else ""))

    async def _receipts(self, n: int) -> None:
        found = await self._chat.receipts(self._conv(), n)
        has = f" ({', '.join(found.delivered_to)})" if found.delivered_to else ""
        read = f" ({', '.join(found.read_by)})" if found.read_by else ""
        self._print.tell(f"  line {n} is {found.state}: {found.delivered} of {found.of} have it{has}, "
                   f"{found.read} of {found.of} have read it{read}")  # fmt: skip

    async def _members(self) -> None:
        for name, rank in (await self._chat.group(self._group()))["members"].items():
            self._print.tell(f"  {name}" + ("" if rank == "member" else f", {rank}"))

    async def _friends(self) -> None:
        for what, names in (await self._chat.friends()).items():
            if names:
                self._print.tell(f"  {what}: {', '.join(names)}")

    async def _help(self) -> None:
        self._print.tell(*HELP.split("\n"))

    # ── hearing ──────────────────────────────────────────────────────────────────────────────────

    async def listen(self) -> None:
        """Print what others say, until the connection ends."""
        async for news in self._chat.news():
            if self._json:
                import msgspec

                print_json({type(news).__name__.lower(): msgspec.to_builtins(news)})
            else:
                await self._hear(news)

    async def _hear(self, news: News) -> None:
        from duly.clients.chat import Line, Presence, Receipt

        match news:
            case Line():
                if (news.conv, news.n) not in self._shown:
                    here = bool(self.to) and news.conv == self._conv()
                    self._print.show(news, "" if here else await self._place(news))
                if self.to and news.conv == self._conv():
                    self._chat.read(news.conv, news.n)
            case Receipt() if self.to and news.conv == self._conv() and news.reader != self._chat.name:
                mark = "✓✓" if news.state == "read" else "✓"
                self._print.dim(
                    f"  {mark} {news.reader} has {'read ' if news.state == 'read' else ''}{news.n}"
                )
            case Presence():
                online = isinstance(news.data, dict) and news.data.get("online")
                self._print.dim(f"  {news.sender} {'is here' if online else 'has left'}")
            case _:
                pass

    async def _name(self, conv: str) -> str:
        if conv.startswith("#") and conv not in self._names:
            try:
                self._names[conv] = printable((await self._chat.group(conv))["name"])
            except DulyError:
                return conv
        return self._names.get(conv, conv)

    async def _place(self, line: Line) -> str:
        """Return the prefix that names the conversation of a line, if it is not the current one."""
        from duly.apps.chat.conversations import pair_in

        if line.conv.startswith("#"):
            return f"[{await self._name(line.conv)}] "
        if not self.to or line.conv.startswith("~"):
            return ""
        to = next((name for name in pair_in(line.conv) if name != line.sender), line.sender)
        return "[to you] " if to == self._chat.name else f"[to {to}] "


def _rank(word: str) -> Any:
    if word not in ("owner", "admin", "member"):
        raise ValueError(word)
    return word


class _Pipe:
    """Lines from a pipe."""

    def printing(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context in which lines can be printed while input is read."""
        from contextlib import nullcontext

        return nullcontext(say)

    async def lines(self, prompt: Callable[[], str]) -> AsyncIterator[str]:
        """Yield the lines of standard input as they come."""
        loop = asyncio.get_running_loop()
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdin.isatty()):
            while said := await asyncio.to_thread(sys.stdin.buffer.readline):  # a file cannot be waited for
                yield said.decode(errors="replace")
            return
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            yield line.decode(errors="replace")


class _Terminal:
    """Lines that a person types; what arrives meanwhile is printed above the unfinished line."""

    def printing(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context in which lines are printed above the prompt."""
        from contextlib import contextmanager

        from prompt_toolkit import ANSI, print_formatted_text
        from prompt_toolkit.patch_stdout import patch_stdout

        @contextmanager
        def printing() -> Iterator[Callable[[str], None]]:
            with patch_stdout(raw=True):
                yield lambda text: print_formatted_text(ANSI(rendered(text)))

        return printing()

    async def lines(self, prompt: Callable[[], str]) -> AsyncIterator[str]:
        """Yield what the user types, until the end of input."""
        from prompt_toolkit import PromptSession

        session: PromptSession[str] = PromptSession()
        while True:
            try:
                yield await session.prompt_async(prompt())
            except (EOFError, KeyboardInterrupt):
                return
