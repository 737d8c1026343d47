"""duly: messages that take effect once, in the right order, and tell their sender how it ended.

Open a ledger, then let functions run once on it, or admit messages yourself:

>>> import asyncio, duly
>>> async def main():
...     async with await duly.open_ledger("memory:") as ledger:
...         open_door = duly.Message("app-1", "1702234567890_7", "lock_control", "lock-1", b"{}", time=0)
...         lasting = duly.Horizon(keep=10**18)
...         first = await ledger.admit(open_door, horizon=lasting)
...         again = await ledger.admit(open_door, horizon=lasting)
...         return first.word.value, again.word.value, again.state.word
>>> asyncio.run(main())
('fresh', 'duplicate', 'accepted')

All errors are one tree, in `duly.errors`; the branches that a caller acts on are here.

`import duly` loads the errors alone. A name comes with the modules it needs when it is first used, so that a
program pays for the parts that it has.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from duly import errors
from duly.errors import (
    Conflict,
    DeviceError,
    DulyError,
    Failed,
    LedgerError,
    LedgerUnavailable,
    Refused,
    SenderError,
    Stale,
    TaskFailed,
    Unknown,
    Unstorable,
)
from duly.extras import needed_for

if TYPE_CHECKING:
    from duly.clients.app import App
    from duly.clients.chat import Chat
    from duly.clients.consumer.consumer import Consumer
    from duly.clients.consumer.queue_message import Outcome, QueueMessage
    from duly.clients.device import Device
    from duly.clients.node.node import Node
    from duly.clients.node.statuses import NodeStatus
    from duly.clients.node.tasks import SentTask, Task
    from duly.clients.sentinel import Sentinel
    from duly.core.horizon import Horizon
    from duly.core.lifecycle import State
    from duly.core.messages import Answer, Message, Mode, Order, Verdict, VerdictKind
    from duly.core.monitor.signals import SentinelPolicy
    from duly.core.retry import RetryPolicy
    from duly.run_block import once_block
    from duly.run_once import once
    from duly.storage import open_ledger
    from duly.storage.ledger import Ledger, Transaction
else:

    def __getattr__(name: str) -> object:
        """Load a public name when it is first used."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'duly' has no attribute {name!r}")
        with needed_for(f"duly.{name}"):
            value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value

    def __dir__() -> list[str]:
        """List the public names, also those that were not used yet."""
        return sorted({*globals(), *__all__})


_MODULE_OF = {
    "Answer": "duly.core.messages",
    "App": "duly.clients.app",
    "Chat": "duly.clients.chat",
    "Consumer": "duly.clients.consumer.consumer",
    "Device": "duly.clients.device",
    "Horizon": "duly.core.horizon",
    "Ledger": "duly.storage.ledger",
    "Message": "duly.core.messages",
    "Mode": "duly.core.messages",
    "Node": "duly.clients.node.node",
    "NodeStatus": "duly.clients.node.statuses",
    "Order": "duly.core.messages",
    "Outcome": "duly.clients.consumer.queue_message",
    "QueueMessage": "duly.clients.consumer.queue_message",
    "RetryPolicy": "duly.core.retry",
    "SentTask": "duly.clients.node.tasks",
    "Sentinel": "duly.clients.sentinel",
    "SentinelPolicy": "duly.core.monitor.signals",
    "State": "duly.core.lifecycle",
    "Task": "duly.clients.node.tasks",
    "Transaction": "duly.storage.ledger",
    "Verdict": "duly.core.messages",
    "VerdictKind": "duly.core.messages",
    "once": "duly.run_once",
    "once_block": "duly.run_block",
    "open_ledger": "duly.storage",
}
"""Where the names are that `import duly` does not load."""


__all__ = [
    "Answer",
    "App",
    "Chat",
    "Conflict",
    "Consumer",
    "Device",
    "DeviceError",
    "DulyError",
    "Failed",
    "Horizon",
    "Ledger",
    "LedgerError",
    "LedgerUnavailable",
    "Message",
    "Mode",
    "Node",
    "NodeStatus",
    "Order",
    "Outcome",
    "QueueMessage",
    "Refused",
    "RetryPolicy",
    "SenderError",
    "SentTask",
    "Sentinel",
    "SentinelPolicy",
    "Stale",
    "State",
    "Task",
    "TaskFailed",
    "Transaction",
    "Unknown",
    "Unstorable",
    "Verdict",
    "VerdictKind",
    "errors",
    "once",
    "once_block",
    "open_ledger",
]
