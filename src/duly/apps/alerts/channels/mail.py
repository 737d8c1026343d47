"""The channel for mail by SMTP: `mailto://user:password@host:port?from=a@b&to=c@d&to=e@f`; `mailtos://`
demands TLS.

In SMTP a server accepts a mail with its answer to the last line. Before that the mail was certainly not
accepted, and an error while waiting for that answer leaves it in doubt. Apprise only reports that sending
failed, so this channel speaks SMTP itself, with the standard library. A repeat has the same Message-ID.
"""

from __future__ import annotations

import re
import smtplib
import socket
import ssl
from email.message import EmailMessage
from email.utils import formatdate, parseaddr
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote

from msgspec import Struct

from duly.apps.alerts.channels.address_guard import PRIVATE, PrivateAddress, public_only
from duly.apps.alerts.channels.channel import Channel, Notification
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.errors import Declined, InDoubt, Malformed, NotSent

SECONDS: Final = 15.0
"""The limit for each step of the conversation."""
ALL_SECONDS: Final = 40.0
"""The limit for the whole conversation."""
PORTS: Final = {"mailto": 25, "mailtos": 587}
TLS_PORT: Final = 465
"""The port at which TLS is set up before SMTP begins."""


class MailAddress(Struct, frozen=True):
    """A mail server, a sender and recipients, as an address names them."""

    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    user: str = ""
    password: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, parts: SplitResult) -> MailAddress:
        """Read an address; raises `Malformed` if it is incomplete."""
        asked = parse_qs(parts.query)
        to = tuple(one for many in asked.get("to", []) for one in many.split(","))
        sender = asked.get("from", ["duly@localhost"])[-1]
        if not parts.hostname or not to:
            raise Malformed("mail needs a server and a recipient: mailto://host:25?from=a@b&to=c@d")
        for one in (*to, sender):
            if "@" not in parseaddr(one)[1] or "\n" in one or "\r" in one:
                raise Malformed(f"{one[:80]!r} is not a mail address")
        return cls(
            parts.hostname,
            parts.port or PORTS[parts.scheme],
            sender,
            to,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            parts.scheme == "mailtos",
        )


class MailChannel(Channel):
    """Sends to one or several mailboxes, which get the same mail."""

    def __init__(self, parts: SplitResult, threads: ChannelThreads, *, private: bool = False) -> None:
        self._private = private
        self._threads = threads
        self._box = MailAddress.parse(parts)

    async def send(self, notification: Notification) -> None:
        """Send one mail by SMTP; its Message-ID is made from the notification's id."""
        mail = EmailMessage()
        mail["Subject"] = " ".join(notification.title.split())
        mail["From"] = self._box.sender
        mail["To"] = ", ".join(self._box.to)
        mail["Date"] = formatdate()
        mail["Message-ID"] = f"<{notification.id}@{self._box.sender.rpartition('@')[2].rstrip('>')}>"
        if notification.urgent:
            mail["X-Priority"] = "1"
        mail.set_content(notification.text)
        try:
            await self._threads.run(self._box.host, ALL_SECONDS, lambda: self._send(mail))
        except TimeoutError:
            raise InDoubt(f"the mail server did not finish within {ALL_SECONDS:.0f} s") from None

    def _send(self, mail: EmailMessage) -> None:
        if self._private:
            self._converse(mail)
            return
        try:
            with public_only():
                self._converse(mail)
        except PrivateAddress:
            raise Declined(PRIVATE) from None

    def _converse(self, mail: EmailMessage) -> None:
        box = self._box
        begun = False  # whether the server has accepted the mail
        try:
            first = smtplib.SMTP_SSL if box.tls and box.port == TLS_PORT else smtplib.SMTP
            with first(box.host, box.port, timeout=SECONDS, local_hostname="localhost") as server:
                if box.tls and first is smtplib.SMTP:
                    server.starttls(context=ssl.create_default_context())
                if box.user:
                    server.login(box.user, box.password)
                self._hand_over(server, mail)
                begun = True  # accepted; an error while disconnecting does not matter
        except smtplib.SMTPRecipientsRefused as problem:
            code, _ = next(iter(problem.recipients.values()))
            raise _answered(code) from None
        except smtplib.SMTPAuthenticationError as problem:
            raise _answered(problem.smtp_code, "the login was refused") from None
        except smtplib.SMTPResponseException as problem:
            if not begun:
                raise _answered(problem.smtp_code) from None
        except smtplib.SMTPNotSupportedError:
            raise Declined("the mail server does not offer what this address asks for") from None
        except PrivateAddress:
            raise
        except (smtplib.SMTPException, OSError) as problem:
            if not begun:
                why = "does not answer" if isinstance(problem, socket.timeout) else "cannot be reached"
                raise NotSent(f"the mail server {why}") from None

    def _hand_over(self, server: smtplib.SMTP, mail: EmailMessage) -> None:
        box = self._box
        server.ehlo_or_helo_if_needed()
        code, _ = server.mail(parseaddr(box.sender)[1])
        if code != 250:
            raise _answered(code)
        for to in box.to:
            code, _ = server.rcpt(parseaddr(to)[1])
            if code not in (250, 251):
                raise _answered(code)
        code, _ = server.docmd("DATA")
        if code != 354:
            raise _answered(code)
        text = mail.as_bytes(policy=mail.policy.clone(linesep="\r\n", cte_type="7bit"))
        # a line with a single dot would end the mail
        dotted = re.sub(rb"(?m)^\.", b"..", text.rstrip(b"\r\n"))
        server.send(dotted + b"\r\n.\r\n")
        try:
            code, _ = server.getreply()
        except (smtplib.SMTPException, OSError):
            raise InDoubt("the connection broke before the mail server had answered") from None
        if code != 250:
            raise _answered(code)

    async def close(self) -> None:
        """Do nothing: each mail has its own connection."""
        pass


def _answered(code: int, what: str = "it was refused") -> NotSent | Declined:
    if 500 <= code < 600:
        return Declined(f"{what} by the mail server with code {code}")
    return NotSent(f"{what} by the mail server with code {code}, for now")
