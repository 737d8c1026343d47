"""Simulation: worlds of senders, hubs and receivers that run in virtual time and follow from one seed.

plan.py           what a seed means: how many processes and messages, and how many faults
network.py        a network that loses, repeats and delays packets, and whose links are cut
sim_ledger.py     a ledger whose process may die around every commit
nodes.py          processes with the production machines and engine, connected by the network
world.py          one run: faults, then calm, then replays of old frames; and its log
checkers.py       what must hold, judged by the log alone
gateway.py        the same run with the production gateway, apps and devices
multi_hub.py      and with several hubs on one ledger; guests.py: an app that loses its grant at one of them
chat.py           and with people who chat
tower.py          a fanout with channels that fail
sentinels.py      sentinels and a tower: signals, countdowns, corrections
broker.py         an MQTT broker; peers.py: nodes that use it
mqtt.py           the gateway with MQTT devices, and attackers at their broker
push_checkers.py  what must hold of pushes and presence
runner.py         many seeds, shrinking, the report
"""

from __future__ import annotations

from duly.testing.sim.runner import WORLDS, SimReport, Violation, hush, run_seed, run_seeds

__all__ = ["WORLDS", "SimReport", "Violation", "hush", "run_seed", "run_seeds"]
