"""Carries out the verbs for the dashboard and the audit chain, with and without a running hub."""

from __future__ import annotations

import msgspec

from duly.core.units import SECOND
from duly.errors import Malformed
from duly.server.audit_chain import AuditChain
from duly.server.dashboard.access import LINK_LASTS, LOCAL, DashboardAccess
from duly.server.dashboard.visitors import DashboardRole
from duly.transports.http.query_options import number


async def administer(
    access: DashboardAccess, audit: AuditChain, base: str, verb: str, wanted: dict[str, str]
) -> dict[str, object]:
    """Carry out a verb; `base` is the address of the hub."""
    match verb:
        case "dashboard.link":
            role = DashboardRole.named(wanted.get("role", DashboardRole.ADMIN.word))
            name = wanted.get("name") or LOCAL
            token = await access.make_link(name, role)
            return {
                "url": f"{base}/login#{token}",
                "name": name,
                "role": role.word,
                "seconds": LINK_LASTS // SECOND,
            }
        case "dashboard.password":
            role = DashboardRole.named(wanted.get("role", DashboardRole.OPERATOR.word))
            await access.set_password(wanted["name"], wanted["password"], role)
            return {"name": wanted["name"], "role": role.word}
        case "dashboard.remove":
            return {"changed": await access.remove_user(wanted["name"])}
        case "dashboard.logout":
            return {"ended": await access.end_sessions(wanted.get("name", ""))}
        case "dashboard.users":
            return {"users": await access.users()}
        case "audit.list":
            before = wanted.get("before", "0")
            if not before.isdecimal():
                raise Malformed("before is the number of an entry")
            limit = number(wanted.get("limit"), 50, 10_000)
            entries, following = await audit.newest(limit, int(before))
            return {"entries": entries, "next": following}
        case "audit.verify":
            found: dict[str, object] = msgspec.to_builtins(await audit.verify(wanted.get("head", "")))
            return found
        case _:
            raise Malformed(f"there is no verb {verb!r}")
