"""The configuration of the nats-server that is the embedded broker, as text.

The law: a client connects by MQTT only, over TCP or over WebSocket, and only if the hub lets it in. The port
of NATS itself is for the hub alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from duly.broker.acl_dialects import DEVICES, NODES
from duly.broker.broker_streams import imported
from duly.broker.callout import USER
from duly.settings import LOOPBACK

ACK_PENDING: Final = 4096
"""Messages under way to one subscription at QoS 1; a session may then have 15 subscriptions. The server
drops what exceeds the limit of all of them together and sends it again after `ACK_WAIT`: with 1024 that
happened to one in ten messages of a burst of acks and completes."""

HANDSHAKE: Final = 10
"""Seconds for a TLS handshake; the default of 2 is too short for a busy small machine."""

JUDGED_WITHIN: Final = 10
"""Seconds within which the hub has to say whether a client may connect."""

FLUSH_EVERY: Final = 5
"""Seconds between flushes to the disk, unless every message is flushed."""

DISK_LIMIT: Final = 5 << 30
"""Bytes of all that is stored. The limits of messages (`broker_streams`) leave some of it for sessions: a
client that cannot connect could never fetch what fills the disk."""

PAYLOAD_LIMIT: Final = 1 << 20
"""Bytes of one message."""


class NatsServing(Struct, frozen=True, kw_only=True):
    """Where clients reach the broker, and how."""

    listen: str
    mqtt_port: int
    websocket_port: int | None = None
    """where it serves MQTT over WebSocket; None: nowhere"""
    origins: Sequence[str] = ()
    """other origins whose pages may connect there"""
    tls_cert: str = ""
    tls_key: str = ""


def configuration(store: Path, serving: NatsServing, *, ack_wait: float, password: str, issuer: str) -> bytes:
    """Return the whole file. `password` is that of the hub's own connection, `issuer` the key that it signs
    with."""
    return (
        b"server_name: duly\n"
        b'listen: "127.0.0.1:-1"\n'  # for the hub alone: clients connect by MQTT only
        b'jetstream { store_dir: %b, sync_interval: "%ds", max_mem: 64MB, max_file: %d }\n'
        b"%b"
        b"max_payload: %d\n"
        b"system_account: duly_system\n"
        b"accounts {\n"
        # not over WebSocket, whose port is not for the hub alone
        b"  duly_system { users: [ { user: %b, password: %b, allowed_connection_types: [STANDARD] } ]\n"
        b"    imports: [ %b ] }\n"
        b"%b"
        b"}\n"
        b"authorization { timeout: %d, auth_callout {\n"
        b"  issuer: %b, account: duly_system, auth_users: [%b]\n"
        b"} }\n"
    ) % (
        _quoted(str(store)),
        FLUSH_EVERY,
        DISK_LIMIT,
        _listeners(serving, ack_wait),
        PAYLOAD_LIMIT,
        _quoted(USER),
        _quoted(password),
        b", ".join(map(_imported, (DEVICES, NODES))),
        b"".join(map(_account, (DEVICES, NODES))),
        JUDGED_WITHIN,
        issuer.encode(),
        _quoted(USER),
    )


def _account(name: str) -> bytes:
    """Return an account of clients, whose streams the hub may read."""
    exported = b'{ service: "$JS.API.>", accounts: [duly_system] }'
    return b"  %b { jetstream: enabled, exports: [ %b ] }\n" % (name.encode(), exported)


def _imported(account: str) -> bytes:
    """Return the streams of an account, as the hub reaches them (`duly.broker.broker_streams`)."""
    to = _quoted(f"{imported(account)}.>")
    return b'{ service: { account: %b, subject: "$JS.API.>" }, to: %b }' % (account.encode(), to)


def _listeners(serving: NatsServing, ack_wait: float) -> bytes:
    """Return the ports for clients."""
    host, tls = _quoted(serving.listen), b""
    if serving.tls_cert:
        cert, key = (_quoted(str(Path(file).absolute())) for file in (serving.tls_cert, serving.tls_key))
        tls = b", tls { cert_file: %b, key_file: %b, timeout: %d }" % (cert, key, HANDSHAKE)
    text = b"mqtt { host: %b, port: %d, ack_wait: %b, max_ack_pending: %d%b }\n" % (
        host,
        serving.mqtt_port,
        _quoted(f"{round(ack_wait * 1000)}ms"),
        ACK_PENDING,
        tls,
    )
    if serving.websocket_port is None:
        return text
    origins = b", ".join(map(_quoted, _origins(serving)))
    # A page whose own name leads to this machine (DNS rebinding) has that name as its origin and as its host.
    # So a broker for this machine alone compares with a list, and not with the host.
    listed = serving.origins or serving.listen in LOOPBACK
    return text + b'websocket { host: %b, port: %d, handshake_timeout: "%ds", %b%b }\n' % (
        host,
        serving.websocket_port,
        HANDSHAKE,
        b"allowed_origins: [%b]" % origins if listed else b"same_origin: true",
        tls or b", no_tls: true",
    )


def _origins(serving: NatsServing) -> list[str]:
    """Return the origins that may connect: those that are named and, since a list of them excludes it, the
    broker's own, which some clients send although they are not pages (paho)."""
    scheme = "https" if serving.tls_cert else "http"
    host = f"[{serving.listen}]" if ":" in serving.listen else serving.listen
    return [
        *serving.origins,
        *(
            f"{scheme}://{name}:{serving.websocket_port}"
            for name in dict.fromkeys((host, "localhost", "127.0.0.1", "[::1]"))
        ),
    ]


_quoted: Final = msgspec.json.encode
