"""Alerts: sentinels report events, and people are notified."""
