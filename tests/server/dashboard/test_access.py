"""Who gets in: links once and in time, passwords not too often, sessions until they end, at every hub."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from duly.core.units import MINUTE
from duly.errors import Malformed, NotAllowed, NotAuthenticated, TooManyLogins
from duly.runtime.clock import SystemClock
from duly.server.dashboard.access import (
    LINK_LASTS,
    LINKS,
    SESSION_LASTS,
    SESSIONS,
    USERS,
    DashboardAccess,
    csrf_token,
)
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from duly.storage.ledger import Ledger
from duly.storage.memory import MemoryLedger
from duly.storage.secret_box import make_key, read_key

HERE = "192.0.2.1"


class ClockAhead(SystemClock):
    """The system's clock, ahead by as much as a test says."""

    ahead = 0

    def now(self) -> int:
        return super().now() + self.ahead


@pytest.fixture
def clock() -> ClockAhead:
    return ClockAhead()


@pytest.fixture
async def ledger(clock: ClockAhead) -> AsyncIterator[Ledger]:
    async with MemoryLedger(clock) as book:
        yield book


@pytest.fixture
def access(ledger: Ledger, tmp_path: Path) -> DashboardAccess:
    make_key(tmp_path / "secret.key")
    return DashboardAccess(ledger, read_key(tmp_path / "secret.key"))


async def refused(login: Awaitable[object]) -> type[Exception]:
    """Why a login was refused."""
    with pytest.raises(NotAuthenticated) as problem:
        await login
    return problem.type


# ── links ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_link_opens_one_session_and_is_void_then(access: DashboardAccess) -> None:
    token = await access.make_link("ann", DashboardRole.VIEWER)
    opened = await access.follow_link(token, HERE)
    assert (opened.visitor.name, opened.visitor.role) == ("ann", DashboardRole.VIEWER)
    with pytest.raises(NotAuthenticated, match="used already"):
        await access.follow_link(token, HERE)


async def test_a_link_expires(access: DashboardAccess, clock: ClockAhead) -> None:
    token = await access.make_link()
    clock.ahead = LINK_LASTS
    with pytest.raises(NotAuthenticated):
        await access.follow_link(token, HERE)


async def test_links_and_sessions_are_stored_as_hashes(access: DashboardAccess, ledger: Ledger) -> None:
    link = await access.make_link()
    assert link not in str(await ledger.bucket(LINKS))
    opened = await access.follow_link(await access.make_link(), HERE)
    assert opened.token not in str(await ledger.bucket(SESSIONS))


async def test_links_cannot_be_guessed_at_will(access: DashboardAccess) -> None:
    token = await access.make_link()
    tries = [await refused(access.follow_link(f"guess{n}", HERE)) for n in range(30)]
    assert tries.count(TooManyLogins) > 5
    other = await access.follow_link(token, "198.51.100.9")
    assert other.visitor.name == "local", "others get in all the same"


# ── passwords ────────────────────────────────────────────────────────────────────────────────────


async def test_a_password_opens_a_session_with_the_role_that_was_set(access: DashboardAccess) -> None:
    await access.set_password("ann", "correct horse", DashboardRole.OPERATOR)
    opened = await access.log_in("ann", "correct horse", HERE)
    assert opened.visitor.role is DashboardRole.OPERATOR
    assert await access.users() == {"ann": "operator"}


@pytest.mark.parametrize(("name", "password"), [("ann", "wrong horse"), ("bob", "correct horse"), ("", "")])
async def test_a_wrong_name_and_a_wrong_password_get_the_same_answer(
    access: DashboardAccess, name: str, password: str
) -> None:
    await access.set_password("ann", "correct horse", DashboardRole.OPERATOR)
    with pytest.raises(NotAuthenticated, match="the name or the password is wrong"):
        await access.log_in(name, password, HERE)


async def test_passwords_cannot_be_guessed_at_will(access: DashboardAccess) -> None:
    await access.set_password("ann", "correct horse", DashboardRole.OPERATOR)
    tries = [await refused(access.log_in("ann", f"guess number {n}", HERE)) for n in range(30)]
    assert tries.count(TooManyLogins) > 5


async def test_a_password_is_stored_sealed(access: DashboardAccess, ledger: Ledger) -> None:
    await access.set_password("ann", "correct horse", DashboardRole.ADMIN)
    stored = str(await ledger.bucket(USERS))
    assert "argon2" not in stored
    assert "horse" not in stored


async def test_a_new_password_ends_the_sessions_of_the_old_one(access: DashboardAccess) -> None:
    await access.set_password("ann", "correct horse", DashboardRole.OPERATOR)
    opened = await access.log_in("ann", "correct horse", HERE)
    await access.set_password("ann", "other battery", DashboardRole.VIEWER)
    assert await access.visitor(opened.token) is None
    assert (await access.log_in("ann", "other battery", HERE)).visitor.role is DashboardRole.VIEWER


async def test_a_removed_user_is_out_at_once(access: DashboardAccess) -> None:
    await access.set_password("ann", "correct horse", DashboardRole.OPERATOR)
    opened = await access.log_in("ann", "correct horse", HERE)
    assert await access.remove_user("ann")
    assert await access.visitor(opened.token) is None
    with pytest.raises(NotAuthenticated):
        await access.log_in("ann", "correct horse", HERE)


@pytest.mark.parametrize("password", ["short", "", "x" * 2_000])
async def test_a_password_that_is_too_short_or_too_long_is_refused(
    access: DashboardAccess, password: str
) -> None:
    with pytest.raises(Malformed, match="8 to 1024"):
        await access.set_password("ann", password, DashboardRole.VIEWER)


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_session_holds_at_every_hub_on_the_ledger_and_ends_at_all(
    access: DashboardAccess, ledger: Ledger
) -> None:
    opened = await access.follow_link(await access.make_link(), HERE)
    other = DashboardAccess(ledger, None)
    seen = await other.visitor(opened.token)
    assert seen is not None
    assert await other.end_session(seen.session)
    assert await access.visitor(opened.token) is None


async def test_a_session_that_is_used_goes_on_and_one_that_is_not_ends(
    access: DashboardAccess, clock: ClockAhead
) -> None:
    opened = await access.follow_link(await access.make_link(), HERE)
    clock.ahead = SESSION_LASTS - MINUTE
    assert await access.visitor(opened.token) is not None
    clock.ahead = 2 * SESSION_LASTS - 2 * MINUTE
    assert await access.visitor(opened.token) is not None
    clock.ahead = 4 * SESSION_LASTS
    assert await access.visitor(opened.token) is None


async def test_all_sessions_of_a_name_can_be_ended(access: DashboardAccess) -> None:
    mine = [await access.follow_link(await access.make_link("ann"), HERE) for _ in range(3)]
    other = await access.follow_link(await access.make_link("bob"), HERE)
    assert await access.end_sessions("ann") == 3
    assert [await access.visitor(one.token) for one in mine] == [None] * 3
    assert await access.visitor(other.token) is not None


@pytest.mark.parametrize("token", ["", "x", "\ud800", "x" * 10_000])
async def test_what_is_no_token_is_no_session(access: DashboardAccess, token: str) -> None:
    assert await access.visitor(token) is None


async def test_the_csrf_token_belongs_to_its_session(access: DashboardAccess) -> None:
    one = await access.follow_link(await access.make_link(), HERE)
    other = await access.follow_link(await access.make_link(), HERE)
    assert csrf_token(one.token) == csrf_token(one.token) != csrf_token(other.token)


def test_roles_are_ordered() -> None:
    operator = DashboardVisitor("ann", DashboardRole.OPERATOR)
    operator.need(DashboardRole.VIEWER)
    operator.need(DashboardRole.OPERATOR)
    with pytest.raises(NotAllowed, match="ann has the role operator"):
        operator.need(DashboardRole.ADMIN)
    with pytest.raises(Malformed, match="viewer, operator, admin"):
        DashboardRole.named("root")
