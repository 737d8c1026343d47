"""The commands whose apps are here and whose outcome may happen at another hub.

The laws. An app that was told that its command was taken is owed the outcome: the command is followed until
then, at whichever hub that happens. A hint says that a command has ended; one that is lost is made up for by
looking at what has been followed for a while. A command of unknown outcome is looked at on, since a late
answer may settle it.
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
"""The hint that this command has ended: scope/id."""
DOUBTS: Final = 200
"""Commands of unknown outcome whose late answer is still looked for."""


class FollowedCommands:
    """The commands that one hub follows."""

    def __init__(self, ledger: Ledger, notifier: Notifier, local: LocalGateway, tasks: Supervisor) -> None:
        self._ledger = ledger
        self._notifier = notifier
        self._local = local
        self._followed: dict[bytes, list[Origin]] = {}
        """the origins here that wait for the outcome of each command"""
        self._before: set[bytes] = set()
        """the commands that were followed at the last refresh"""
        self._doubts: OrderedDict[bytes, None] = OrderedDict()
        self._ends: CoalescedTask[bytes] = CoalescedTask(self._learn, tasks)
        notifier.listen(END, self._heard)

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> bool:
        """Note that an app was told that its command was taken, or is under way; whether it is followed."""
        if verdict.kind not in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
            return False
        if verdict.state is not None and verdict.state.terminal:
            return False
        origins = self._followed.setdefault(message.key, [])
        if origin is not None and origin not in origins:
            origins.append(origin)
        return True

    def ended(self, key: bytes, state: State) -> list[Origin]:
        """Hint to the other hubs that a command ended here; the origins here that followed it."""
        scope, id_ = names_in(key)
        self._notifier.hint(END, f"{scope}/{id_}")
        return self._close(key, state)

    async def refresh(self) -> None:
        """Look at what has been followed since the last refresh, and at what is in doubt."""
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
            # What is in doubt was told; but not to those who have followed it since.
            told = state is State.UNKNOWN and key in self._doubts and key not in self._followed
            if state.terminal and not told:
                self._local.tell_end(record, self._close(key, state))
