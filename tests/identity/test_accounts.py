"""Who somebody is and what they may do: deny by default, tokens shown once, guessing slowed down."""

from __future__ import annotations

import asyncio
import re
import timeit
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duly.core import operations as w
from duly.errors import Conflict, Fault, Malformed, NotAllowed, NotAuthenticated, SenderError
from duly.identity.account_names import check_name
from duly.identity.accounts import Account, Accounts, Principal, Role
from duly.storage import open_ledger
from duly.storage.memory import Disk, MemoryLedger
from duly.testing import ManualClock
from tests import servers
from tests.at_once import at_once


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger(ManualClock())


@pytest.fixture
def accounts(ledger: MemoryLedger) -> Accounts:
    return Accounts(ledger)


def named(who: Principal | None) -> tuple[str, Role] | None:
    return None if who is None else (who.name, who.role)


def shared(disk: Disk) -> MemoryLedger:
    """A ledger that others write too, as PostgreSQL is."""
    ledger = MemoryLedger(ManualClock(), disk=disk)
    ledger.sole = False
    return ledger


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["a", "lock-1", "Front_Door.2", "7", "_x", "x" * 64, "a..b", "a--"])
def test_names_are_letters_digits_dot_underscore_and_dash(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "x" * 65, "a b", "a/b", "a+", "#", "$SYS", "ä", "a\n", "a\0", "\ud800", "a:b"]
)
async def test_other_names_are_refused_and_nothing_is_stored(accounts: Accounts, name: str) -> None:
    with pytest.raises(Malformed, match="cannot be a name"):
        await accounts.add(Role.APP, name)
    assert accounts.list() == ()


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", list(Role))
async def test_a_token_is_its_principals(accounts: Accounts, role: Role) -> None:
    token = await accounts.add(role, "somebody")
    assert named(accounts.authenticate(token)) == ("somebody", role)


async def test_a_token_is_long_random_and_known_by_its_prefix(accounts: Accounts) -> None:
    tokens = {await accounts.add(Role.APP, f"app-{i}") for i in range(20)}
    assert len(tokens) == 20
    assert all(re.fullmatch(r"duly_[A-Za-z0-9_-]{43}", token) for token in tokens)


async def test_the_ledger_does_not_hold_the_token(accounts: Accounts, ledger: MemoryLedger) -> None:
    token = await accounts.add(Role.APP, "app-1")
    for bucket in ledger.disk.buckets.values():
        for name, body in bucket.items():
            assert token[5:] not in name
            assert token[5:].encode() not in body


@given(st.text(st.characters(exclude_categories=())))
def test_anything_else_is_no_accounts_token(token: str) -> None:
    async def show() -> None:
        accounts = Accounts(MemoryLedger(ManualClock()))
        real = await accounts.add(Role.ADMIN, "root")
        for shown in (token, real + token if token else "", real[:-1], real.lower(), real[5:], "duly_"):
            assert shown == real or accounts.authenticate(shown) is None

    at_once(show())


async def test_authentication_is_quick_and_reads_no_ledger(accounts: Accounts) -> None:
    tokens = [await accounts.add(Role.DEVICE, f"d{i}") for i in range(200)]
    seconds = min(timeit.repeat(lambda: accounts.authenticate(tokens[77]), number=2_000, repeat=20)) / 2_000
    assert seconds < 10e-6, "2 µs is the aim; the rest is for a busy machine"


# ── adding, replacing, removing ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", list(Role))
async def test_a_name_is_given_once_whatever_the_role(accounts: Accounts, role: Role) -> None:
    token = await accounts.add(Role.DEVICE, "front")
    with pytest.raises(Conflict, match=r"'front' is taken \(device\); choose another"):
        await accounts.add(role, "front")
    assert named(accounts.authenticate(token)) == ("front", Role.DEVICE)


async def test_a_replaced_token_is_void_and_the_grants_stay(accounts: Accounts, ledger: MemoryLedger) -> None:
    old = await accounts.add(Role.APP, "app-1")
    await accounts.add(Role.DEVICE, "lock-1")
    await accounts.grant("app-1", "lock-1")
    (before, _) = accounts.list()
    assert isinstance(ledger.clock, ManualClock)
    ledger.clock.advance(60)
    new = await accounts.add(Role.APP, "app-1", replace=True)
    assert accounts.authenticate(old) is None
    assert named(accounts.authenticate(new)) == ("app-1", Role.APP)
    assert accounts.granted("app-1") == {"lock-1"}
    assert accounts.list()[0] == before


async def test_a_token_cannot_be_replaced_under_another_role(accounts: Accounts) -> None:
    token = await accounts.add(Role.APP, "x")
    with pytest.raises(Conflict, match=r"taken \(app\)"):
        await accounts.add(Role.ADMIN, "x", replace=True)
    assert named(accounts.authenticate(token)) == ("x", Role.APP)


async def test_replacing_what_is_not_there_makes_it(accounts: Accounts) -> None:
    token = await accounts.add(Role.APP, "x", replace=True)
    assert named(accounts.authenticate(token)) == ("x", Role.APP)


async def test_who_is_removed_is_unknown_and_the_next_of_that_name_inherits_nothing(
    accounts: Accounts,
) -> None:
    token = await accounts.add(Role.APP, "app-1")
    await accounts.add(Role.DEVICE, "lock-1")
    await accounts.grant("app-1", "lock-1")
    assert await accounts.remove("app-1")
    assert not await accounts.remove("app-1")
    assert accounts.authenticate(token) is None
    assert accounts.apps_of("lock-1") == frozenset()
    await accounts.add(Role.APP, "app-1")
    await accounts.refresh()
    assert not accounts.may(Principal("app-1", Role.APP), "lock-1")


async def test_accounts_are_listed_by_name(accounts: Accounts, ledger: MemoryLedger) -> None:
    await accounts.add(Role.USER, "eve")
    await accounts.add(Role.ADMIN, "bob")
    now = ledger.clock.now()
    assert accounts.list() == (
        Account("bob", Role.ADMIN, now),
        Account("eve", Role.USER, now),
    )


# ── grants ───────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_is_allowed_until_it_is_granted_and_not_after_it_is_revoked(accounts: Accounts) -> None:
    for role, name in (
        (Role.APP, "app-1"),
        (Role.APP, "app-2"),
        (Role.DEVICE, "lock-1"),
        (Role.DEVICE, "l-2"),
    ):
        await accounts.add(role, name)
    app = Principal("app-1", Role.APP)
    assert not accounts.may(app, "lock-1")
    assert await accounts.grant("app-1", "lock-1")
    assert not await accounts.grant("app-1", "lock-1"), "it was granted already"
    assert accounts.may(app, "lock-1")
    assert not accounts.may(app, "l-2")
    assert not accounts.may(Principal("app-2", Role.APP), "lock-1")
    assert accounts.granted("app-1") == {"lock-1"}
    assert accounts.apps_of("lock-1") == {"app-1"}
    assert await accounts.revoke("app-1", "lock-1")
    assert not await accounts.revoke("app-1", "lock-1")
    assert not accounts.may(app, "lock-1")
    assert (accounts.granted("app-1"), accounts.apps_of("lock-1")) == (frozenset(), frozenset())


async def test_an_admin_may_everything_as_long_as_he_is_one(accounts: Accounts) -> None:
    await accounts.add(Role.ADMIN, "root")
    root = Principal("root", Role.ADMIN)
    assert accounts.may(root, "anything")
    await accounts.remove("root")
    assert not accounts.may(root, "anything")


@pytest.mark.parametrize("role", [Role.DEVICE, Role.USER, Role.SENTINEL])
async def test_other_roles_may_command_nothing(accounts: Accounts, role: Role) -> None:
    await accounts.add(role, "x")
    await accounts.add(Role.DEVICE, "lock-1")
    with pytest.raises(Malformed, match="no app named 'x'"):
        await accounts.grant("x", "lock-1")
    assert not accounts.may(Principal("x", role), "lock-1")
    assert not accounts.may(Principal("x", role), "x")


async def test_a_principal_with_another_role_may_do_nothing(accounts: Accounts) -> None:
    await accounts.add(Role.APP, "app-1")
    assert not accounts.may(Principal("app-1", Role.ADMIN), "lock-1")
    assert not accounts.may(Principal("nobody", Role.ADMIN), "lock-1")


async def test_a_grant_names_an_app_and_a_device_that_are_there(accounts: Accounts) -> None:
    await accounts.add(Role.APP, "app-1")
    await accounts.add(Role.DEVICE, "lock-1")
    for app, device, missing in (
        ("app-2", "lock-1", "no app named 'app-2'"),
        ("app-1", "lock-2", "no device named 'lock-2'"),
        ("lock-1", "app-1", "no app named 'lock-1'"),
    ):
        with pytest.raises(Malformed, match=missing):
            await accounts.grant(app, device)
    assert accounts.granted("app-1") == frozenset()


# ── what is stored, and what others change ───────────────────────────────────────────────────────


async def test_everything_is_there_when_the_ledger_is_opened_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with await open_ledger(url) as ledger:
        accounts = Accounts(ledger)
        token = await accounts.add(Role.APP, "app-1")
        await accounts.add(Role.DEVICE, "lock-1")
        await accounts.grant("app-1", "lock-1")
        listed = accounts.list()
    async with await open_ledger(url + "?mode=ro") as ledger:
        accounts = Accounts(ledger)
        assert accounts.authenticate(token) is None, "nobody is known before the first refresh"
        assert await accounts.refresh() == frozenset()
        who = accounts.authenticate(token)
        assert who is not None
        assert accounts.may(who, "lock-1")
        assert accounts.list() == listed


async def test_what_another_process_changes_is_seen_after_a_refresh() -> None:
    disk = Disk()
    here, there = Accounts(shared(disk)), Accounts(shared(disk))
    stays, goes, turns = [await there.add(Role.APP, name) for name in ("stays", "goes", "turns")]
    assert here.authenticate(stays) is None
    assert await here.refresh() == frozenset()
    assert named(here.authenticate(stays)) == ("stays", Role.APP)

    await there.remove("goes")
    turned = await there.add(Role.APP, "turns", replace=True)
    assert await here.refresh() == {"goes", "turns"}, "whom to hang up on"
    assert [here.authenticate(token) is not None for token in (stays, goes, turns, turned)] == [
        True,
        False,
        False,
        True,
    ]
    assert await here.refresh() == frozenset()


async def test_a_change_is_made_to_what_stands_not_to_what_was_seen_last() -> None:
    disk = Disk()
    here, there = Accounts(shared(disk)), Accounts(shared(disk))
    await here.refresh()
    await there.add(Role.APP, "app-1")
    await there.add(Role.DEVICE, "lock-1")
    await there.grant("app-1", "lock-1")
    with pytest.raises(Conflict):
        await here.add(Role.USER, "app-1")
    assert await here.remove("app-1")
    await there.refresh()
    assert there.apps_of("lock-1") == frozenset()
    assert disk.buckets["grants"] == {}


async def test_a_grant_left_behind_by_a_race_is_of_no_effect_and_not_inherited() -> None:
    """One process grants while another removes the app: the grant is stored, and its app is gone."""
    disk = Disk()
    ledger = shared(disk)
    accounts = Accounts(ledger)
    await accounts.add(Role.DEVICE, "lock-1")
    await ledger.write(w.PutItem("grants", "app-1/lock-1", b""))
    await accounts.refresh()
    assert accounts.apps_of("lock-1") == accounts.granted("app-1") == frozenset()
    await accounts.add(Role.APP, "app-1")
    assert not accounts.may(Principal("app-1", Role.APP), "lock-1")
    await accounts.refresh()
    assert not accounts.may(Principal("app-1", Role.APP), "lock-1")


async def test_an_account_that_only_a_newer_duly_understands_is_not_let_in_and_locks_no_other_out(
    accounts: Accounts, ledger: MemoryLedger
) -> None:
    token = await accounts.add(Role.APP, "app-1")
    await ledger.write(
        w.PutItem("principals", "robot", b'{"role":"robot","token":"00","created":1}'),
        w.PutItem("principals", "later", b'{"role":"app","token":"01","created":1,"more":[1]}'),
        w.PutItem("principals", "rubbish", b"\xff"),
    )
    await accounts.refresh()
    assert accounts.authenticate(token) is not None
    assert [account.name for account in accounts.list()] == ["app-1", "later"]
    with pytest.raises(Conflict, match="'robot' is taken"):
        await accounts.add(Role.APP, "robot")


class Slow(MemoryLedger):
    """Reads take their time: what they return may be overtaken."""

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        found = await super().bucket(bucket)
        await asyncio.sleep(0)
        return found


async def test_a_refresh_under_way_does_not_bring_back_what_is_removed_meanwhile() -> None:
    accounts = Accounts(Slow(ManualClock()))
    gone = await accounts.add(Role.APP, "gone")
    refreshing = asyncio.ensure_future(accounts.refresh())
    await asyncio.sleep(0)
    await asyncio.gather(accounts.remove("gone"), refreshing)
    assert accounts.authenticate(gone) is None


@pytest.fixture
async def hubs(postgres_server: servers.Postgres) -> AsyncIterator[tuple[Accounts, Accounts]]:
    url = postgres_server.create_database()
    async with await open_ledger(url) as one, await open_ledger(url) as two:
        yield Accounts(one), Accounts(two)


async def test_of_two_hubs_that_give_the_same_name_one_does(hubs: tuple[Accounts, Accounts]) -> None:
    for i in range(10):
        made = await asyncio.gather(*(hub.add(Role.APP, f"app-{i}") for hub in hubs), return_exceptions=True)
        tokens = [token for token in made if isinstance(token, str)]
        assert [type(other) for other in made if not isinstance(other, str)] == [Conflict]
        for hub in hubs:
            await hub.refresh()
            assert named(hub.authenticate(tokens[0])) == (f"app-{i}", Role.APP)


# ── any sequence of changes ──────────────────────────────────────────────────────────────────────

APPS, DEVICES = ["a1", "a2"], ["d1", "d2"]


class AccountsAgreeWithAModel(RuleBasedStateMachine):
    """Two processes change what they like; a model says who may what."""

    def __init__(self) -> None:
        super().__init__()
        disk = Disk()
        self.both = (Accounts(shared(disk)), Accounts(shared(disk)))
        self.roles: dict[str, Role] = {}
        self.tokens: dict[str, str] = {}
        self.void: set[str] = set()
        self.grants: set[tuple[str, str]] = set()

    @rule(which=st.sampled_from([0, 1]), name=st.sampled_from(APPS + DEVICES), replace=st.booleans())
    def add(self, which: int, name: str, replace: bool) -> None:
        role = Role.APP if name in APPS else Role.DEVICE
        if name in self.roles and not replace:
            with pytest.raises(Conflict):
                at_once(self.both[which].add(role, name))
            return
        token = at_once(self.both[which].add(role, name, replace=replace))
        if name in self.tokens:
            self.void.add(self.tokens[name])
        self.roles[name], self.tokens[name] = role, token

    @rule(which=st.sampled_from([0, 1]), name=st.sampled_from(APPS + DEVICES))
    def remove(self, which: int, name: str) -> None:
        assert at_once(self.both[which].remove(name)) == (name in self.roles)
        if name in self.roles:
            self.void.add(self.tokens.pop(name))
            del self.roles[name]
        self.grants = {grant for grant in self.grants if name not in grant}

    @precondition(lambda self: {"a1", "d1"} <= self.roles.keys() or {"a2", "d2"} <= self.roles.keys())
    @rule(which=st.sampled_from([0, 1]), app=st.sampled_from(APPS), device=st.sampled_from(DEVICES))
    def grant(self, which: int, app: str, device: str) -> None:
        if app in self.roles and device in self.roles:
            assert at_once(self.both[which].grant(app, device)) == ((app, device) not in self.grants)
            self.grants.add((app, device))
        else:
            with pytest.raises(Malformed):
                at_once(self.both[which].grant(app, device))

    @rule(which=st.sampled_from([0, 1]), app=st.sampled_from(APPS), device=st.sampled_from(DEVICES))
    def revoke(self, which: int, app: str, device: str) -> None:
        assert at_once(self.both[which].revoke(app, device)) == ((app, device) in self.grants)
        self.grants.discard((app, device))

    @invariant()
    def both_say_what_the_model_says(self) -> None:
        for accounts in self.both:
            at_once(accounts.refresh())
            for name, token in self.tokens.items():
                assert named(accounts.authenticate(token)) == (name, self.roles[name])
            assert not any(accounts.authenticate(token) for token in self.void)
            for app in APPS:
                assert accounts.granted(app) == {d for a, d in self.grants if a == app}
                for device in DEVICES:
                    assert accounts.may(Principal(app, Role.APP), device) == ((app, device) in self.grants)
            for device in DEVICES:
                assert accounts.apps_of(device) == {a for a, d in self.grants if d == device}


TestAccountsAgreeWithAModel = AccountsAgreeWithAModel.TestCase


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "word"), [(NotAuthenticated, "not_authenticated"), (NotAllowed, "not_allowed")]
)
def test_both_refusals_are_the_senders_to_mend(error: type[SenderError], word: str) -> None:
    assert issubclass(error, SenderError)
    assert (error.word, error.fault, error.retry) == (word, Fault.SENDER, False)
