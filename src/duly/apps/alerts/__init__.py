"""Alerts: sentinels report, people are told."""
