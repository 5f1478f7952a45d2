"""What connections cost that are watched: heartbeats, channels that reconnect, idle detection.

`python -m benchmarks.connections` runs all of it, prints the figures, and writes them to
`docs/benchmarks/connections.md`. What is measured runs in a process of its own (`child.py`), and so
does the far side (`far.py`, `server.py`).

How to read the figures. CPU is user and system time of the whole process that is measured, gRPC's
threads too. Subjects that are compared by what a call costs take turns in bursts, as in
`benchmarks.calls`; the ratios are medians of those within a round. Heartbeats are measured for
whole intervals, all subjects at once, each in a process of its own: what idles does not disturb.

`scale.py` says how much is measured, `subjects.py` who, `channels.py` what their channels are made
of; `heartbeats.py`, `calls.py`, `replacing.py` (with `outages.py`), `frozen.py`, `serving.py` and
`churn.py` how. `verdict.py` holds the targets.
"""
