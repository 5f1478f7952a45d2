"""What journals cost over their engines.

`python -m benchmarks.journal` runs all of it, prints the figures, and writes them to
`docs/benchmarks/journal.md`. Each engine is measured in a process of its own (`child.py`) beside
the same statements in the bare driver (`bare.py`), with the same durability and on the same server,
in turns. PostgreSQL and Redis are those of the tests' fixtures; what is not installed is left out,
with the reason.
"""
