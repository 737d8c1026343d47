"""What a ledger says of itself, and what a database says that may have none."""

from __future__ import annotations

from duly.storage import open_ledger, sql
from duly.storage.postgres.ledger import inspect
from tests.servers import Postgres
from tests.storage.conftest import Store


async def test_a_ledger_says_what_it_is_made_of(store: Store) -> None:
    about = await (await store.open()).describe()
    name = {"memory": "memory", "sqlite": "SQLite 3.", "shared": "SQLite 3.", "postgres": "PostgreSQL "}[
        store.kind
    ]
    assert about.engine.startswith(name)
    if store.kind != "memory":
        assert about.schema == sql.migrations("sqlite" if store.kind == "shared" else store.kind)[-1].number


async def test_looking_into_a_database_makes_no_ledger_there(postgres_server: Postgres) -> None:
    url = postgres_server.create_database()
    for _ in range(2):
        assert await inspect(url) == (None, None)
    async with await open_ledger(url) as ledger:
        about, size = await inspect(url)
        assert about == await ledger.describe()
        assert size is not None
        assert size.messages == 0
