"""Proof: runs what is long by nature in parts, counts it, and writes the counts into docs/reliability.md.

parts.py     what is run: each part's command, its sizes, how a case is replayed
counts.py    what the programs of a part have counted
record.py    results as JSON: of the last run in proof/out, published in proof/results.json
document.py  the table of docs/reliability.md, in English and Chinese
hostile.py   hostile bytes for every decoder, by the million
hostile_webhooks.py  hostile answers for the webhooks of alerts
leaks.py     what a process holds, and whether that has grown
__main__.py  one run: goes on where the last one was stopped
"""
