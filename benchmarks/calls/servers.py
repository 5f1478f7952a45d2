"""The cost of interceptors of servers: the CPU time of the servers' process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import grpc

from benchmarks._clock import Cost
from benchmarks.calls.scale import Row, Scale, World
from benchmarks.calls.server_process import ServerProcess
from benchmarks.calls.subjects import callers, measures, subjects
from benchmarks.calls.sync_client import LOOPS
from benchmarks.calls.turns import take_turns


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each kind of call and each subject; all are called through a bare channel."""
    rows = []
    names = subjects("server", world)
    with ServerProcess(world, *names) as server, ExitStack() as stack:
        channels = {
            name: stack.enter_context(grpc.insecure_channel(server.targets[name])) for name in names
        }
        for what in measures("server"):
            bursts = {
                name: partial(
                    burst, server, LOOPS[what](channels[name], scale, timeout), scale.units(what)
                )
                for name, timeout in callers("server", world, what)
            }
            taken = take_turns(bursts, rounds=scale.turns(what), warm_up=scale.warm_up)
            rows += taken.rows("server", world, what)
    return rows


def burst(server: ServerProcess, work: Callable[[], None], units: int) -> Cost:
    """The cost of the work in the servers' process, for each of its units."""
    used_ns, began_ns = server.cpu_ns(), time.perf_counter_ns()
    work()
    wall_ns = time.perf_counter_ns() - began_ns
    return Cost((server.cpu_ns() - used_ns) / units, wall_ns / units)
