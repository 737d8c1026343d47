"""A ledger with something in every table, as a hub leaves it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from duly.core import operations as w
from duly.core.high_water import mark_name
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Order
from duly.core.units import DAY
from duly.identity.accounts import Accounts, Role
from duly.runtime import durable_totals, trail
from duly.server.audit_chain import AuditChain
from duly.storage.ledger import Ledger
from duly.storage.secret_box import open_box, shared_secret
from tests.storage.making import message

MADE_MS = 1_700_000_000_000
NOW = MADE_MS * 1_000 + 1_000
UNTIL = NOW + DAY


def command(n: int) -> Message:
    """Returns a command with a place in its lane."""
    return message(n, ms=MADE_MS + n, order=Order("door", n=n))


async def fill_up(ledger: Ledger, data: Path) -> None:
    """Writes commands that are done, open and unknown, an alert, a chat, accounts, secrets and records."""
    done, waiting, alert = (
        command(1),
        command(2),
        Message("gate", "e1", "alert_event", "home", b"{}", time=NOW),
    )
    ref = w.DeliveryRef(done.key, "device", "lock-1")
    await ledger.write(
        w.Admit(done, UNTIL, NOW, State.SENT, (w.Deliver(ref, NOW, 0, 1, "hub-1"),)),
        w.RaiseMark(mark_name(done), 1, MADE_MS + 1),
        w.Advance(done.key, State.DONE, NOW, Answer(0, b'{"ok":true}', "opened")),
        w.Finish(ref, 1, State.DONE),
        w.Admit(waiting, UNTIL, NOW, then=(w.Deliver(w.DeliveryRef(waiting.key, "device", "lock-1"), NOW),)),
        w.Admit(
            alert, UNTIL, NOW, listed=True, then=(w.Deliver(w.DeliveryRef(alert.key, "alert", "mail"), NOW),)
        ),
        w.AppendEntry("conv", b"hello", NOW, done.key),
        w.AppendEntry("conv", b"\xff\x00 bytes", NOW),
        w.AppendEntry("conv", b"bye", NOW),
        w.MoveCursor("conv", "ann", 2),
        w.RecordRefusal("app-1", "bad\u200bid", "stale", "too old", NOW),
        w.PutItem(trail.HUBS, "hub-1", b""),
        w.AppendEntry("trail/hub-1", (20).to_bytes(8, "big") + msgspec.msgpack.encode((NOW, {})), NOW),
        w.PutItem(durable_totals.BUCKET, "hub-1", msgspec.msgpack.encode((NOW, [("duly_x_total", (), 3)]))),
    )
    box = await open_box(ledger, data)
    assert box is not None
    accounts = Accounts(ledger, box)
    await accounts.add(Role.APP, "phone")
    await accounts.add(Role.DEVICE, "lock")
    await accounts.grant("phone", "lock")
    await shared_secret(ledger, box, "cursors")
    await AuditChain(ledger).add("local", "admin", "add", "phone")
    await AuditChain(ledger).add("local", "admin", "add", "lock")
