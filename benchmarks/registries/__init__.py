"""What a channel by name costs, and how fast a thousand see a thousand.

`python -m benchmarks.registries` runs all of it, prints the figures, and writes them to
`docs/benchmarks/registries.md`. What is measured runs in a process of its own (`child.py`), and so
do the servers that are called and the engines. Engines are those of the tests' fixtures
(`engines.py`); what is not installed here is left out, with the reason.

How to read the figures. A call's cost, and a pick's, is of subjects that take turns in bursts, as
in `benchmarks.calls`; the ratios are medians of those within a round. Converging is wall time on a
machine whose processors engine, publisher and all subscribers share.

`scale.py` says how much is measured, `subjects.py` who; `calls.py`, `picks.py`, `channel_picks.py`,
`converge.py` (with `rivals.py`) and `republish.py` how. `verdict.py` holds the targets.
"""
