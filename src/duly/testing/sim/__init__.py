"""Simulation: whole worlds of senders, a hub and receivers, in virtual time, from one seed.

plan.py      what a seed means: how many, how bad
network.py   drops, repeats, delays, cuts
disk.py      a ledger whose process may die around every commit
nodes.py     the production machines and engine, with a wire between them
world.py     one run: faults, then calm, then replays of old frames; and its log
checkers.py  what must hold, seen from outside
gateway.py   the same course of events with the production gateway, apps and devices
chat.py      and with people who chat
tower.py     a fanout with bad channels, and what must hold of it
sentinels.py sentinels and a tower: signals, countdowns, corrections; and what must hold of them
runner.py    many seeds, shrinking, the report
"""

from __future__ import annotations

from duly.testing.sim.runner import WORLDS, SimReport, Violation, hush, run_seed, run_seeds

__all__ = ["WORLDS", "SimReport", "Violation", "hush", "run_seed", "run_seeds"]
