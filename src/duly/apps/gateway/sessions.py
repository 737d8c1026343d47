"""Gateway sessions: which apps and devices are connected to this hub.

The law: a device has one session, its newest; an app may have several.
"""

from __future__ import annotations

from duly.identity.accounts import Accounts
from duly.wire.session import Session


class GatewaySessions:
    """The sessions of one gateway, by name."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.devices: dict[str, Session] = {}
        self.apps: dict[str, list[Session]] = {}

    def add_app(self, name: str, session: Session) -> None:
        """Add the session of an app."""
        self.apps.setdefault(name, []).append(session)

    def remove_app(self, name: str, session: Session) -> None:
        """Remove a session, whether or not it is an app's."""
        sessions = self.apps.get(name, [])
        if session in sessions:
            sessions.remove(session)
            if not sessions:
                del self.apps[name]

    def of(self, name: str) -> list[Session]:
        """Return all sessions of an app or a device."""
        device = self.devices.get(name)
        return [*self.apps.get(name, ()), *([] if device is None else [device])]

    def listeners(self, device: str) -> list[Session]:
        """Return the sessions of the apps that may see a device."""
        apps = self._accounts.apps_of(device)
        return [session for app in sorted(apps) for session in self.apps.get(app, ())]

    def grants(self) -> list[tuple[Session, str]]:
        """Return each app session with every device that it may see."""
        return [
            (session, device)
            for app, sessions in self.apps.items()
            for device in sorted(self._accounts.granted(app))
            for session in sessions
        ]
