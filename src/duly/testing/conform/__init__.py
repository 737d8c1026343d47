"""Plays a hostile hub, broker or peer against a client, and says which rules the client breaks.

The rules are a table (`rules`), the scripts that prove them are data (`receiver_scripts`, `app_run`,
`sentinel_run`), and `run` plays them over a WebSocket or an MQTT broker that this process plays itself.
"""

from __future__ import annotations

from duly.testing.conform.rules import RULES, BrokenRule, ConformRule, Noun
from duly.testing.conform.run import ConformReport, ConformRun, RuleResult

__all__ = ["RULES", "BrokenRule", "ConformReport", "ConformRule", "ConformRun", "Noun", "RuleResult"]
