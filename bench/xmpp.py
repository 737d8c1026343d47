"""Prosody and ejabberd as Debian packages them, each with and without its message archive: free ports on
loopback, folders of their own, no encryption (duly's hub has none here either), and no rate limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.processes import Server
from bench.servers import free_port, running, until_open

PROSODY = """
run_as_root = true
modules_enabled = {{ "roster"; "saslauth"; "disco"; "register"; "offline"; {archive} }}
modules_disabled = {{ "s2s"; "tls"; "limits" }}
allow_registration = true
c2s_require_encryption = false
allow_unencrypted_plain_auth = true
authentication = "internal_plain"
c2s_ports = {{ {port} }}
c2s_interfaces = {{ "127.0.0.1" }}
data_path = "{root}"
log = {{ error = "{root}/log" }}
default_archive_policy = true
daemonize = false
VirtualHost "localhost"
"""

EJABBERD = """
loglevel: error
hosts: [localhost]
listen:
  - {{port: {port}, ip: "127.0.0.1", module: ejabberd_c2s, max_stanza_size: 262144, access: all}}
auth_method: [internal]
auth_password_format: plain
registration_timeout: infinity
access_rules: {{max: [{{allow: all}}]}}
shaper_rules: {{max_user_sessions: 10, max_user_offline_messages: infinity}}
modules:
  mod_roster: {{}}
  mod_register: {{ip_access: all, access: all}}
  mod_offline: {{access_max_user_messages: max_user_offline_messages, store_groupchat: false}}
{archive}
"""


@contextlib.contextmanager
def prosody(root: Path, *, archive: bool) -> Iterator[Server | None]:
    if shutil.which("prosody") is None:
        yield None
        return
    root.mkdir()
    port = free_port()
    config = root / "prosody.cfg.lua"
    config.write_text(PROSODY.format(port=port, root=root, archive='"mam";' if archive else ""))
    with _server(["prosody", "--config", str(config), "-F"], port, root, {}) as server:
        yield server


@contextlib.contextmanager
def ejabberd(root: Path, *, archive: bool) -> Iterator[Server | None]:
    if not list(Path("/usr/lib").glob("*/ejabberd-*/ebin")) or shutil.which("erl") is None:
        yield None
        return
    root.mkdir()
    port = free_port()
    config = root / "ejabberd.yml"
    mam = "  mod_mam: {default: always, assume_mam_usage: true}" if archive else ""
    config.write_text(EJABBERD.format(port=port, archive=mam))
    libraries = next(iter(Path("/usr/lib").glob("*/ejabberd-*"))).parent
    environment = {
        "ERL_LIBS": str(libraries),
        "EJABBERD_CONFIG_PATH": str(config),
        "EJABBERD_LOG_PATH": str(root / "log"),
    }
    command = ["erl", "-noinput", "+K", "true", "-mnesia", "dir", f'"{root / "db"}"', "-s", "ejabberd"]
    with _server(command, port, root, environment) as server:
        yield server


@contextlib.contextmanager
def _server(command: list[str], port: int, root: Path, more: dict[str, str]) -> Iterator[Server]:
    with (root / "out").open("wb") as out:
        process = subprocess.Popen(
            command, cwd=root, env=os.environ | more, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    with running(process):
        until_open(port, process, command[0])
        yield Server(f"xmpp://127.0.0.1:{port}", process.pid, command[0])
