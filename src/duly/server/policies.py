"""Derives the policies of the applications from the settings."""

from __future__ import annotations

from pathlib import Path

from duly.apps.alerts.alert_queries import CHANNEL
from duly.apps.alerts.archive import Archive
from duly.apps.gateway.admission import CHUNK_HORIZON
from duly.apps.gateway.command_timing import CommandTiming
from duly.apps.gateway.policy import GatewayPolicy
from duly.core.account_limits import LimitPolicy
from duly.core.backlog import BacklogPolicy
from duly.core.fanout.plan import FanoutPolicy
from duly.core.horizon import Horizon
from duly.core.monitor.event_times import AHEAD
from duly.core.units import DAY, HOUR, seconds
from duly.settings import Settings


def command_timing(settings: Settings) -> CommandTiming:
    """Return how commands are ordered, remembered and given up."""
    return CommandTiming(
        window=seconds(settings.window),
        max_age=seconds(settings.max_age),
        remember=seconds(settings.remember),
        patience=seconds(settings.patience),
    )


def gateway_policy(settings: Settings) -> GatewayPolicy:
    """Return how the gateway treats commands, and how many it keeps for a device that is offline."""
    return GatewayPolicy(
        timing=command_timing(settings),
        backlog=BacklogPolicy(settings.max_queued, settings.max_queued_bytes),
        max_exp=seconds(settings.max_exp),
    )


def limit_policy(settings: Settings) -> LimitPolicy:
    """Return how much one account may send and store."""
    return LimitPolicy(
        commands=settings.commands_per_minute,
        lines=settings.lines_per_minute,
        pushes=settings.pushes_per_minute,
        alerts=settings.alerts_per_minute,
        stored_mb=settings.stored_mb_per_day,
        groups=settings.groups_per_day,
    )


def floor_tolerance(settings: Settings) -> int:
    """Return how far in the future the floor of the ledger may be before a new message is refused as
    stale."""
    horizons = (CHUNK_HORIZON, command_timing(settings).horizon())
    return min(HOUR, *(horizon.keep + horizon.skew for horizon in horizons))


def fanout_policy(settings: Settings) -> FanoutPolicy:
    """Return how long alerts and their ids are kept."""
    return FanoutPolicy(
        CHANNEL,
        horizon=Horizon(keep=round(settings.alerts_remembered * DAY), skew=AHEAD),
        keep=round(settings.alerts_kept * DAY),
    )


def deliveries_kept(settings: Settings) -> int:
    """Return how long the deliveries of an alert are kept, in microseconds."""
    return round(settings.deliveries_kept * DAY)


def archive_of(settings: Settings) -> Archive:
    """Return the archive of alerts that the ledger has forgotten."""
    return Archive(Path(settings.data) / "archive", round(settings.archives_kept * DAY))
