"""The settings of a gateway: what it takes, how much may wait, and for how long."""

from __future__ import annotations

from msgspec import Struct

from duly.apps.gateway.control_policy import ControlPolicy
from duly.core.backlog import BacklogPolicy
from duly.core.flow_control import FlowWindow
from duly.core.units import DAY
from duly.wire import frames


class GatewayPolicy(Struct, frozen=True):
    """The settings of one gateway."""

    control: ControlPolicy = ControlPolicy()
    commands: frozenset[str] = frames.COMMANDS
    pushes: frozenset[str] = frames.PUSHES
    ahead: FlowWindow = FlowWindow(frames=256, bytes=512 * 1024)
    """what may be on its way to a device before it acknowledges"""
    backlog: BacklogPolicy = BacklogPolicy()
    """what may wait of one app, or for one device"""
    max_exp: int = 7 * DAY
    """how far away the `exp` of a command may be"""
