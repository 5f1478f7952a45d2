"""What failback costs: appends by many threads, ten million waiting calls, and a long queue.

`python -m benchmarks.failback` runs all of it, prints the figures, and writes them to
`docs/benchmarks/failback.md`. The journal is SQLite. `benchmarks.journal` measures the engines.
"""
