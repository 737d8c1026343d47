"""Clients of the embedded broker: a client id belongs to the account that used it first."""

from __future__ import annotations

from pathlib import Path

from duly.broker import acl_dialects
from duly.broker.clients import BrokerClients, UserList


async def test_whose_the_client_ids_are_is_kept_and_a_broken_file_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "client_ids.json"
    users = UserList([acl_dialects.device(name, "x") for name in ("lock", "thief")])
    clients = BrokerClients(users, None)
    clients.restore(path)
    assert clients._client_ids.owner("esp32", "lock") == "lock"
    clients.keep(path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = BrokerClients(users, None)
    again.restore(path)
    assert again._client_ids.owner("esp32", "thief") == "lock"
    path.write_bytes(b"{")
    again = BrokerClients(users, None)
    again.restore(path)
    assert again._client_ids.owner("esp32", "thief") == "thief"
