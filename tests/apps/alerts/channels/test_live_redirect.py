"""A public receiver that redirects into our network, with real addresses: this file is also run as a program,
in a network of its own where a public address is this machine's."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys

from duly.apps.alerts.channels import open_channel
from duly.errors import ChannelError
from tests.apps.alerts.channels.test_address_guard import NOTICE, SERVICES, Inside
from tests.servers import unable

PUBLIC = "8.8.4.4"


def isolated(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["unshare", "--net", *command], capture_output=True, text=True, check=False)


def test_no_channel_follows_a_redirect_from_a_public_address_into_our_network() -> None:
    if not shutil.which("unshare") or not shutil.which("ip") or isolated("true").returncode:
        unable("a network of one's own needs root, unshare and ip")
    done = isolated(sys.executable, "-m", "tests.apps.alerts.channels.test_live_redirect")
    assert done.stderr == ""
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "307" in said.pop("http"), "the signed webhook follows none"
    assert said.keys() == set(SERVICES)
    assert all("private network" in why for why in said.values()), said


async def tell(url: str) -> str:
    channel = open_channel(url, private=False)
    try:
        await channel.send(NOTICE)
    except ChannelError as problem:
        return str(problem)
    finally:
        await channel.close()
    return "it was sent"


def main() -> None:
    """Print for each channel how its notification ended; fail if it was not asked, or went too far."""
    for command in ("link set lo up", f"address add {PUBLIC}/32 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
    public, private = Inside(PUBLIC), Inside("127.0.0.1")
    public.leads_to = f"http://127.0.0.1:{private.port}/secret"
    for number, scheme in enumerate(("http", *SERVICES), 1):
        why = asyncio.run(tell(f"{scheme}://{PUBLIC}:{public.port}/topic"))
        assert (len(public.visits), len(private.visits)) == (number, 0), f"{scheme}: {why}"
        sys.stdout.write(f"{scheme}: {why}\n")


if __name__ == "__main__":
    main()
