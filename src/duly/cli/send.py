"""`duly send`: one command to one device, and both acknowledgements as they come.

The law: what is shown is what went over the wire. The command is sent again with the same id until it is
answered, as any app does.

The verb sends under the name of an app, whose own counter it must not disturb. So the counter of an id made
here is a time in microseconds, far above any counter of an app, and the command either has no order or
follows no other."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    HubClient,
    HubUnreachable,
    clock,
    note,
    print_json,
    say,
    state_code,
    tint,
    took,
)
from duly.cli.options import HubOptions, Json, MessageId, grouped, length

if TYPE_CHECKING:
    from duly.wire.frames import Frame

CONNECT_SECONDS = 5.0


@grouped
def send(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="lock_control, dev_control, query, …")],
    body: Annotated[str | None, typer.Argument(metavar="JSON", help="The command's data. [null]")] = None,
    as_: Annotated[
        str | None, typer.Option("--as", metavar="APP", help="Send as this app. [the only one that may]")
    ] = None,
    id_: MessageId = None,
    queue: Annotated[bool, typer.Option("--queue", help="Keep it for a device that is offline.")] = False,
    exp: Annotated[
        float | None, length("--exp", "It is not carried out after this time. [30s; with --queue 1d]")
    ] = None,
    timeout: Annotated[
        float | None,
        length("--timeout", "How long the device may take. [10s, set by the hub]", metavar="60s"),
    ] = None,
    wait: Annotated[
        float | None,
        length("--wait", "How long to wait for its end. [10s, or --timeout; with --queue 1s]", metavar="10s"),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="KEY", help="Run it in order with others of this key. [no order]"),
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Of the commands with this order key, only the newest is run.")
    ] = False,
    *,
    at: HubOptions,
    json: Json = False,
) -> None:
    """Send a command to a device, and show both acknowledgements.

    `server_ack` says that the hub has stored it, `ack` how it ended. Without --token it goes through the hub
    on this machine, as the one app that may command the device.

    Exits with 0 if it was done, 1 if it failed, 4 if it is not allowed, 5 if its end is not known (yet), 6 if
    the hub refused it. With --queue and without --wait, 0 also if it was accepted and has not ended.
    """
    hub = _as_whom(device, as_, at.need(), at.token)
    frame = _frame(device, type_, body, id_, queue, exp, order, latest, timeout)
    hub.knock()
    patience = wait if wait is not None else 1.0 if queue else max(10.0, (timeout or 0.0) + 1)
    log = _Log(device, json)
    asyncio.run(_send(hub, frame, patience, log))
    code = log.code()
    if log.accepted and log.ended is None:
        if queue and wait is None:
            code = Exit.OK
        if not json:
            note(f"not ended yet; see how it went with: duly outcome {frame.seq_id}")
    elif code is Exit.UNKNOWN and not log.said:
        note(
            "the hub did not answer, so it may or may not have the command; send it again with the same --id"
        )
    raise typer.Exit(code)


def _as_whom(device: str, as_: str | None, hub: HubClient, token: str | None) -> HubClient:
    if as_ is None and token is not None:
        return HubClient(hub.url, token, local=hub.local)
    if as_ is None:
        grants: dict[str, list[str]] = hub.ask("/v1/admin/list", {})["grants"]
        apps = [app for app, devices in grants.items() if device in devices]
        if not apps:
            raise CommandFailed(
                Exit.NOT_ALLOWED, f"no app may command {device}; allow one with: duly grant APP {device}"
            )
        if len(apps) > 1:
            raise CommandFailed(
                Exit.USAGE, f"several apps may command {device}; choose one with --as: {', '.join(apps)}"
            )
        as_ = apps[0]
    return HubClient(hub.url, hub.temporary_token(as_), local=hub.local)


def _frame(
    device: str,
    type_: str,
    body: str | None,
    id_: str | None,
    queue: bool,
    exp: float | None,
    order: str | None,
    latest: bool,
    timeout: float | None,
) -> Frame:
    import msgspec

    from duly.core.ids import SeqId
    from duly.core.messages import Mode
    from duly.wire import any_json
    from duly.wire.fields import NOTHING
    from duly.wire.frames import Frame, FrameOrder

    if body is not None:
        try:
            any_json.read(body)
        except msgspec.DecodeError as problem:
            raise CommandFailed(
                Exit.USAGE,
                f"the data is not JSON ({problem}); quote it for the shell, like '{{\"open\":true}}'",
            ) from None
    if id_ == "":
        raise CommandFailed(Exit.USAGE, "the id is empty; leave --id out to have one made")
    mode = Mode.LATEST if latest else Mode.REPLAY
    now = time.time_ns() // 1000
    return Frame(
        type_,
        id_ or str(SeqId(now // 1000, now)),
        device,
        data=NOTHING if body is None else msgspec.Raw(body.encode()),
        exp=None if exp is None else now // 1000 + round(exp * 1000),
        queue=queue,
        timeout=None if timeout is None else max(1, round(timeout * 1000)),
        order=FrameOrder(order or "", mode, after=-1) if order is not None or latest else False,
    )


class _Log:
    """The frames that answered the command, with their times since it was first sent."""

    def __init__(self, device: str, json: bool) -> None:
        self._device = device
        self._json = json
        self._began = time.monotonic()
        self.said: Frame | None = None
        self.ended: Frame | None = None

    @property
    def accepted(self) -> bool:
        """Whether the hub has accepted the command, now or before."""
        from duly.wire.frames import ServerCode

        return self.said is not None and self.said.code in (ServerCode.ACCEPTED, ServerCode.DUPLICATE)

    def begin(self, frame: Frame, again: int) -> None:
        """Print that the command goes out, for the first time or again."""
        if not again:
            self._began = time.monotonic()
            self._line("sent", f"sent        {frame.type} to {self._device}, id {frame.seq_id}", frame)
        else:
            self._line("sent again", f"sent again  the same id, for the {_nth(again)} time", frame)

    def heard(self, frame: Frame) -> None:
        """Print a frame that answers the command, and keep it."""
        from duly.wire.frames import DeviceCode, ServerCode, is_working, load

        if frame.type == "server_ack":
            self.said = frame
            code = frame.code if frame.code is not None else ServerCode.INTERNAL
            word = ServerCode(code).name.lower().replace("_", " ") if 0 <= code <= 5 else "?"
            shown = tint(word if code in (0, 5) else "refused")
            more = f", it is {tint(frame.state)}" if frame.state else ""
            why = f": {frame.detail}" if frame.detail else ""
            self._line("server_ack", f"server_ack  code {code} {shown}{more}{why}", frame)
        elif is_working(frame):
            how_far = f"  {bytes(frame.progress).decode()}" if frame.progress else ""
            self._line("working", f"working     {self._device} is working on it{how_far}", frame)
        else:
            self.ended = frame
            code = frame.code if frame.code is not None else -1
            name = DeviceCode(code).name.lower().replace("_", " ") if 0 <= code <= 7 else ""
            state = frame.state or "done"
            what = "" if name in (state, "done") else f" {name}"
            why = f": {frame.detail}" if frame.detail else ""
            answer = f"  {bytes(frame.data).decode()}" if load(frame.data) is not None else ""
            self._line("ack", f"ack         code {code}{what}, {tint(state)}{why}{answer}", frame)

    def _line(self, what: str, line: str, frame: Frame | None = None) -> None:
        from duly.wire import any_json
        from duly.wire.frames import encode

        ms = round((time.monotonic() - self._began) * 1000, 1)
        if not self._json:
            since = "" if what == "sent" else f"+{took(ms)}"
            say(f"{clock(time.time() * 1000)}  {since:>9}  {line}")
            return
        fields = {} if frame is None else any_json.read_object(encode(frame))
        print_json({"what": what, "after_ms": ms} | fields)

    def code(self) -> Exit:
        """Return the exit status for what is known of the command."""
        from duly.wire.frames import ServerCode

        if self.ended is not None:
            return state_code(self.ended.state or "done")
        if self.said is None or self.accepted or self.said.code == ServerCode.INTERNAL:
            return Exit.UNKNOWN
        return Exit.NOT_ALLOWED if self.said.code == ServerCode.NOT_ALLOWED else Exit.REFUSED


def _nth(again: int) -> str:
    return {1: "second", 2: "third", 3: "fourth"}.get(again, f"{again + 1}th")


async def _send(hub: HubClient, frame: Frame, patience: float, log: _Log) -> None:
    from duly.clients.websocket_link import Access, WebSocketLink
    from duly.core.retry import COMMAND
    from duly.core.units import SECOND
    from duly.wire import frames

    raw = frames.encode(frame)
    news: asyncio.Queue[Frame | None] = asyncio.Queue()
    link = WebSocketLink(
        hub.url,
        hub.token,
        up=lambda _: news.put_nowait(None),
        heard=news.put_nowait,
        access=Access(tls=hub.tls),
    )
    await link.start()
    try:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await link.ready()
        except TimeoutError:
            raise HubUnreachable(hub.url, "no connection") from None
        loop = asyncio.get_running_loop()
        sent, attempt, resend = 0, 0, float("inf")
        until = float("inf")
        while True:
            try:
                async with asyncio.timeout_at(min(resend, until)):
                    heard = await news.get()
            except TimeoutError:
                if loop.time() >= until:
                    return
                heard = None
            if heard is None:  # the connection was made (again), or it is time to resend
                log.begin(frame, sent)
                link.send(raw)
                sent += 1
                attempt += 1
                pause = COMMAND.delay(attempt, b"")
                resend = float("inf") if pause is None else loop.time() + pause / SECOND
                if until == float("inf"):
                    until = loop.time() + max(patience, CONNECT_SECONDS)
            elif heard.seq_id in (frame.seq_id, None) and heard.type in ("server_ack", "ack"):
                log.heard(heard)
                if frames.is_working(heard):
                    until = loop.time() + patience
                    continue
                if heard.type == "ack" or not (log.accepted or heard.code == frames.ServerCode.INTERNAL):
                    return
                if log.accepted:
                    resend = float("inf")
                    until = min(until, loop.time() + patience)
    finally:
        await link.stop()
