"""The address of an MQTT broker, with the login.

The law: a `BrokerAddress` object is always usable: its parts are valid, and its files exist. It is never
printed with its password.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duly.errors import Malformed

_END: Final = "-----END CERTIFICATE-----"

_OPTIONS: Final = frozenset({"client_id", "keepalive", "cafile", "cert", "key", "version", "session_expiry"})
_SCHEMES: Final = {
    "mqtt": (1883, False, False),
    "mqtts": (8883, True, False),
    "ws": (80, False, True),
    "wss": (443, True, True),
    "mqtt+ws": (80, False, True),
    "mqtt+wss": (443, True, True),
}
"""The usual port of each scheme, whether it means TLS, and whether it means a WebSocket."""

PATH: Final = "/mqtt"
"""The path at which brokers serve MQTT over WebSocket, unless an address says otherwise."""

SESSION_EXPIRY: Final = 7 * 24 * 3600
"""Seconds for which a broker keeps a session, unless an address says otherwise. Messages that wait in it for
longer are sent again by their sender's outbox."""

_UNSAFE: Final = re.compile(r"[\s.*>/%]")
"""Characters that brokers refuse in a client id; escaped as %2E and so on if a username contains them."""


class BrokerAddress(Struct, frozen=True, kw_only=True):
    """The address of a broker and our login.

    >>> BrokerAddress.parse("mqtt://lamp:secret@broker.local").client_id
    'lamp'
    """

    host: str
    port: int
    tls: bool = False
    username: str = ""
    password: str = ""
    client_id: str = ""
    keepalive: int = 30
    cafile: str = ""
    """the issuer of the broker's certificate; empty: those that the system trusts"""
    cert: str = ""
    """our own certificate, with `key`, where the broker asks for one"""
    key: str = ""
    pinned: bool = False
    """`cafile` is the broker's own certificate, which is expected whatever name it contains"""
    path: str = ""
    """where the broker serves MQTT over WebSocket; empty: MQTT over TCP"""
    version: int | None = None
    """the version of MQTT to speak, 3 (3.1.1) or 5; None: 5 if the broker speaks it, else 3"""
    session_expiry: int = SESSION_EXPIRY
    """seconds for which a broker that speaks MQTT 5 keeps our session while we are away; with 3.1.1 it
    decides that itself"""

    @classmethod
    def parse(cls, url: str) -> BrokerAddress:
        """Read an address: mqtt://user:password@host:port, or mqtts://; over WebSocket
        ws://user:password@host:port/mqtt, or wss://. Where ws:// may also be the address of a hub, mqtt+ws://
        and mqtt+wss:// mean the broker.
        Options follow as in ?client_id=…&keepalive=…; the others are cafile, cert, key, version (3 or 5) and
        session_expiry."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise Malformed("the broker's port is not a number from 0 to 65535") from None
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise Malformed(
                "a broker's address looks like mqtt://user:password@host:1883, or mqtts:// for TLS; over "
                "WebSocket ws://user:password@host:port/mqtt, or wss://"
            )
        usual, tls, websocket = _SCHEMES[parts.scheme]
        options = dict(parse_qsl(parts.query))
        strange = options.keys() - _OPTIONS
        if strange:
            known = ", ".join(sorted(_OPTIONS))
            raise Malformed(f"the broker's address has an unknown option {min(strange)!r}; there are {known}")
        version = options.get("version", "")
        if version not in ("", "3", "3.1.1", "5"):
            raise Malformed("version is 3 (for MQTT 3.1.1) or 5; without it 5 is tried, and then 3")
        for file in ("cafile", "cert", "key"):
            if file in options and not Path(options[file]).is_file():
                raise Malformed(f"{file} {options[file]!r} is not a file")
        username = unquote(parts.username or "")
        return cls(
            host=parts.hostname,
            port=port or usual,
            tls=tls,
            username=username,
            password=unquote(parts.password or ""),
            client_id=options.pop("client_id", "") or _UNSAFE.sub(lambda c: f"%{ord(c[0]):02X}", username),
            keepalive=_seconds(options, "keepalive", 30, 0xFFFF),
            cafile=options.get("cafile", ""),
            cert=options.get("cert", ""),
            key=options.get("key", ""),
            path=(parts.path if parts.path.strip("/") else PATH) if websocket else "",
            version=int(version[0]) if version else None,
            session_expiry=_seconds(options, "session_expiry", SESSION_EXPIRY, 0xFFFF_FFFF),
        )

    @property
    def websocket_url(self) -> str:
        """The address of the WebSocket, without the login, which MQTT itself carries."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ws{'s' * self.tls}://{host}:{self.port}{self.path}"

    def tls_context(self) -> ssl.SSLContext | bool:
        """Return the TLS settings for a connection to this broker; False for one without TLS."""
        if not self.tls:
            return False
        if self.pinned:
            # The first one in the file is the broker's own; its issuer and subject do not matter.
            own = Path(self.cafile).read_text().partition(_END)
            context = ssl.create_default_context(cadata=own[0] + own[1])
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            # Python 3.13 refuses certificates without fields that older tools omit; this one is only
            # compared.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            context.check_hostname = False
        else:
            context = ssl.create_default_context(cafile=self.cafile or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context

    def __repr__(self) -> str:
        who = f"{self.username}@" if self.username else ""
        scheme = "ws" if self.path else "mqtt"
        return f"{scheme}{'s' * self.tls}://{who}{self.host}:{self.port}{self.path}"


def _seconds(options: dict[str, str], name: str, usual: int, most: int) -> int:
    """Return the option of this name, which is a number of seconds."""
    text = options.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= most):
        raise Malformed(f"{name} must be a number of seconds from 1 to {most}")
    return int(text)
