"""Programs of a test's own in virtual time, on a network and disks with faults: what `simulate` is made of.

faults.py    what goes wrong in a run, and its short name
history.py   what an observer outside saw, and the checkers that judge it
process.py   what a program sees of its process: transport, memory, clients
clients.py   the production clients, connected to the simulated hub and broker
world.py     one run
search.py    many runs, shrinking, the report
"""
