"""Hubs that read only which accounts and grants have changed know as much as hubs that read everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from duly.core.operations import CheckItem, DropItem, PutItem
from duly.errors import DulyError, LedgerUnavailable
from duly.identity import account_directory, accounts
from duly.identity.account_changes import (
    ACCOUNTS_VERSION,
    KEPT,
    MOST,
    NOTES,
    changed_between,
    new_version,
    noted,
    notes_between,
    unrelated_version,
)
from duly.identity.account_directory import GRANTS, PRINCIPALS, WHOLE, AccountDirectory
from duly.identity.accounts import TRIES, Accounts, Principal, Role
from duly.identity.known_accounts import AccountBook
from duly.identity.model import StoredAccount
from duly.storage.memory import Disk, MemoryLedger
from duly.storage.postgres.ledger import PostgresLedger
from duly.testing.loops import VirtualLoop
from tests import servers

Patch = pytest.MonkeyPatch
APPS, DEVICES, USERS = ["a1", "a2"], ["d1", "d2"], ["u1", "u2"]
ROLES = {**dict.fromkeys(APPS, Role.APP), **dict.fromkeys(DEVICES, Role.DEVICE)}


class SlowAccountsLedger(MemoryLedger):
    """A ledger that others write too, whose reads and writes take a while, and which counts the rows that are
    read."""

    def __init__(self, disk: Disk, random: Random | None = None) -> None:
        super().__init__(disk=disk)
        self.sole = False
        self.rows = self.whole = 0
        self.away = False
        self._random = random

    def quick(self) -> None:
        self.away, self._random = False, None

    def fail(self) -> None:
        self.away = self._random is not None

    async def _wait(self) -> None:
        if self.away:
            raise LedgerUnavailable("it is away")
        if self._random is not None:
            await asyncio.sleep(self._random.random() ** 3)

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        await self._wait()
        found = await super().bucket(bucket)
        self.rows += len(found)
        self.whole += bucket == PRINCIPALS
        await self._wait()
        return found

    async def items(self, places: Any) -> list[bytes | None]:
        await self._wait()
        found = [await MemoryLedger.item(self, *place) for place in places]
        self.rows += len(found)
        await self._wait()
        return found

    async def item(self, bucket: str, name: str) -> bytes | None:
        return (await self.items([(bucket, name)]))[0]

    async def commit(self, groups: Any) -> Any:
        await self._wait()
        done = await super().commit(groups)
        await self._wait()
        return done


class HubOfAccounts:
    """A hub that looks once a second, and that has a connection of every account that it knows."""

    def __init__(self, disk: Disk, random: Random | None = None) -> None:
        self.disk, self.ledger = disk, SlowAccountsLedger(disk, random)
        self.accounts = Accounts(self.ledger)
        self.connected: dict[str, Principal] = {}

    async def look(self) -> None:
        try:
            for name in await self.accounts.catch_up():
                self.connected.pop(name, None)
        except LedgerUnavailable:
            return
        for name, who in self.accounts._book.standing.items():
            self.connected.setdefault(name, who)

    async def change(self, random: Random) -> None:
        mine = self.accounts
        app, device, user = random.choice(APPS), random.choice(DEVICES), random.choice(USERS)
        name = random.choice([app, device])
        match random.randrange(10):
            case 0 | 1 | 2:
                await mine.add(ROLES[name], name, replace=True)
                self.connected.pop(name, None)
            case 3:
                name = random.choice([name, user])
                await mine.remove(name)
                self.connected.pop(name, None)
            case 4 | 5:
                await mine.grant(app, device)
            case 6:
                await mine.revoke(app, device)
            case 7:
                await mine.register(user, "a hash")
            case 8:
                await mine.confirmed(random.choice([name, user]))
            case _:
                await mine.find_grant(Principal(app, Role.APP), device)


async def change_as_before(ledger: MemoryLedger, random: Random) -> None:
    """What a hub of the version before writes: the version, and no note."""
    app, device, version = random.choice(APPS), random.choice(DEVICES), unrelated_version()
    match random.randrange(3):
        case 0:
            epoch = random.getrandbits(40)
            stored = StoredAccount(Role.APP, "", 1, voided=epoch)
            write = CheckItem(PRINCIPALS, app, then=(PutItem(PRINCIPALS, app, msgspec.json.encode(stored)),))
            await ledger.write(write, PutItem(*ACCOUNTS_VERSION, version))
        case 1:
            grants = [DropItem(GRANTS, f"{app}/{each}") for each in DEVICES]
            await ledger.write(DropItem(PRINCIPALS, app), *grants, PutItem(*ACCOUNTS_VERSION, version))
        case _:
            put = PutItem(GRANTS, f"{app}/{device}", b"")
            await ledger.write(put, PutItem(*ACCOUNTS_VERSION, version))


async def misjudged(hub: HubOfAccounts, disk: Disk) -> list[str]:
    """Of what this hub does not know what the ledger says, or has not been told to hang up."""
    fresh = Accounts(SlowAccountsLedger(disk))
    await fresh.refresh()
    book, right = hub.accounts._book, fresh._book
    wrong = [name for name, body in book.bodies.items() if right.bodies.get(name) != body]
    wrong += [name for name in right.bodies if name not in book.bodies and name not in USERS]
    for part in ("granted", "apps_of", "dangling", "by_token", "once"):
        if getattr(book, part) != getattr(right, part):
            wrong.append(part)
    wrong += [f"connection of {name}" for name, who in hub.connected.items() if not fresh.is_current(who)]
    return wrong


def play(scene: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(scene)


# ── the checker: hubs that do anything at random, and the bugs that it has to notice ─────────────


def wrong_after(seed: int) -> list[str]:
    """Let three hubs change accounts at random, now and then without the ledger, in some runs beside a hub of
    the version before. Returns what they do not know at the end."""
    wrong: list[str] = []

    async def scene() -> None:
        random, disk, loop = Random(seed), Disk(), asyncio.get_running_loop()
        hubs = [HubOfAccounts(disk, random) for _ in range(3)]
        older = SlowAccountsLedger(disk, random) if seed % 3 == 0 else None

        async def look(hub: HubOfAccounts) -> None:
            while True:
                await asyncio.sleep(random.random() * 2)
                await hub.look()

        async def act(do: Callable[[Random], Awaitable[None]], ledger: SlowAccountsLedger, most: int) -> None:
            for _ in range(random.choice([3, most])):
                await asyncio.sleep(random.random() * random.choice([0.1, 3]))
                ledger.away = False
                if random.random() < 0.2:  # perhaps between a commit and its answer
                    loop.call_later(random.random() * 2, ledger.fail)
                try:
                    await do(random)
                except DulyError:
                    continue

        async def change_older(random: Random) -> None:
            assert older is not None
            await change_as_before(older, random)

        looking = [asyncio.ensure_future(look(hub)) for hub in hubs]
        acting = [act(hub.change, hub.ledger, 25) for hub in hubs]
        if older is not None:
            acting.append(act(change_older, older, 4))
        await asyncio.gather(*acting)
        for hub in hubs:
            hub.ledger.quick()
        await asyncio.sleep(20)  # what was slow has ended, and all have looked
        for hub in hubs:
            wrong.extend(await misjudged(hub, disk))
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    play(scene())
    return wrong


class InterruptedLedger(SlowAccountsLedger):
    """A ledger that lets something else happen when a read of something has ended, once."""

    def __init__(self, disk: Disk, read: str, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__(disk)
        self.read: str | None = read
        self.meanwhile = meanwhile

    async def _interrupt(self, *read: str) -> None:
        if self.read in read:
            self.read = None
            await self.meanwhile()

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        found = await super().bucket(bucket)
        await self._interrupt(bucket)
        return found

    async def items(self, places: Any) -> list[bytes | None]:
        found = await super().items(places)
        await self._interrupt(*(name for _, name in places))
        return found


def wrong_after_a_late_read() -> list[str]:
    """Let a person be removed, and the hub learn that, while an older read of the account is under way."""
    wrong: list[str] = []

    async def scene() -> None:
        disk = Disk()
        one, other = HubOfAccounts(disk), HubOfAccounts(disk)

        async def remove() -> None:
            await other.accounts.remove("u1")
            await one.accounts.revoke("a1", "d1")

        one.accounts.items._ledger = InterruptedLedger(disk, "u1", remove)
        await other.accounts.add(Role.APP, "a1")
        await one.accounts.refresh()
        await other.accounts.register("u1", "a hash")
        await one.accounts.confirmed("u1")
        await one.look()
        wrong.extend(await misjudged(one, disk))

    play(scene())
    return wrong


def wrong_after_a_torn_read(*, confirmed: bool) -> list[str]:
    """Let a hub of the version before make an account and its grant while all accounts have been read and the
    grants have not. With `confirmed` the account connects before it is read."""
    wrong: list[str] = []

    async def scene() -> None:
        disk = Disk()
        older = SlowAccountsLedger(disk)
        app = PutItem(PRINCIPALS, "a1", msgspec.json.encode(StoredAccount(Role.APP, "", 1)))
        device = PutItem(PRINCIPALS, "d1", msgspec.json.encode(StoredAccount(Role.DEVICE, "", 1)))
        version = [PutItem(*ACCOUNTS_VERSION, unrelated_version()) for _ in range(2)]
        await older.write(device, version[0])
        one = HubOfAccounts(disk)
        one.accounts._ledger = InterruptedLedger(
            disk, PRINCIPALS, lambda: older.write(app, PutItem(GRANTS, "a1/d1", b""), version[1])
        )
        await one.accounts.refresh()
        if confirmed:
            await one.accounts.confirmed("a1")
        await one.look()
        wrong.extend(await misjudged(one, disk))

    play(scene())
    return wrong


def is_noticed(seeds: int = 60) -> bool:
    directed = [
        wrong_after_a_late_read(),
        *(wrong_after_a_torn_read(confirmed=each) for each in (False, True)),
    ]
    return any(directed) or any(wrong_after(seed) for seed in range(seeds))


def no_name_is_noted(patch: Patch) -> None:
    patch.setattr(accounts, "noted", lambda before, after, names, writes: noted(before, after, [], writes))


def the_version_before_is_not_checked(patch: Patch) -> None:
    def unchecked(before: Any, after: bytes, names: Any, writes: Any) -> Any:
        checked: Any = noted(before, after, names, writes)
        return checked if before is None else CheckItem(*ACCOUNTS_VERSION, then=checked.then)

    patch.setattr(accounts, "noted", unchecked)


def a_broken_chain_is_passed_over(patch: Patch) -> None:
    def bold(*args: Any) -> set[str]:
        return changed_between(*args) or set()

    patch.setattr(account_directory, "changed_between", bold)


def the_chain_is_not_followed(patch: Patch) -> None:
    def trusting(seen: Any, now: Any, notes: Any) -> set[str]:
        return {name for body in notes if body for name in msgspec.json.decode(body)["names"] or ()}

    patch.setattr(account_directory, "changed_between", trusting)


def removals_are_not_read(patch: Patch) -> None:
    update = AccountDirectory._update

    def keep(self: AccountDirectory, found: Mapping[str, bytes | None]) -> None:
        update(self, {name: body for name, body in found.items() if body is not None})

    patch.setattr(AccountDirectory, "_update", keep)


def a_failed_read_counts(patch: Patch) -> None:
    read = AccountDirectory._read

    async def careless(self: AccountDirectory, names: set[str]) -> Any:
        version, found = await read(self, set())
        try:
            _, found = await read(self, names)
        except LedgerUnavailable:
            self.version = version
            raise
        return version, found

    patch.setattr(AccountDirectory, "_read", careless)


def an_earlier_read_may_win(patch: Patch) -> None:
    patch.setattr(AccountDirectory, "_doubt", lambda self, name: None)


def a_lapse_is_not_reported(patch: Patch) -> None:
    update = AccountDirectory._update

    def silent(self: AccountDirectory, found: Mapping[str, bytes | None]) -> None:
        before = set(self._lapsed)
        update(self, found)
        self._lapsed = before

    patch.setattr(AccountDirectory, "_update", silent)


def only_what_differs_is_judged_again(patch: Patch) -> None:
    update = AccountDirectory._update

    def careless(self: AccountDirectory, found: Mapping[str, bytes | None]) -> None:
        bodies = self._book.bodies
        update(self, {each: body for each, body in found.items() if "/" in each or body != bodies.get(each)})

    patch.setattr(AccountDirectory, "_update", careless)


def grants_are_judged_once(patch: Patch) -> None:
    patch.setattr(AccountBook, "link_again", lambda self, name: None)


def rows_are_read_before_the_notes(patch: Patch) -> None:
    async def hasty(self: AccountDirectory, *names: str) -> None:
        _, found = await self._read(set(self._book.bodies) | set(APPS) | set(DEVICES))
        version, _ = await self._read(set())
        self._update(found)
        self.version = version

    patch.setattr(AccountDirectory, "_read_changes", hasty)


BUGS: list[Callable[[Patch], None]] = [
    no_name_is_noted,
    the_version_before_is_not_checked,
    a_broken_chain_is_passed_over,
    the_chain_is_not_followed,
    removals_are_not_read,
    a_failed_read_counts,
    an_earlier_read_may_win,
    a_lapse_is_not_reported,
    grants_are_judged_once,
    only_what_differs_is_judged_again,
    rows_are_read_before_the_notes,
]


def test_hubs_know_what_the_others_have_changed() -> None:
    assert [(seed, wrong) for seed in range(60) if (wrong := wrong_after(seed))] == []
    assert wrong_after_a_late_read() == []
    assert wrong_after_a_torn_read(confirmed=False) == wrong_after_a_torn_read(confirmed=True) == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_in_reading_changes_is_noticed(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert is_noticed()


# ── what is read ─────────────────────────────────────────────────────────────────────────────────


async def two_hubs(present: int) -> tuple[HubOfAccounts, HubOfAccounts]:
    """Two hubs that know so many accounts and half as many grants, and have read nothing since."""
    disk = Disk()
    stored: dict[str, bytes] = {}
    for n in range(present):
        role = Role.APP if n % 2 else Role.DEVICE
        stored[f"n{n}"] = msgspec.json.encode(StoredAccount(role, f"{n:064x}", 1))
    disk.buckets[PRINCIPALS] = stored
    disk.buckets[GRANTS] = {f"n{n}/n{n - 1}": b"" for n in range(1, present, 2)}
    one, two = HubOfAccounts(disk), HubOfAccounts(disk)
    for name in ("a1", "d1"):
        await one.accounts.add(ROLES[name], name)
    for hub in (one, two):
        await hub.accounts.refresh()
        hub.ledger.rows = hub.ledger.whole = 0
    return one, two


@pytest.mark.parametrize("present", [10, 3_000])
def test_what_a_change_reads_does_not_grow_with_what_is_there(present: int) -> None:
    async def scene() -> None:
        one, two = await two_hubs(present)
        changes: list[tuple[Callable[[], Awaitable[object]], int, int]] = [
            (lambda: one.accounts.add(Role.DEVICE, "d2"), 3, 5),  # a name, its former one, and the version
            (lambda: one.accounts.grant("a1", "d2"), 3, 5),
            (lambda: one.accounts.revoke("a1", "d2"), 1, 5),
            (lambda: one.accounts.add(Role.APP, "a1", replace=True), 3, 5),
            (lambda: one.accounts.grant("n1", "n4"), 3, 5),
            (lambda: one.accounts.remove("n1"), 2, 7),  # the account and its two grants
        ]
        for change, here, there in changes:
            await change()
            assert one.ledger.rows == here
            await two.accounts.catch_up()
            assert two.ledger.rows == there
            await two.accounts.catch_up()
            assert two.ledger.rows == there + 1, "the version alone"
            one.ledger.rows = two.ledger.rows = 0
        assert one.ledger.whole == two.ledger.whole == 0
        assert await misjudged(two, two.disk) == []

    play(scene())


def test_many_changes_between_two_looks_are_read_by_name_and_more_than_are_noted_in_full() -> None:
    async def scene() -> None:
        one, two = await two_hubs(0)
        for n in range(KEPT):
            await one.accounts.add(Role.DEVICE, f"x{n % 50}", replace=True)
        await two.accounts.catch_up()
        assert two.ledger.whole == 0
        for n in range(KEPT + 1):
            await one.accounts.add(Role.DEVICE, f"x{n % 50}", replace=True)
        await two.accounts.catch_up()
        assert two.ledger.whole == 1
        assert await misjudged(two, two.disk) == []
        assert len(two.disk.buckets[NOTES]) == KEPT

    play(scene())


def test_a_change_of_more_names_than_a_note_has_is_read_in_full() -> None:
    before, after = new_version(None), new_version(new_version(None))
    for count, changed in ((MOST, {f"n{n}" for n in range(MOST)}), (MOST + 1, None)):
        write: Any = noted(before, after, [f"n{n}" for n in range(count)], [])
        note = next(each for each in write.then if each.bucket == NOTES)
        assert notes_between(before, after) == [(NOTES, note.name)]
        assert changed_between(before, after, [note.body]) == changed
    assert changed_between(before, after, [None]) is None
    assert changed_between(before, after, [b"rubbish"]) is None
    assert changed_between(before, after, []) is None


def test_beside_a_hub_of_the_version_before_both_see_each_change() -> None:
    """Such a hub writes another version, without a note; and it reads everything when the version is not the
    one that it has read."""

    async def scene() -> None:
        one, two = await two_hubs(10)
        older = SlowAccountsLedger(one.disk)
        seen = {await older.item(*ACCOUNTS_VERSION)}
        for n in range(4):
            name, version = f"x{n}", PutItem(*ACCOUNTS_VERSION, unrelated_version())
            body = msgspec.json.encode(StoredAccount(Role.APP, "", 1))
            await older.write(PutItem(PRINCIPALS, name, body), version)
            if n % 2:
                await one.accounts.grant("a1", "d1" if n == 1 else "n0")
                seen.add(await older.item(*ACCOUNTS_VERSION))
            await two.accounts.catch_up()
            assert two.accounts.stored_role(name) is Role.APP
            assert two.ledger.whole == n + 1
        assert len(seen) == 3
        await one.accounts.revoke("a1", "d1")
        await two.accounts.catch_up()
        assert two.ledger.whole == 4, "by its note again"
        assert await misjudged(two, two.disk) == []

    play(scene())


def test_what_no_version_tells_is_found_within_an_hour() -> None:
    async def scene() -> None:
        one, two = await two_hubs(10)
        await two.look()
        await one.ledger.write(DropItem(PRINCIPALS, "n1"))
        await two.look()
        assert two.accounts.stored_role("n1") is Role.APP
        await asyncio.sleep(WHOLE)
        assert await two.accounts.catch_up() == {"n1"}
        assert two.accounts.stored_role("n1") is None

    play(scene())


def test_a_hub_that_is_always_overtaken_still_revokes() -> None:
    async def scene() -> None:
        one, two = await two_hubs(10)
        await one.accounts.grant("a1", "d1")
        overtaken = 0

        async def overtake() -> None:
            nonlocal overtaken
            overtaken += 1
            await one.accounts.add(Role.DEVICE, "d2", replace=True)
            slow.read = "accounts"

        two.accounts._ledger = slow = InterruptedLedger(two.disk, "accounts", overtake)
        assert await two.accounts.revoke("a1", "d1")
        slow.read = None
        assert overtaken > TRIES
        await one.look()
        assert not one.accounts.granted("a1")
        for hub in (one, two):
            await hub.look()
            assert await misjudged(hub, hub.disk) == []

    play(scene())


async def test_on_postgresql_hubs_that_change_accounts_at_once_know_all_changes(
    postgres_server: servers.Postgres,
) -> None:
    url = postgres_server.create_database()
    async with (
        await PostgresLedger.open(url) as first,
        await PostgresLedger.open(url) as second,
        await PostgresLedger.open(url) as third,
    ):
        hubs = [Accounts(ledger) for ledger in (first, second, third)]
        for hub in hubs:
            await hub.refresh()

        async def change(n: int, hub: Accounts) -> None:
            for k in range(8):
                app, device = f"app-{n}-{k}", f"device-{n}-{k}"
                await hub.add(Role.APP, app)
                await hub.add(Role.DEVICE, device)
                await hub.grant(app, device)
                await (hub.revoke(app, device) if k % 2 else hub.remove(device))
                await hub.catch_up()

        await asyncio.gather(*(change(n, hub) for n, hub in enumerate(hubs)))
        fresh = Accounts(first)
        await fresh.refresh()
        for hub in hubs:
            await hub.catch_up()
            assert hub.list() == fresh.list()
            assert hub._book.grants() == fresh._book.grants() == set()
            assert hub._book.by_token == fresh._book.by_token


async def test_on_postgresql_a_change_that_is_committed_late_is_made_again_at_the_new_version(
    postgres_server: servers.Postgres,
) -> None:
    """The row of the version is locked by a third transaction, which changes it, while a hub revokes."""
    url = postgres_server.create_database()
    async with await PostgresLedger.open(url) as first, await PostgresLedger.open(url) as second:
        one, two = Accounts(first), Accounts(second)
        await one.add(Role.APP, "phone")
        await one.add(Role.DEVICE, "lock")
        await one.grant("phone", "lock")
        await two.refresh()
        async with second.transaction() as other:
            await other.fetch("SELECT * FROM duly_items WHERE bucket = 'versions' FOR UPDATE")
            revoking = asyncio.ensure_future(one.revoke("phone", "lock"))
            await two.catch_up()
            assert two.granted("phone") == {"lock"}
            await other.execute(
                "UPDATE duly_items SET body = $1 WHERE bucket = 'versions' AND name = 'accounts'",
                unrelated_version(),
            )
            assert not revoking.done()
        assert await revoking
        await two.catch_up()
        assert two.granted("phone") == frozenset()
