"""What a timeout costs: rpcwheel's timers beside asyncio, uvloop, threading.Timer, sched and Netty.

`python -m benchmarks.timer` runs all of it, prints the figures, and writes them with a plot under
`docs/benchmarks/`. Each measurement runs in a process of its own (`child.py`), once with the
compiled form and once with the pure one; what is compared takes turns in one process, so that a
machine that slows down slows both.

How to read the figures. Costs are *CPU time of the whole process* per call, medians over rounds:
what other programs take away from us on a busy machine is not in them, what a timer's own thread
does is. The cycle collector runs as it does in any program, unless said otherwise. Latenesses,
rates of four threads and lengths of sleep are wall time, and mean something on a calm machine only.

`scale.py` says how much is measured, `subjects.py` what, the others how: `calls.py` (pair, start,
cancel), `million.py` (flatness, memory, garbage collection), `stalls.py`, `firing.py` (fire,
lateness), `idle.py`, `threads.py`, `netty.py`. `verdict.py` holds the targets.
"""
