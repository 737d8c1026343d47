from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import servers


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server
