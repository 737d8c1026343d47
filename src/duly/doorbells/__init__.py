"""The doorbells, and the one door to them."""

from __future__ import annotations

from urllib.parse import urlsplit

from duly.doorbell import Doorbell
from duly.errors import Malformed


def open_doorbell(url: str, me: str, ledger: str = "") -> Doorbell:
    """The doorbell at `url`, for a hub called `me`; `start` it to hear anything.

    `redis://host:6379/0` (or `rediss://`, `unix://`), `postgres` (the database of the ledger),
    `postgresql://…` (another one), `local` (one process).
    """
    match urlsplit(url).scheme or url:
        case "local":
            from duly.doorbells.local import LocalDoorbell

            return LocalDoorbell(me)
        case "redis" | "rediss" | "unix":
            from duly.doorbells.redis import RedisDoorbell

            return RedisDoorbell(me, url)
        case "postgres" | "postgresql" as scheme:
            from duly.doorbells.postgres import PostgresDoorbell

            address = ledger if url == scheme else url
            if not address.startswith("postgres"):
                raise Malformed("the doorbell 'postgres' rings in the ledger's database, which is none here")
            return PostgresDoorbell(me, address)
        case _:
            raise Malformed(f"{url!r} is not a doorbell; use redis://…, postgres, postgresql://… or local")
