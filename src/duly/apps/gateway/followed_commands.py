"""The commands of apps at this hub that may end at another hub.

The laws. An app whose command was accepted gets its outcome, whichever hub the command ends at; until then
the command is followed. A hint reports that a command has ended; if a hint is lost, a regular check of the
followed commands finds it. A command whose outcome is unknown is checked further, since a late answer may
settle it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from duly.apps.gateway.local_gateway import LocalGateway
from duly.cluster.notifier import Notifier
from duly.cluster.remote import CoalescedTask
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, VerdictKind, key_of, names_in
from duly.core.steps import Origin
from duly.errors import Malformed
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger

END: Final = "end"
"""The hint that a command has ended: scope/id."""
DOUBTS: Final = 200
"""The most commands of unknown outcome that are checked for a late answer."""


class FollowedCommands:
    """The commands that one hub follows."""

    def __init__(self, ledger: Ledger, notifier: Notifier, local: LocalGateway, tasks: Supervisor) -> None:
        self._ledger = ledger
        self._notifier = notifier
        self._local = local
        self._followed: dict[bytes, list[Origin]] = {}
        """the origins at this hub that wait for the outcome, by command"""
        self._before: set[bytes] = set()
        """the commands that were followed at the last refresh"""
        self._doubts: OrderedDict[bytes, None] = OrderedDict()
        self._ends: CoalescedTask[bytes] = CoalescedTask(self._learn, tasks)
        notifier.listen(END, self._heard)

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> bool:
        """Note that an app was told that its command is accepted or under way; return whether it is
        followed."""
        if verdict.kind not in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
            return False
        if verdict.state is not None and verdict.state.terminal:
            return False
        origins = self._followed.setdefault(message.key, [])
        if origin is not None and origin not in origins:
            origins.append(origin)
        return True

    def ended(self, key: bytes, state: State) -> list[Origin]:
        """Hint to the other hubs that a command ended here, and return the origins here that followed it."""
        scope, id_ = names_in(key)
        self._notifier.hint(END, f"{scope}/{id_}")
        return self._close(key, state)

    async def refresh(self) -> None:
        """Check the commands that were followed before the last refresh, and those of unknown outcome."""
        still = [key for key in self._followed if key in self._before]
        self._before = set(self._followed)
        apps = self._local.sessions.apps
        await self._learn([*still, *(key for key in self._doubts if names_in(key)[0] in apps)])

    def _close(self, key: bytes, state: State) -> list[Origin]:
        origins = self._followed.pop(key, [])
        if state is State.UNKNOWN:
            self._doubts[key] = None
            if len(self._doubts) > DOUBTS:
                self._doubts.popitem(last=False)
        else:
            self._doubts.pop(key, None)
        return origins

    def _heard(self, name: str) -> None:
        scope, _, id_ = name.partition("/")
        with suppress(Malformed):
            key = key_of(scope, id_)
            if key in self._followed or scope in self._local.sessions.apps:
                self._ends.want(key)

    async def _learn(self, keys: Collection[bytes]) -> None:
        for record in await self._ledger.find_all(keys):
            key, state = record.message.key, record.state
            # An unknown outcome was reported, but not to origins that have followed it since.
            told = state is State.UNKNOWN and key in self._doubts and key not in self._followed
            if state.terminal and not told:
                self._local.tell_end(record, self._close(key, state))
