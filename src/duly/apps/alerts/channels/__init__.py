"""Opens the channel of an address.

`http(s)://` is the signed webhook, `cloudevents+http(s)://` the same with CloudEvents, `mailto(s)://` is
mail, `file:NAME` and `console:` are for trying out; Apprise handles everything else. A label is what people
see of an address: its host and a few digits of its hash, so that two addresses on one host differ. What
precedes the `#` names the channel: when one address of it works again, all of them are tried.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qs, urlsplit

from duly.apps.alerts.channels.channel import Channel
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.core.fanout.plan import DoubtPolicy
from duly.errors import Malformed

WEBHOOK: Final = frozenset(
    f"{form}{scheme}" for form in ("", "cloudevents+", "cloudevents-binary+") for scheme in ("http", "https")
)
MAIL: Final = frozenset({"mailto", "mailtos"})
LOCAL: Final = frozenset({"file", "console"})


def label_of(url: str, key: bytes = b"") -> str:
    """Return the label of an address. It leaves out the parts that hold passwords and tokens; with a key, not
    even a guess at them can be checked.

    >>> label_of("https://token@hooks.example.com/secret/path")
    'https:hooks.example.com#fa956f'
    >>> label_of("mailto://user:password@mail.example.com?to=ops@example.com")
    'mailto:mail.example.com#9be329'
    """
    parts = _split(url)
    digest = blake2b(url.encode(), digest_size=3, key=key).hexdigest()
    if parts.scheme in LOCAL:
        where = Path(parts.path).name or "-"
    elif parts.scheme in WEBHOOK | MAIL:
        where = parts.netloc.rpartition("@")[2]
    else:
        where = "apprise"  # services put their tokens in different parts, some in that of the host
    return f"{parts.scheme}:{where}#{digest}"


def check_url(url: str, *, private: bool = True) -> None:
    """Raise `Malformed` for an address that no channel can use; without `private`, also for one in a
    private network."""
    parts = _split(url)
    if parts.scheme in WEBHOOK:
        from duly.apps.alerts.channels.webhook import check_host

        check_host(parts, private=private)
    elif parts.scheme in MAIL:
        from duly.apps.alerts.channels.address_guard import check_written
        from duly.apps.alerts.channels.mail import MailAddress

        box = MailAddress.parse(parts)
        if not private:
            check_written(box.host)
    elif parts.scheme == "file":
        from duly.apps.alerts.channels.local import check_file_name

        check_file_name(parts.path)
    elif parts.scheme not in LOCAL:
        from duly.apps.alerts.channels.apprise_services import check_service

        check_service(url, private=private)
    declared(url)


def is_outside(url: str) -> bool:
    """Return whether an address is that of a file which may not be written; older versions stored such."""
    parts = _split(url)
    if parts.scheme != "file":
        return False
    from duly.apps.alerts.channels.local import is_file_name

    return not is_file_name(parts.path)


def is_webhook(url: str) -> bool:
    """Return whether an address is that of a webhook, which has a secret."""
    return _split(url).scheme in WEBHOOK


def declared(url: str) -> DoubtPolicy:
    """Return what follows an attempt in doubt at this address: `?doubt=resend|repeat|stop`, or the default of
    its channel."""
    parts = _split(url)
    asked = parse_qs(parts.query).get("doubt") if parts.scheme not in WEBHOOK else None
    if asked:
        try:
            return DoubtPolicy(asked[-1])
        except ValueError:
            known = ", ".join(doubt.value for doubt in DoubtPolicy)
            raise Malformed(f"doubt={asked[-1]!r} is not known; use one of {known}") from None
    return DoubtPolicy.RESEND if parts.scheme in WEBHOOK | LOCAL else DoubtPolicy.REPEAT


def open_channel(
    url: str,
    secret: str = "",
    *,
    folder: Path | None = None,
    private: bool = False,
    threads: ChannelThreads | None = None,
) -> Channel:
    """Open the channel of an address; `folder` is the data folder, without which no file is written. The
    channels of one hub share their `threads`."""
    threads = threads or ChannelThreads()
    parts = _split(url)
    if parts.scheme in WEBHOOK:
        from duly.apps.alerts.channels.webhook import WebhookChannel

        return WebhookChannel(url, secret, threads, private=private)
    if parts.scheme in MAIL:
        from duly.apps.alerts.channels.mail import MailChannel

        return MailChannel(parts, threads, private=private)
    if parts.scheme in LOCAL:
        from duly.apps.alerts.channels.local import ConsoleChannel, FileChannel

        if parts.scheme == "console":
            return ConsoleChannel(threads)
        return FileChannel(folder, parts.path, threads)
    from duly.apps.alerts.channels.apprise_services import AppriseChannel

    return AppriseChannel(url, threads, private=private)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in WEBHOOK | MAIL:  # other services may put a token in the part of the port
            _ = parts.port
    except ValueError:
        raise Malformed("this address has an invalid host or port; write scheme://host…") from None
    if not parts.scheme or ":" not in url:
        raise Malformed("an address must begin with its scheme: https://…, mailto://…, file:…, ntfy://…")
    return parts
