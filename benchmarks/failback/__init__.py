"""What failback with a journal costs: appends by many threads, and ten million waiting calls.

`python -m benchmarks.failback` runs all of it, prints the figures, and writes them to
`docs/benchmarks/failback.md`. The journal is SQLite. `benchmarks.journal` measures the engines.
"""
