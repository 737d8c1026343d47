"""Client ids belong to accounts, whoever else tries them, and however many are tried."""

from __future__ import annotations

import pytest

from duly.core.mqtt_client_ids import ClientIds


@pytest.fixture
def names() -> set[str]:
    return {"lock", "lock-1", "lamp", "thief", "hub"}


@pytest.fixture
def ids(names: set[str]) -> ClientIds:
    return ClientIds(names.__contains__, remembered=3)


@pytest.mark.parametrize(
    ("client_id", "owner"),
    [
        ("lock", "lock"),
        ("lock-1", "lock-1"),
        ("lock-1-ff", "lock-1"),
        ("lock-2", "lock"),
        ("hub-ab-cd", "hub"),
    ],
)
def test_an_id_that_begins_with_a_name_is_that_accounts_also_for_others(
    ids: ClientIds, client_id: str, owner: str
) -> None:
    for user in ("thief", owner, "thief"):
        assert ids.owner(client_id, user) == owner


def test_any_other_id_is_the_first_ones(ids: ClientIds) -> None:
    assert ids.owner("esp32", "lamp") == "lamp"
    assert ids.owner("esp32", "thief") == "lamp"
    assert ids.owner("lockpick", "thief") == "thief", "a name and a dash, not any beginning"


def test_an_account_with_many_ids_forgets_its_own_oldest_and_no_others(ids: ClientIds) -> None:
    ids.owner("esp32", "lamp")
    for n in range(10_000):
        ids.owner(f"x{n}", "thief")
    assert ids.owner("esp32", "thief") == "lamp"
    assert ids.owner("x9999", "lamp") == "thief"
    assert ids.owner("x0", "lamp") == "lamp"
    assert len(ids._owners) <= 6


def test_the_ids_of_an_account_that_is_gone_are_free(ids: ClientIds, names: set[str]) -> None:
    ids.owner("esp32", "lamp")
    names.discard("lamp")
    ids.forget("lamp")
    assert ids.owner("esp32", "lock") == "lock"
    assert ids.owner("lamp", "lock") == "lock"


def test_whose_an_id_is_is_known_after_a_restart(ids: ClientIds, names: set[str]) -> None:
    ids.owner("esp32", "lamp")
    assert ids.changed
    again = ClientIds(names.__contains__, remembered=3)
    again.restore(ids.used())
    assert not again.changed
    assert again.owner("esp32", "thief") == "lamp"
    assert not again.changed, "a refused one changes nothing"
    names.discard("lamp")
    assert again.owner("esp32", "thief") == "thief", "it was removed meanwhile"
    assert again.changed


def test_what_is_restored_takes_nothing_from_its_owner(ids: ClientIds) -> None:
    assert ids.owner("esp32", "lamp") == "lamp"
    ids.restore({"thief": ["esp32", "esp8266"]})
    assert ids.owner("esp32", "thief") == "lamp"
    assert ids.owner("esp8266", "lamp") == "thief"


def test_an_id_that_another_took_over_is_not_freed_with_its_first_account(
    ids: ClientIds, names: set[str]
) -> None:
    ids.owner("esp32", "lamp")
    names.discard("lamp")
    assert ids.owner("esp32", "lock") == "lock", "its owner is gone"
    ids.forget("lamp")
    assert ids.owner("esp32", "thief") == "lock"


def test_an_id_that_another_took_over_is_not_freed_when_its_first_account_has_too_many(
    ids: ClientIds, names: set[str]
) -> None:
    ids.owner("esp32", "lamp")
    names.discard("lamp")
    ids.owner("esp32", "lock")
    names.add("lamp")
    for n in range(3):
        ids.owner(f"board{n}", "lamp")
    assert ids.owner("esp32", "thief") == "lock"


def test_an_id_is_found_under_the_name_that_it_begins_with_also_if_that_account_is_gone(
    ids: ClientIds,
) -> None:
    ids.owner("esp32", "lamp")
    assert ids.find("lock-1-ff") == "lock-1"
    assert ids.find("door-ff", {"door"}) == "door", "its account was removed"
    assert ids.find("esp32") == "lamp"
    assert ids.find("unknown-id") == ""


def test_an_id_that_was_used_before_there_was_an_account_of_its_name_is_inherited(
    ids: ClientIds, names: set[str]
) -> None:
    ids.owner("door-ff", "lamp")
    names.add("door")
    assert ids.owner("door-ff", "door") == "door"
    assert ids.is_inherited("door-ff", "door")
    ids.release("door-ff")
    assert not ids.is_inherited("door-ff", "door")
    assert ids.used().get("lamp", []) == []
    ids.release("door-ff")
    assert ids.owner("door-ff", "door") == "door"
