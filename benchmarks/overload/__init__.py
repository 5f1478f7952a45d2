"""What a server does with more calls than it can execute: bare, with a fixed limit, with a kit.

`python -m benchmarks.overload` runs all cases, prints the figures, and writes them to
`docs/benchmarks/overload.md`. A case is a world, a handler, a variant of the server, a client and a
scenario (`cases.py`); `--only` takes the names of any of them.

The server (`server.py`) and the load (`load.py`) each have a process of their own. The load is
open-loop: calls begin when they are due, whatever became of the earlier ones. All processes read
the same monotonic clock, so the calls and the executions of handlers can be assigned to the phases
of a scenario. `runner.py` runs a case, and `figures.py` computes its figures.

The package `outage` is about clients: of a server that is down for a time, and of one with a broken
method. Its cases are a part of the same page.
"""
