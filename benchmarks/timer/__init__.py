"""Measures rpcwheel's timers beside those of Python, Java, Go and Rust.

`python -m benchmarks.timer` runs everything.

- `peers.py`: the processes that are measured, how they are started, and the protocol.
- `child.py`: the process for a timer of Python. Those for other languages are in
  `benchmarks/rivals`, with the versions of what they use. The first run downloads and builds them;
  it leaves out languages whose tools are not installed.
- `steps.py`: what is measured, how often, and in which order.
- `report.py`: the page `docs/benchmarks/timer.md`, with the targets.

Each timer has a process of its own. All costs are CPU time of that process, as the kernel counts
it: of all threads, so the work that a timer leaves to its own thread, to a garbage collector or to
a just-in-time compiler is included. The processes take turns, so that other programs on the machine
affect all of them, and the results are medians. Linux only.
"""
