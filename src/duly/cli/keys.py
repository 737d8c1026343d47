"""`duly keys new trust forget list`: the key that a node signs with, and the keys that it trusts.

The law: a secret is never shown. A secret shared with another node goes into a file that only its owner may
read; a public key is printed, as the command that makes another node trust it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from duly.cli.common import CommandFailed, Exit, note, print_json, say, table
from duly.cli.options import Json

if TYPE_CHECKING:
    from duly.core.signing import Key, Keyring

app = typer.Typer(help="Keys that nodes sign with, and keys that they trust.", no_args_is_help=True)

Keys = Annotated[
    str,
    typer.Option(
        "--keys", metavar="FILE", envvar="DULY_KEYS", help="The keyring, readable by its owner only."
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The username of a node at the broker.")]
FILE = "duly-keys.json"


@app.command("new")
def new(
    name: Name,
    shared_with: Annotated[
        str | None,
        typer.Option(
            "--shared-with",
            metavar="PEER",
            help="Make an HMAC secret that NAME shares with PEER instead. [no]",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="The file for the secret of --shared-with. [none]"),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the existing key; other nodes must then trust the new one."),
    ] = False,
    keys: Keys = FILE,
    json: Json = False,
) -> None:
    """Make the key that NAME signs with, and print its public part, which other nodes can trust.

    With --shared-with it is a secret of two nodes, for devices too small for Ed25519. It is written to a
    file, which you copy to the other node: 'duly keys trust NAME --file FILE'.
    """
    from duly.core.signing import Algorithm, Keyring
    from duly.identity import keyring as files
    from duly.wire.fd import check_username

    check_username(name)
    if (shared_with is None) != (out is None):
        raise CommandFailed(
            Exit.USAGE, "use --shared-with PEER and --out FILE together: the file carries the secret to PEER"
        )
    key = files.new_key(Algorithm.HMAC if shared_with else Algorithm.ED25519)

    def change(ring: Keyring | None) -> Keyring:
        ring = _of(name, ring)
        if shared_with is not None and out is not None:
            files.write_key(out, key)
            return ring.trust(check_username(shared_with), key)
        if ring.own is not None and not replace:
            raise CommandFailed(
                Exit.REFUSED, f"{name} already has a key in {keys}; use --replace to replace it"
            )
        return Keyring(ring.name, key, ring.peers)

    files.edit(keys, change)
    if json:
        print_json(_shown(name, key, "own" if shared_with is None else "shared"))
    elif shared_with is None:
        note(f"{name} signs with {keys} from now on. On each node that is to trust it, run:")
        say(f"duly keys trust {name} {key.shown}")
    else:
        note(f"copy {out} to {shared_with}, and run there:")
        say(f"duly keys trust {name} --file {out} --as {shared_with}")


@app.command("trust")
def trust(
    name: Name,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="What its owner's 'duly keys new' printed.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="The file of a shared secret. [none]")
    ] = None,
    me: Annotated[
        str | None,
        typer.Option("--as", metavar="ME", help="This node's name, for a new keyring. [the keyring's]"),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Stop trusting every other key of NAME.")
    ] = False,
    keys: Keys = FILE,
    json: Json = False,
) -> None:
    """Trust what NAME signs with this key."""
    from duly.core.signing import read_key
    from duly.identity import keyring as files
    from duly.wire.fd import check_username

    check_username(name)
    if (key is None) == (file is None):
        raise CommandFailed(Exit.USAGE, "give either the KEY to trust, or --file with a shared secret")
    believed = read_key(key) if key is not None else files.read_key_file(file or "")

    def change(ring: Keyring | None) -> Keyring:
        if ring is None and me is None:
            raise CommandFailed(
                Exit.USAGE,
                f"there is no keyring in {keys}; make one with 'duly keys new ME', "
                "or name this node with --as ME",
            )
        ring = _of(check_username(me) if me else "", ring)
        return (ring.forget(name) if replace else ring).trust(name, believed)

    files.edit(keys, change)
    if json:
        print_json(_shown(name, believed, _sort(believed)))
    else:
        note(f"what {name} signs with key {believed.kid} is trusted now; restart running nodes")


@app.command("forget")
def forget(
    name: Name,
    kid: Annotated[str, typer.Argument(metavar="[KID]", help="One key; without it all of NAME's.")] = "",
    keys: Keys = FILE,
    json: Json = False,
) -> None:
    """Stop trusting this key, or every key of NAME."""
    from duly.identity import keyring as files

    def change(ring: Keyring | None) -> Keyring:
        less = None if ring is None else ring.forget(name, kid)
        if less is None or less == ring:
            raise CommandFailed(
                Exit.REFUSED, f"no such key of {name} is trusted; 'duly keys list' shows which are"
            )
        return less

    files.edit(keys, change)
    if json:
        print_json({"name": name, "kid": kid or None, "changed": True})
    else:
        note(f"{name} is no longer trusted with {kid or 'any key'}; restart running nodes")


@app.command("list")
def list_(keys: Keys = FILE, json: Json = False) -> None:
    """Show all keys, without their secrets."""
    from duly.identity import keyring as files

    ring = files.load(keys)
    rows = [_shown(ring.name, ring.own, "own")] if ring.own is not None else []
    rows += [_shown(peer.name, peer.key, _sort(peer.key)) for peer in ring.peers]
    if json:
        print_json({"name": ring.name, "keys": rows})
    else:
        table(("NAME", "IS", "KID", "KEY"), ((r["name"], r["is"], r["kid"], r["key"]) for r in rows))


def _of(name: str, ring: Keyring | None) -> Keyring:
    from duly.core.signing import Keyring

    if ring is None:
        return Keyring(name)
    if name and ring.name != name:
        raise CommandFailed(
            Exit.REFUSED, f"this is the keyring of {ring.name}, not of {name}; name another with --keys FILE"
        )
    return ring


def _sort(key: Key) -> str:
    return "shared" if key.secret else "trusted"


def _shown(name: str, key: Key, sort: str) -> dict[str, str]:
    return {"name": name, "is": sort, "kid": key.kid, "key": key.shown}
