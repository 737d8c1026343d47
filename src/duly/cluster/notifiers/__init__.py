"""The notifiers, and a function that opens one by its address."""

from __future__ import annotations

from urllib.parse import urlsplit

from duly.cluster.notifier import Notifier
from duly.errors import Malformed


def open_notifier(url: str, me: str, ledger: str = "") -> Notifier:
    """Return the notifier at `url` for a hub called `me`; it receives nothing before `start`.

    `redis://host:6379/0` (or `rediss://`, `unix://`), `postgres` (the database of the ledger),
    `postgresql://…` (another one), `local` (one process).
    """
    match urlsplit(url).scheme or url:
        case "local":
            from duly.cluster.notifiers.local import LocalNotifier

            return LocalNotifier(me)
        case "redis" | "rediss" | "unix":
            from duly.cluster.notifiers.redis import RedisNotifier

            return RedisNotifier(me, url)
        case "postgres" | "postgresql" as scheme:
            from duly.cluster.notifiers.postgres import PostgresNotifier

            address = ledger if url == scheme else url
            if not address.startswith("postgres"):
                raise Malformed(
                    "the notifier 'postgres' needs a ledger in PostgreSQL; use redis://…, or a PostgreSQL "
                    "ledger"
                )
            return PostgresNotifier(me, address)
        case _:
            raise Malformed(f"{url!r} is not a notifier; use redis://…, postgres, postgresql://… or local")
