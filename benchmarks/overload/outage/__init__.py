"""What clients do to a server that is down for a time, and what they get when it has returned.

Also: what becomes of the calls of nine methods while a tenth one is broken. It is a part of
`python -m benchmarks.overload`; its cases are `OutageCase`s. All clients of a scenario and a world
run at the same time, each in a process of its own, with a server of its own (`runner.py`).
"""
