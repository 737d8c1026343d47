"""The settings of a gateway: what it accepts, how much may wait, and for how long."""

from __future__ import annotations

from msgspec import Struct

from duly.apps.gateway.command_timing import CommandTiming
from duly.core.backlog import BacklogPolicy
from duly.core.flow_control import FlowWindow
from duly.core.units import DAY
from duly.wire import frames


class GatewayPolicy(Struct, frozen=True):
    """The settings of one gateway."""

    timing: CommandTiming = CommandTiming()
    commands: frozenset[str] = frames.COMMANDS
    pushes: frozenset[str] = frames.PUSHES
    ahead: FlowWindow = FlowWindow(frames=256, bytes=512 * 1024)
    """how much may be under way to a device before it acknowledges"""
    backlog: BacklogPolicy = BacklogPolicy()
    """how much may wait from one app, or for one device"""
    max_exp: int = 7 * DAY
    """the furthest `exp` that a command may have"""
