"""Carries out the verbs of the command line at a running hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from duly.apps.alerts import verbs as alert_verbs
from duly.apps.alerts.heartbeats import presence
from duly.errors import DulyError, NotAllowed
from duly.identity.accounts import Principal, Role, administer
from duly.runtime.thresholds import judge
from duly.server import diagnostics
from duly.server.audited_verbs import audited
from duly.server.dashboard import verbs as dashboard_verbs
from duly.server.policies import command_timing
from duly.server.verb_arguments import read_arguments
from duly.transports.http import bodies, messages

if TYPE_CHECKING:
    from duly.server.hub import Hub


class Admin:
    """The administration of one hub, over HTTP at `/v1/admin/{verb}`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request of an admin."""
        try:
            who = await messages.entered(self._hub, request)
            if who.role is not Role.ADMIN:
                raise NotAllowed("only an admin may do that")
            wanted = read_arguments(await bodies.read(request))
            verb = request.match_info["verb"]
            result = await self.run(who, verb, wanted)
            record = audited(verb, wanted)
            if record is not None:
                await self._hub.dashboard.audit.add(who.name, who.role.value, *record)
        except DulyError as problem:
            return messages.problem(problem)
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    async def run(self, who: Principal, verb: str, wanted: dict[str, str]) -> object:
        """Carry out one verb, with its arguments, on behalf of an admin."""
        hub = self._hub
        match verb:
            case "temporary_token":
                return {"token": await hub.authenticator.temporary_token(wanted["name"])}
            case "login":
                name = wanted["name"]
                if await hub.accounts.find_role(name) is not Role.USER:
                    raise NotAllowed(f"there is no user {name}; 'duly add user {name}' makes one")
                return {"token": await hub.people.let_in(name, wanted.get("device", ""))}
            case "list":
                return await self._list(wanted)
            case "floor":
                return await hub.floor.administer(wanted)
            case "doctor":
                timing = command_timing(hub.settings)
                judged = {"thresholds": judge(await hub.measure())}
                found = await diagnostics.examine(hub.settings, timing, hub.ledger, hub.notifier)
                return hub.health.state() | judged | found
            case "prune" if "dry" in wanted:
                return await hub.maintenance.would_prune()
            case "prune":
                return await hub.maintenance.prune()
            case _ if verb.startswith(("dashboard.", "audit.")):
                page = hub.dashboard
                base = hub.settings.public_url or hub.url
                return await dashboard_verbs.administer(page.access, page.audit, base, verb, wanted)
            case _ if "." in verb:
                return await alert_verbs.administer(
                    hub.alerts.operations, hub.alerts.profiles, verb, wanted, who.name
                )
            case _:
                return await self._change_accounts(verb, wanted)

    async def _list(self, wanted: dict[str, str]) -> dict[str, object]:
        """Return all accounts and grants, with what is known of the presence of devices and sentinels."""
        hub = self._hub
        devices = [one.name for one in hub.accounts.list() if one.role is Role.DEVICE]
        sentinels = {one.name for one in hub.accounts.list() if one.role is Role.SENTINEL}
        seen = await presence(hub.ledger, sentinels)
        online = hub.alerts.online | set(seen["keeping"])
        result = await administer(hub.accounts, "list", wanted)
        return result | {
            "online": sorted({*hub.gateway.presence(), *online}),
            "heard": await hub.gateway.devices.last_heard(devices) | seen["heard"],
            "silent": seen["silent"],
        }

    async def _change_accounts(self, verb: str, wanted: dict[str, str]) -> dict[str, object]:
        hub = self._hub
        result = await administer(hub.accounts, verb, wanted)
        hub.revocation.announce()
        if verb in ("add", "remove"):
            # They used a token that is void now.
            await hub.revocation.disconnect(frozenset({wanted["name"]}))
        await hub.revocation.review()
        if verb == "remove":
            await hub.people.log_out_everywhere(wanted["name"])
        if verb in ("add", "remove"):
            await hub.chat.remove_from_chat()
        return result
