"""A hub with devices, messages, alerts and people in it, for pictures and for tests of the page."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from duly.apps.alerts import verbs
from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.core.messages import key_of
from duly.core.units import MS
from duly.errors import DeviceError, DulyError
from duly.identity.accounts import Role
from duly.server.dashboard.visitors import DashboardRole
from tests.local_hub import LocalHub
from tests.server.dashboard.visiting import mint

DEVICES = ("front-door", "garage", "hall-lamp", "kitchen-lamp", "back-door")


class PopulatedHub(LocalHub):
    """A hub at which something has happened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, registration="open", allow_private_webhooks=True)
        self._things: list[Any] = []
        self.last_id = ""
        self.event = ("", "")
        self.ack = ""
        """the page behind the link of a notification"""

    async def start(self) -> None:
        await super().start()
        await self.add(Role.DEVICE, *DEVICES)
        await self.add(Role.NODE, "sensor-7")
        await self.add(Role.APP, "phone", "tablet")
        await self.add(Role.SENTINEL, "grandma-watch", "cellar")
        for device in DEVICES:
            await self.hub.accounts.grant("phone", device)
        for device in ("hall-lamp", "garage"):
            await self.hub.accounts.grant("tablet", device)
        for name in DEVICES[:4]:
            await self._device(name)
        await self._commands()
        await self._alerts()
        for name in ("ann", "bob"):
            await self.hub.people.register(name, "correct horse", "127.0.0.1", trusted=True)
            self.tokens[name] = await self.hub.people.let_in(name)
        audit = self.hub.dashboard.audit
        await audit.add("ann", "operator", "alert.ack", f"cellar {self.event[1]}", "on my way")
        reason = "vic has the role viewer; this needs operator"
        await audit.add("vic", "viewer", "command.send", "front-door lock_control", "", f"refused: {reason}")
        for who, to, text in (
            ("ann", "bob", "Is the garage door closed?"),
            ("bob", "ann", "The motor is blocked. I am on my way."),
        ):
            frame = {"type": "one_chat", "seq_id": mint(), "to": to, "data": {"text": text}}
            await self._post(who, frame)

    async def _device(self, name: str) -> None:
        device = Device(self.url, self.tokens[name])

        @device.on("lock_control")
        async def lock_control(command: Command) -> dict[str, Any]:
            if name == "garage":
                raise DeviceError(3, "the motor is blocked")
            return {"open": True}

        @device.on("dev_control")
        async def dev_control(command: Command) -> dict[str, Any]:
            return {"power": "on"}

        await device.__aenter__()
        self._things.append(device)
        await device.push(
            "status_report", {"battery": 87 - len(name), "rssi": -40 - len(name), "version": "2.4.1"}
        )

    async def _commands(self) -> None:
        app = App(self.url, self.tokens["phone"])
        await app.__aenter__()
        self._things.append(app)
        for turn in range(12):
            for name, kind in (("hall-lamp", "dev_control"), ("kitchen-lamp", "dev_control")):
                await app.send(name, kind, {"turn": turn})
        for device in ("garage", "back-door"):  # one has a blocked motor, the other is offline
            with suppress(DulyError):
                await app.send(device, "lock_control", {"open": True})
        self.last_id = mint()
        frame = {"type": "lock_control", "seq_id": self.last_id, "to": "front-door", "data": {"open": True}}
        await self._post("phone", frame, again=True)

    async def _post(self, who: str, frame: dict[str, Any], *, again: bool = False) -> None:
        heads = {"Authorization": f"Bearer {self.tokens[who]}"}
        async with aiohttp.ClientSession(self.url, headers=heads) as http:
            async with http.post("/v1/messages", json=frame) as answer:
                assert answer.status in (200, 202), await answer.text()
            if again:
                async with http.post("/v1/messages", json=frame) as repeated:
                    assert (await repeated.json())["code"] == 5, "it is the same message"

    async def _alerts(self) -> None:
        alerts = self.hub.alerts
        draft = {
            "send": ["file:told.txt", "http://127.0.0.1:9/hook"],
            "tries": 1,
            "escalate": [[900, "file:more.txt"]],
        }
        await alerts.profiles.set("home", verbs.draft_of(draft))
        now = round(time.time() * 1000)
        for i, (reason, severity, who) in enumerate(
            [
                ("fall detected", "critical", "grandma-watch"),
                ("water on the floor", "warning", "cellar"),
                ("battery low", "info", "grandma-watch"),
                ("fall detected", "critical", "grandma-watch"),
            ]
        ):
            data = {
                "profile_id": "home",
                "trigger_reason": reason,
                "severity": severity,
                "timestamp": now - 60_000 * (3 - i),
                "device_address": "wrist" if who == "grandma-watch" else "pump",
                "session_id": "s1" if who == "grandma-watch" else "",
            }
            await self._post(who, {"type": "alert_event", "seq_id": f"{i:064x}", "data": data})
        self.event = ("cellar", f"{1:064x}")
        for sentinel, event in (("grandma-watch", f"{0:064x}"), self.event):
            await self.hub.ledger.wait(key_of(sentinel, event), 1.0)
        assert alerts.links is not None
        link = alerts.links.make(key_of(*self.event), "file:told.txt", now * MS)
        self.ack = link.removeprefix(self.url)

    async def be_busy(self) -> None:
        """Send commands until it is cancelled, now more and now fewer of them."""
        async with App(self.url, self.tokens["tablet"]) as app:
            for turn in itertools.count():
                together = 4 + round(3 * math.sin(turn / 15))
                await asyncio.gather(
                    *(app.send("hall-lamp", "dev_control", {"n": n}) for n in range(together))
                )
                if turn % 12 == 5:  # its motor is blocked
                    with suppress(DulyError):
                        await app.send("garage", "lock_control", {"open": True})
                if turn % 9 == 4:  # asked twice, done once
                    frame = {"type": "dev_control", "seq_id": mint(), "to": "hall-lamp", "data": {}}
                    await self._post("tablet", frame, again=True)
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        for thing in self._things:
            await thing.__aexit__(None, None, None)
        await super().stop()

    async def link(self, role: str = "admin", name: str = "local") -> str:
        token = await self.hub.dashboard.access.make_link(name, DashboardRole.named(role))
        return f"{self.url}/login#{token}"

    def pages(self) -> dict[str, tuple[str, str]]:
        """Every page: its address, and what is there when it is ready."""
        return {
            "overview": ("/", ".health .part"),
            "messages": ("/messages", "tbody tr"),
            "message": (f"/message?scope=phone&id={self.last_id}", ".timeline li"),
            "devices": ("/devices", "tbody tr"),
            "device": ("/device?name=front-door", "form"),
            "alerts": ("/alerts", ".tile"),
            "deadletters": ("/alerts?view=dead", ".tile"),
            "alert": (f"/alert?sentinel={self.event[0]}&event={self.event[1]}", "tbody tr"),
            "acknowledge": (self.ack, ".card form"),
            "chat": ("/chat", "form"),
            "api": ("/api", ".operation"),
            "audit": ("/audit", "tbody tr"),
        }

    async def chat_in(self, page: Any) -> None:
        """Log in to the chat as ann, and read what was said with bob."""
        await page.fill("form input[type=password]", "correct horse")
        await page.fill("form input:not([type=password])", "ann")
        await page.click("button[value=login]")
        await page.wait_for_selector(".chat-new", state="attached")
        await page.wait_for_selector(".bubble.mine")
        if not await page.locator(".chat-new").is_visible():
            await page.click(".chat-fold summary")
        await page.fill(".chat-new input >> nth=0", "bob")
        await page.click(".chat-new button")
        await page.wait_for_selector(".bubble.mine")
